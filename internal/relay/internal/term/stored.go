package term

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"sync"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/relay/readiness"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// storedTopics implements pipeline.StoredTopics. An envelope that waits or is dead stays in its outbox, so a sweep reads it and must
// not send it again. The set of the first read rules out nearly all envelopes; the others are looked up.
type storedTopics struct {
	calls   *readiness.Calls
	store   *waiting.Store
	letters *mongo.Collection
	claims  *mongo.Collection
	watcher string

	mu     sync.Mutex
	loaded bool
	ids    []storedID // sorted
	lists  [][]string // of topics
}

// storedID is an envelope that was stored at the first read.
type storedID struct {
	digest [sha256.Size / 2]byte // of namespace, id and stamp; half a digest is enough for any number of envelopes
	list   uint32                // index of its topics: few lists serve a million envelopes
}

// TopicsOf implements pipeline.StoredTopics.
func (s *storedTopics) TopicsOf(ctx context.Context, ns string, raw bson.Raw) (topics []string, found bool, err error) {
	if err := s.load(ctx); err != nil {
		return nil, false, err
	}
	id, stamp := raw.Lookup("_id"), outboxes.Stamp(raw)
	before := s.topicsBefore(ns, id, stamp)
	if before == nil {
		// The purge stamps an envelope that had no stamp when it was stored.
		if stamp.IsZero() || s.topicsBefore(ns, id, bson.Timestamp{}) == nil {
			return nil, false, nil
		}
		stamp = bson.Timestamp{}
		if raw, err = outboxes.WithoutField(raw, "ts"); err != nil {
			return nil, false, fmt.Errorf("reading an envelope of %s: %w", ns, err)
		}
	}

	err = s.calls.RetryRead(ctx, func(ctx context.Context) error {
		topics = nil
		err := s.store.OfIDs(ctx, ns, []bson.RawValue{id}, func(document *waiting.Document) error {
			// Another envelope with this id may wait, or another delivery of this one.
			if document.Delivery > 0 || !bytes.Equal(document.Envelope, raw) {
				return nil
			}
			if document.Pending == nil {
				topics = append(topics, "")
			}
			topics = append(topics, document.Pending...)
			return nil
		})
		if err != nil {
			return err
		}
		digest := letters.DigestOf(raw)
		return letters.Known(ctx, s.letters, s.watcher, ns, []bson.RawValue{id}, func(mark letters.Mark) error {
			// The letter may be that of an earlier envelope with this id.
			if mark.Delivery == 0 && bytes.Equal(mark.Digest, digest) {
				topics = append(topics, mark.Topic)
			}
			return nil
		})
	})
	// The topics of the first read have the envelope, or a letter of it, unless it is still stored for them. The others do not. Without a stamp,
	// the first read may have found another envelope with this id: then the present envelope is sent, flagged as redelivered.
	if err == nil && !stamp.IsZero() {
		topics = append(topics, before...)
	}
	slices.Sort(topics)
	return slices.Compact(topics), err == nil && len(topics) > 0, err
}

// topicsBefore returns the topics for which an envelope with this id and stamp was stored at the first read, or nil if there was none.
func (s *storedTopics) topicsBefore(ns string, id bson.RawValue, stamp bson.Timestamp) (topics []string) {
	digest := digestID(ns, id, stamp)
	i, _ := slices.BinarySearchFunc(s.ids, storedID{digest: digest}, storedID.compare)
	for ; i < len(s.ids) && s.ids[i].digest == digest; i++ {
		topics = append(topics, s.lists[s.ids[i].list]...)
	}
	return topics
}

// load reads the ids and topics of all stored envelopes, once in a term. Envelopes that are stored later are not swept again in this term.
func (s *storedTopics) load(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.loaded {
		return nil
	}

	err := s.calls.RetryRead(ctx, func(ctx context.Context) error {
		s.ids, s.lists = s.ids[:0], nil
		known := map[string]uint32{}
		add := func(ns string, id bson.RawValue, stamp bson.Timestamp, topics ...string) error {
			// No list stands for all topics.
			if topics == nil {
				topics = []string{""}
			}
			// No topic contains a comma.
			name := strings.Join(topics, ",")
			list, isKnown := known[name]
			if !isKnown {
				list = uint32(len(s.lists))
				known[name], s.lists = list, append(s.lists, topics)
			}
			s.ids = append(s.ids, storedID{digestID(ns, id, stamp), list})
			return nil
		}
		err := s.store.EachStamp(ctx, func(document *waiting.Document) error {
			return add(document.NS, document.ID, outboxes.Stamp(document.Envelope), document.Pending...)
		})
		if err != nil {
			return err
		}
		// With `recording: mark`, a claimed envelope stays in its outbox.
		err = waiting.EachClaim(ctx, s.claims, s.watcher, func(claim *waiting.Claim) error {
			for i := range claim.Envelopes {
				claimed := &claim.Envelopes[i]
				if err := add(claimed.NS, claimed.Raw.Lookup("_id"), outboxes.Stamp(claimed.Raw)); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		return letters.Each(ctx, s.letters, s.watcher, func(mark letters.Mark) error { return add(mark.NS, mark.ID, mark.Stamp, mark.Topic) })
	})
	if err != nil {
		return err
	}

	slices.SortFunc(s.ids, storedID.compare)
	s.loaded = true
	return nil
}

func digestID(ns string, id bson.RawValue, stamp bson.Timestamp) (digest [sha256.Size / 2]byte) {
	id = letters.ShortID(id)
	sum := sha256.New()
	sum.Write([]byte(ns))
	sum.Write([]byte{0, byte(id.Type)})
	sum.Write(id.Value)
	sum.Write(binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, stamp.T), stamp.I))
	copy(digest[:], sum.Sum(nil))
	return digest
}

func (id storedID) compare(other storedID) int { return bytes.Compare(id.digest[:], other.digest[:]) }
