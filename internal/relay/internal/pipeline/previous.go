package pipeline

import (
	"context"
	"crypto/sha256"
	"math"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// StoredTopics finds the envelopes of a sweep that are stored already.
type StoredTopics interface {
	// TopicsOf returns the topics for which the envelope raw waits, or for which it is dead; "" is for all topics. found is also true
	// if it was sent since it waited.
	TopicsOf(ctx context.Context, ns string, raw bson.Raw) (topics []string, found bool, err error)
}

// PreviousOwner contains the envelopes after the checkpoint that an earlier owner stored: waiting ones, with the topics for which
// they wait, and dead ones, with the topics that rejected them.
//
// The stream repeats their events. The reconciler owns the stored topics. The records for the other
// topics may still have been queued when that owner died, so the stream sends them like any other
// event. The read-back has found the records that were sent (N15). PreviousOwner is filled before
// the stream is opened.
type PreviousOwner struct {
	// events is keyed by the position in the stream as well: an id may have been inserted again. An envelope of a sweep does not
	// have the position of its event, so its stamp is in its place.
	events map[[16]byte]storedEvent
	buf    []byte
}

// storedEvent is an event whose envelope the previous owner stored.
type storedEvent struct {
	topics []string
	// beforeMS is the server's time of the letter of an envelope that died in a sweep. An envelope with its id
	// that was committed later was inserted again, even if it has the same stamp.
	beforeMS int64
}

// NewPreviousOwner returns an empty set.
func NewPreviousOwner() *PreviousOwner {
	return &PreviousOwner{events: map[[16]byte]storedEvent{}}
}

// IsEmpty reports whether the previous owner left no envelopes.
func (o *PreviousOwner) IsEmpty() bool { return len(o.events) == 0 }

// Reset removes everything.
func (o *PreviousOwner) Reset() { clear(o.events) }

// hashKey returns the map key of the event of an envelope at a position.
func (o *PreviousOwner) hashKey(ns string, id bson.RawValue, pos string) [16]byte {
	o.buf = append(o.buf[:0], ns...)
	o.buf = append(o.buf, 0, byte(id.Type))
	o.buf = append(o.buf, id.Value...)
	o.buf = append(o.buf, 0)
	o.buf = append(o.buf, pos...)
	sum := sha256.Sum256(o.buf)
	return [16]byte(sum[:])
}

// AddDeadLetter adds a dead letter.
func (o *PreviousOwner) AddDeadLetter(mark letters.Mark) {
	o.add(mark.NS, mark.ID, mark.Pos, []string{mark.Topic}, mark.MovedAt.UnixMilli())
}

// AddWaiting adds an envelope that waits for topics. The topic "" is for all topics.
func (o *PreviousOwner) AddWaiting(ns string, id bson.RawValue, pos string, topics []string) {
	o.add(ns, id, pos, topics, math.MaxInt64)
}

func (o *PreviousOwner) add(ns string, id bson.RawValue, pos string, topics []string, movedMS int64) {
	beforeMS := int64(math.MaxInt64)
	if stamp, swept := outboxes.SweptStamp(pos); swept {
		pos, beforeMS = stamp, movedMS
	}
	key := o.hashKey(ns, letters.ShortID(id), letters.ShortPos(pos))
	known := o.events[key]
	o.events[key] = storedEvent{append(slices.Clone(known.topics), topics...), max(known.beforeMS, beforeMS)}
}

// topicsOf returns the topics for which the envelope of ev was stored. found reports whether it was.
func (o *PreviousOwner) topicsOf(ns string, id bson.RawValue, ev *changes.Event) (topics []string, found bool) {
	id = letters.ShortID(id)
	for _, pos := range []string{string(ev.Pos), outboxes.PosAt(outboxes.Stamp(ev.Document))} {
		stored, known := o.events[o.hashKey(ns, id, letters.ShortPos(pos))]
		if known && ev.WallMS <= stored.beforeMS {
			topics, found = append(topics, stored.topics...), true
		}
	}
	return topics, found
}

// dropTopics removes the records for topics, in place. The topic "" is for all topics.
func dropTopics(records []record.Record, topics []string) []record.Record {
	return slices.DeleteFunc(records, func(record record.Record) bool {
		return slices.Contains(topics, record.Topic) || slices.Contains(topics, "")
	})
}
