package term

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
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
	ids    [][sha256.Size / 2]byte // sorted digests of namespace, id and stamp; half a digest is enough for any number of envelopes
}

// TopicsOf implements pipeline.StoredTopics.
func (s *storedTopics) TopicsOf(ctx context.Context, ns string, raw bson.Raw) (topics []string, found bool, err error) {
	if err := s.load(ctx); err != nil {
		return nil, false, err
	}
	id, stamp := raw.Lookup("_id"), outboxes.Stamp(raw)
	if !s.has(ns, id, stamp) {
		// The purge stamps an envelope that had no stamp when it was stored.
		if stamp.IsZero() || !s.has(ns, id, bson.Timestamp{}) {
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
	if err != nil || len(topics) > 0 {
		return topics, err == nil, err
	}

	// It waited when the sweep began, so it was sent since. Without a stamp, it may be another envelope with this id: then it is sent,
	// flagged as redelivered.
	return []string{""}, !stamp.IsZero(), nil
}

// has reports whether an envelope with this id and stamp was stored at the first read.
func (s *storedTopics) has(ns string, id bson.RawValue, stamp bson.Timestamp) bool {
	_, found := slices.BinarySearchFunc(s.ids, digestID(ns, id, stamp), compareDigests)
	return found
}

// load reads the ids of all stored envelopes, once in a term. Envelopes that are stored later are not swept again in this term.
func (s *storedTopics) load(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.loaded {
		return nil
	}

	err := s.calls.RetryRead(ctx, func(ctx context.Context) error {
		s.ids = s.ids[:0]
		add := func(ns string, id bson.RawValue, stamp bson.Timestamp) error {
			s.ids = append(s.ids, digestID(ns, id, stamp))
			return nil
		}
		if err := s.store.EachStamp(ctx, add); err != nil {
			return err
		}
		// With `recording: mark`, a claimed envelope stays in its outbox.
		err := waiting.EachClaim(ctx, s.claims, s.watcher, func(claim *waiting.Claim) error {
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
		return letters.Each(ctx, s.letters, s.watcher, func(mark letters.Mark) error { return add(mark.NS, mark.ID, mark.Stamp) })
	})
	if err != nil {
		return err
	}

	slices.SortFunc(s.ids, compareDigests)
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

func compareDigests(a, b [sha256.Size / 2]byte) int { return slices.Compare(a[:], b[:]) }
