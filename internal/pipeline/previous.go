package pipeline

import (
	"crypto/sha256"
	"math"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
)

// PreviousOwner contains the envelopes after the checkpoint that an earlier owner stored as
// exceptions, with the topics for which they wait, and the envelopes that it dead-lettered, with
// the topics that rejected them.
//
// The stream repeats their events. The reconciler owns the stored topics. The records for the other
// topics may still have been queued when that owner died, so the stream sends them like any other
// event. The read-back has found the records that were sent (N15). PreviousOwner is filled before
// the stream is opened.
type PreviousOwner struct {
	waitingTopics map[[16]byte][]string
	// dead is keyed by the position in the stream as well: a dead envelope has left its collection, and its
	// id may have been inserted again. The letter of an envelope that died in a sweep does not have the
	// position of its event, so the stamp is in its place.
	dead map[[16]byte]deadEnvelope
	buf  []byte
}

// deadEnvelope is an envelope that the previous owner dead-lettered.
type deadEnvelope struct {
	topics []string
	// movedMS is the server's time of the letter of an envelope that died in a sweep. An envelope with its id
	// that was committed later was inserted again, even if it has the same stamp.
	movedMS int64
}

// NewPreviousOwner returns an empty set.
func NewPreviousOwner() *PreviousOwner {
	return &PreviousOwner{waitingTopics: map[[16]byte][]string{}, dead: map[[16]byte]deadEnvelope{}}
}

// IsEmpty reports whether the previous owner left no envelopes.
func (o *PreviousOwner) IsEmpty() bool {
	return len(o.waitingTopics)+len(o.dead) == 0
}

// Reset removes everything.
func (o *PreviousOwner) Reset() {
	clear(o.waitingTopics)
	clear(o.dead)
}

// hashKey returns the map key of an envelope or, unless pos is empty, of its event at a position.
func (o *PreviousOwner) hashKey(ns string, id bson.RawValue, pos string) [16]byte {
	o.buf = append(o.buf[:0], ns...)
	o.buf = append(o.buf, 0, byte(id.Type))
	o.buf = append(o.buf, id.Value...)
	if len(pos) > 0 {
		o.buf = append(o.buf, 0)
		o.buf = append(o.buf, pos...)
	}

	sum := sha256.Sum256(o.buf)
	return [16]byte(sum[:])
}

// AddDeadLetter adds a dead letter of the collection ns.
func (o *PreviousOwner) AddDeadLetter(ns string, l deadletter.LaterLetter) {
	pos, movedMS := l.Pos, int64(math.MaxInt64)
	if stamp, swept := outboxes.SweptStamp(l.Pos); swept {
		pos, movedMS = stamp, l.MovedAt.UnixMilli()
	}
	k := o.hashKey(ns, l.ID, pos)
	known := o.dead[k]
	o.dead[k] = deadEnvelope{append(known.topics, l.Topic), max(known.movedMS, movedMS)}
}

// removeDeadTopics removes the records for topics that rejected the envelope. dead reports whether
// the event has a dead letter.
func (o *PreviousOwner) removeDeadTopics(
	ns string, id bson.RawValue, ev *changestream.Event, records []record.Record,
) (rest []record.Record, dead bool) {
	if len(o.dead) == 0 {
		return records, false
	}
	for _, pos := range []string{string(ev.Data), outboxes.PosAt(outboxes.Stamp(ev.Document))} {
		if l, dead := o.dead[o.hashKey(ns, id, pos)]; dead && ev.WallMS <= l.movedMS {
			return dropTopics(records, l.topics), true
		}
	}
	return records, false
}

// AddWaiting adds an envelope that waits for topics. The topic "" is for all topics.
func (o *PreviousOwner) AddWaiting(ns string, id bson.RawValue, topics []string) {
	o.waitingTopics[o.hashKey(ns, id, "")] = topics
}

// removeWaitingTopics removes the records for topics for which the envelope waits. waiting reports
// whether it waits for any.
func (o *PreviousOwner) removeWaitingTopics(
	ns string, id bson.RawValue, records []record.Record,
) (rest []record.Record, waiting bool) {
	topics, waiting := o.waitingTopics[o.hashKey(ns, id, "")]
	if !waiting {
		return records, false
	}
	return dropTopics(records, topics), true
}

// dropTopics removes the records for topics, in place. The topic "" is for all topics.
func dropTopics(records []record.Record, topics []string) []record.Record {
	return slices.DeleteFunc(records, func(r record.Record) bool {
		return slices.Contains(topics, r.Topic) || slices.Contains(topics, "")
	})
}
