package memory

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/outrelay/outrelay/internal/inbox"
)

// partitionKey identifies a partition for a consumer.
type partitionKey struct {
	consumer, topic string
	partition       int32
}

// laneKey identifies a lane of a partition. The row of partitionLane contains the current
// generation of the partition. Watermarks of an older generation have no effect.
type laneKey struct {
	partitionKey
	lane int32
}

const partitionLane = -1

// rowKey returns the key of the row for the watermark.
func (l laneKey) rowKey() string {
	return fmt.Sprintf("%s\x00%s\x00%d\x00%d", l.consumer, l.topic, l.partition, l.lane)
}

// entryLane returns the lane of an entry, which must have a place.
func entryLane(e inbox.Entry) laneKey {
	return laneKey{partitionKey{e.Key.Consumer, e.Place.Topic, e.Place.Partition}, e.Place.Lane}
}

// mark is a watermark.
type mark struct {
	generation int64
	next       int64 // the first offset that was not handled
	epoch      int32
	id         string // of the topic; only in the row of partitionLane
}

// marks contains the stored watermarks.
type marks map[laneKey]mark

// currentGeneration returns the current generation of a partition.
func (m marks) currentGeneration(p partitionKey, lane int32) int64 {
	return max(m[laneKey{p, partitionLane}].generation, m[laneKey{p, lane}].generation)
}

// nextOffset returns the first offset of a lane that was not handled in this generation.
func (m marks) nextOffset(l laneKey, generation int64) int64 {
	if w, ok := m[l]; ok && w.generation == generation {
		return w.next
	}
	return 0
}

// readMarks reads the watermarks of the lanes and the partitions of the entries.
func (x *Inbox) readMarks(t *tx, list []inbox.Entry) marks {
	m := marks{}
	for _, e := range list {
		if e.Place.Topic != "" {
			x.readMark(t, m, entryLane(e))
			x.readMark(t, m, laneKey{entryLane(e).partitionKey, partitionLane})
		}
	}
	return m
}

// readMark reads one watermark into m, if it exists.
func (x *Inbox) readMark(t *tx, m marks, l laneKey) {
	if w, ok := t.getRow(x.offsets, l.rowKey()).(*mark); ok && w != nil {
		m[l] = *w
	}
}

// advanceWatermarks moves the watermark of each lane past the entries. Within a generation it never
// goes back.
func (x *Inbox) advanceWatermarks(t *tx, list []inbox.Entry, m marks) error {
	to := map[laneKey]mark{}
	for _, e := range list {
		if e.Place.Topic == "" {
			continue
		}

		l := entryLane(e)
		w, ok := to[l]
		if !ok {
			w = mark{generation: m.currentGeneration(l.partitionKey, l.lane), epoch: -1}
			if old, ok := m[l]; ok && old.generation == w.generation {
				w = old
			}
		}

		w.next = max(w.next, e.Place.Offset+1)
		w.epoch = max(w.epoch, e.Place.LeaderEpoch)
		to[l] = w
	}

	byLane := func(a, b laneKey) int { return int(a.lane - b.lane) }
	for _, l := range slices.SortedFunc(maps.Keys(to), byLane) {
		w := to[l]
		if old, ok := m[l]; ok && old == w {
			continue
		}
		if err := t.putRow(x.offsets, l.rowKey(), &w); err != nil {
			return err
		}
	}

	return nil
}

// Attach prepares the inbox for a partition that this process begins to handle. See
// inbox.Inbox.Attach. It never returns inbox.ErrUnconfirmed.
func (x *Inbox) Attach(
	ctx context.Context, consumer, topic string, part int32, l inbox.Log,
) (inbox.Generation, error) {
	p := partitionKey{consumer, topic, part}
	judge := func(seen inbox.Generation, known inbox.Log) (bool, error) {
		below := l.End >= 0 && l.End < seen.Watermark
		same := known.ID != "" && known.ID == l.ID
		another := known.ID != "" && l.ID != "" && known.ID != l.ID
		epochIsValid := same || l.Epoch < 0 || l.Epoch >= known.Epoch
		if !another && epochIsValid && !below {
			return false, nil
		}
		if x.recreated == inbox.Halt {
			return false, &inbox.RecreatedError{
				Consumer:  consumer,
				Topic:     topic,
				Partition: part,
				Watermark: seen.Watermark,
				End:       l.End,
				Epoch:     l.Epoch,
				Seen:      known.Epoch,
			}
		}

		return !same, nil
	}

	g, err := x.switchGeneration(ctx, p, l, judge)
	if err != nil {
		return inbox.Generation{}, fmt.Errorf("attaching: %w", err)
	}

	x.mu.Lock()
	x.attached[p] = g.Number
	x.mu.Unlock()

	return g, nil
}

// Renew begins a new generation of the partition, regardless of the policy. Call Attach after it.
func (x *Inbox) Renew(ctx context.Context, consumer, topic string, part int32) (inbox.Generation, error) {
	begin := func(inbox.Generation, inbox.Log) (bool, error) { return true, nil }
	g, err := x.switchGeneration(ctx, partitionKey{consumer, topic, part}, inbox.Log{End: -1, Epoch: -1}, begin)
	if err != nil {
		return inbox.Generation{}, fmt.Errorf("beginning a generation: %w", err)
	}
	return g, nil
}

// switchGeneration lets judge decide whether a new generation begins, and writes the watermark of
// the partition.
func (x *Inbox) switchGeneration(
	ctx context.Context, p partitionKey, log inbox.Log, judge func(inbox.Generation, inbox.Log) (bool, error),
) (next inbox.Generation, err error) {
	if p.consumer == "" || p.topic == "" || p.partition < 0 {
		return next, fmt.Errorf("%w: consumer %q, topic %q, partition %d", inbox.ErrInvalid, p.consumer, p.topic, p.partition)
	}

	err = x.db.runAlone(ctx, func(t *tx) error {
		seen, known := x.currentState(t, p)
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
		case log.End >= 0 && log.End < seen.Watermark:
			// The same topic has lost records.
			next.Watermark = log.End
			if err := x.lowerWatermarks(t, p, log.End); err != nil {
				return err
			}
		}

		return t.putRow(x.offsets, laneKey{p, partitionLane}.rowKey(), &own)
	})

	return next, err
}

// lowerWatermarks lowers the watermarks that exceed the end of a truncated log.
func (x *Inbox) lowerWatermarks(t *tx, p partitionKey, end int64) error {
	m := marks{}
	for l := range int32(inbox.Lanes) {
		x.readMark(t, m, laneKey{p, l})
	}

	for l, w := range m {
		if w.next <= end {
			continue
		}

		w.next = end
		if err := t.putRow(x.offsets, l.rowKey(), &w); err != nil {
			return err
		}
	}

	return nil
}

// currentState returns the current generation of a partition, and the known parts of its log.
func (x *Inbox) currentState(t *tx, p partitionKey) (inbox.Generation, inbox.Log) {
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

// checkAttached returns an *inbox.StaleError if another process has begun a generation since this
// one attached.
func (x *Inbox) checkAttached(p partitionKey, current int64) error {
	x.mu.Lock()
	defer x.mu.Unlock()

	if g, ok := x.attached[p]; ok && g != current {
		return &inbox.StaleError{
			Consumer:  p.consumer,
			Topic:     p.topic,
			Partition: p.partition,
			Attached:  g,
			Current:   current,
		}
	}
	return nil
}
