package pipeline

import (
	"crypto/sha256"
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
	// deadTopics is keyed by the position in the stream as well: a dead envelope has left its
	// collection, and its id may have been inserted again.
	deadTopics map[[16]byte][]string
	// sweptDead contains the envelopes that died in a sweep. Their letters do not have the positions
	// of their events, so it is keyed by the stamp.
	sweptDead map[[16]byte]sweptLetter
	buf       []byte
}

// sweptLetter is an envelope that died in a sweep.
type sweptLetter struct {
	topics []string
	// movedMS is the server's time of the letter. An envelope with this id that was committed later
	// was inserted again, even if it has the same stamp.
	movedMS int64
}

// NewPreviousOwner returns an empty set.
func NewPreviousOwner() *PreviousOwner {
	return &PreviousOwner{
		waitingTopics: map[[16]byte][]string{},
		deadTopics:    map[[16]byte][]string{},
		sweptDead:     map[[16]byte]sweptLetter{},
	}
}

// IsEmpty reports whether the previous owner left no envelopes.
func (o *PreviousOwner) IsEmpty() bool {
	return len(o.waitingTopics)+len(o.deadTopics)+len(o.sweptDead) == 0
}

// Reset removes everything.
func (o *PreviousOwner) Reset() {
	clear(o.waitingTopics)
	clear(o.deadTopics)
	clear(o.sweptDead)
}

// hashKey returns the map key of an envelope or, with pos, of its event at a position.
func (o *PreviousOwner) hashKey(ns string, id bson.RawValue, pos ...byte) [16]byte {
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
	if stamp, swept := outboxes.SweptStamp(l.Pos); swept {
		k := o.hashKey(ns, l.ID, []byte(stamp)...)
		known := o.sweptDead[k]
		o.sweptDead[k] = sweptLetter{append(known.topics, l.Topic), max(known.movedMS, l.MovedAt.UnixMilli())}
		return
	}

	k := o.hashKey(ns, l.ID, []byte(l.Pos)...)
	o.deadTopics[k] = append(o.deadTopics[k], l.Topic)
}

// removeDeadTopics removes the records for topics that rejected the envelope. dead reports whether
// the event has a dead letter.
func (o *PreviousOwner) removeDeadTopics(
	ns string, id bson.RawValue, ev *changestream.Event, records []record.Record,
) (rest []record.Record, dead bool) {
	if len(o.deadTopics) > 0 {
		topics, dead := o.deadTopics[o.hashKey(ns, id, ev.Data...)]
		if dead {
			return dropTopics(records, topics), true
		}
	}

	if len(o.sweptDead) > 0 {
		stamp := outboxes.PosAt(outboxes.Stamp(ev.Document))
		l, dead := o.sweptDead[o.hashKey(ns, id, []byte(stamp)...)]
		if dead && ev.WallMS <= l.movedMS {
			return dropTopics(records, l.topics), true
		}
	}
	return records, false
}

// AddWaiting adds an envelope that waits for topics. The topic "" is for all topics.
func (o *PreviousOwner) AddWaiting(ns string, id bson.RawValue, topics []string) {
	o.waitingTopics[o.hashKey(ns, id)] = topics
}

// removeWaitingTopics removes the records for topics for which the envelope waits. waiting reports
// whether it waits for any.
func (o *PreviousOwner) removeWaitingTopics(
	ns string, id bson.RawValue, records []record.Record,
) (rest []record.Record, waiting bool) {
	topics, waiting := o.waitingTopics[o.hashKey(ns, id)]
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
