package memory

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/outrelay/outrelay/pkg/inbox"
)

// partitionKey is a partition as one consumer knows it.
type partitionKey struct {
	consumer, topic string
	partition       int32
}

// laneKey is a lane of it; that of partitionLane has the partition's current generation, and the watermark of a lane that
// has an older one does not count.
type laneKey struct {
	partitionKey
	lane int32
}

const partitionLane = -1

func (l laneKey) row() string {
	return fmt.Sprintf("%s\x00%s\x00%d\x00%d", l.consumer, l.topic, l.partition, l.lane)
}

func laneOf(e inbox.Entry) laneKey {
	return laneKey{partitionKey{e.Key.Consumer, e.Place.Topic, e.Place.Partition}, e.Place.Lane}
}

// mark is a watermark: the first offset that was not dealt with.
type mark struct {
	generation, next int64
	epoch            int32
	id               string // of the topic, in the row of partitionLane
}

type marks map[laneKey]mark

func (m marks) generation(p partitionKey, lane int32) int64 {
	return max(m[laneKey{p, partitionLane}].generation, m[laneKey{p, lane}].generation)
}

func (m marks) next(l laneKey, generation int64) int64 {
	if w, ok := m[l]; ok && w.generation == generation {
		return w.next
	}
	return 0
}

// marks reads the watermarks of the entries' lanes and partitions.
func (x *Inbox) marks(t *tx, list []inbox.Entry) marks {
	m := marks{}
	for _, e := range list {
		if e.Place.Topic != "" {
			x.readMark(t, m, laneOf(e))
			x.readMark(t, m, laneKey{laneOf(e).partitionKey, partitionLane})
		}
	}
	return m
}

func (x *Inbox) readMark(t *tx, m marks, l laneKey) {
	if w, ok := t.get(x.offsets, l.row()).(*mark); ok && w != nil {
		m[l] = *w
	}
}

// advance moves the watermark of each lane behind the entries. It never goes back within a generation.
func (x *Inbox) advance(t *tx, list []inbox.Entry, m marks) error {
	to := map[laneKey]mark{}
	for _, e := range list {
		if e.Place.Topic == "" {
			continue
		}
		l := laneOf(e)
		w, ok := to[l]
		if !ok {
			w = mark{generation: m.generation(l.partitionKey, l.lane), epoch: -1}
			if old, ok := m[l]; ok && old.generation == w.generation {
				w = old
			}
		}
		w.next = max(w.next, e.Place.Offset+1)
		w.epoch = max(w.epoch, e.Place.LeaderEpoch)
		to[l] = w
	}
	for _, l := range slices.SortedFunc(maps.Keys(to), func(a, b laneKey) int { return int(a.lane - b.lane) }) {
		w := to[l]
		if old, ok := m[l]; ok && old == w {
			continue
		}
		if err := t.put(x.offsets, l.row(), &w); err != nil {
			return err
		}
	}
	return nil
}

// Attach tells the inbox that this process begins to handle a partition.
func (x *Inbox) Attach(ctx context.Context, consumer, topic string, part int32, l inbox.Log) (inbox.Generation, error) {
	p := partitionKey{consumer, topic, part}
	g, err := x.turn(ctx, p, l, func(seen inbox.Generation, known inbox.Log) (bool, error) {
		below := l.End >= 0 && l.End < seen.Watermark
		same := known.ID != "" && known.ID == l.ID
		another := known.ID != "" && l.ID != "" && known.ID != l.ID
		if !another && (same || l.Epoch < 0 || l.Epoch >= known.Epoch) && !below {
			return false, nil
		}
		if x.recreated == inbox.Halt {
			return false, &inbox.RecreatedError{
				Consumer: consumer, Topic: topic, Partition: part, Watermark: seen.Watermark, End: l.End, Epoch: l.Epoch, Seen: known.Epoch,
			}
		}
		return !same, nil
	})
	if err != nil {
		return inbox.Generation{}, fmt.Errorf("attaching: %w", err)
	}
	x.mu.Lock()
	x.attached[p] = g.Number
	x.mu.Unlock()
	return g, nil
}

// Renew begins a new generation whatever the policy. Attach has to follow.
func (x *Inbox) Renew(ctx context.Context, consumer, topic string, part int32) (inbox.Generation, error) {
	any := func(inbox.Generation, inbox.Log) (bool, error) { return true, nil }
	g, err := x.turn(ctx, partitionKey{consumer, topic, part}, inbox.Log{End: -1, Epoch: -1}, any)
	if err != nil {
		return inbox.Generation{}, fmt.Errorf("beginning a generation: %w", err)
	}
	return g, nil
}

func (x *Inbox) turn(ctx context.Context, p partitionKey, log inbox.Log, judge func(inbox.Generation, inbox.Log) (bool, error)) (next inbox.Generation, err error) {
	if p.consumer == "" || p.topic == "" || p.partition < 0 {
		return next, fmt.Errorf("%w: consumer %q, topic %q, partition %d", inbox.ErrInvalid, p.consumer, p.topic, p.partition)
	}
	err = x.db.alone(ctx, func(t *tx) error {
		seen, known := x.summary(t, p)
		begin, err := judge(seen, known)
		if err != nil {
			return err
		}
		next = inbox.Generation{Number: seen.Number, Watermark: seen.Watermark}
		own := mark{generation: next.Number, epoch: max(known.Epoch, log.Epoch), id: cmp.Or(log.ID, known.ID)}
		switch {
		case begin:
			next = inbox.Generation{Number: seen.Number + 1, Recreated: true}
			own = mark{generation: next.Number, epoch: log.Epoch, id: log.ID}
		case log.End >= 0 && log.End < seen.Watermark: // the same topic has lost records
			next.Watermark = log.End
			if err := x.lower(t, p, log.End); err != nil {
				return err
			}
		}
		return t.put(x.offsets, laneKey{p, partitionLane}.row(), &own)
	})
	return next, err
}

// lower takes the watermarks that are above the end of a truncated log back to it.
func (x *Inbox) lower(t *tx, p partitionKey, end int64) error {
	m := marks{}
	for l := range int32(inbox.Lanes) {
		x.readMark(t, m, laneKey{p, l})
	}
	for l, w := range m {
		if w.next <= end {
			continue
		}
		w.next = end
		if err := t.put(x.offsets, l.row(), &w); err != nil {
			return err
		}
	}
	return nil
}

// summary is the current generation of a partition, and the log that it is of as far as it is known.
func (x *Inbox) summary(t *tx, p partitionKey) (inbox.Generation, inbox.Log) {
	m := marks{}
	for l := int32(partitionLane); l < inbox.Lanes; l++ {
		x.readMark(t, m, laneKey{p, l})
	}
	var g inbox.Generation
	for _, w := range m {
		g.Number = max(g.Number, w.generation)
	}
	log := inbox.Log{End: -1, Epoch: -1}
	for l, w := range m {
		if w.generation != g.Number {
			continue
		}
		log.Epoch = max(log.Epoch, w.epoch)
		if l.lane == partitionLane {
			log.ID = w.id
			continue
		}
		g.Watermark = max(g.Watermark, w.next)
	}
	return g, log
}

// checkAttached refuses a partition of which another process has begun a generation since this one attached.
func (x *Inbox) checkAttached(p partitionKey, current int64) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if g, ok := x.attached[p]; ok && g != current {
		return &inbox.StaleError{Consumer: p.consumer, Topic: p.topic, Partition: p.partition, Attached: g, Current: current}
	}
	return nil
}
