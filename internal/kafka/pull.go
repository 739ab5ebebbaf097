package kafka

import (
	"fmt"
	"slices"

	"github.com/outrelay/outrelay/internal/kafka/batch"
	"github.com/outrelay/outrelay/internal/record"
)

// order is the scope within which deliveries of a topic keep their order.
type order struct{ ns, key string }

// orderOf is false for a record without a key: nothing waits for it.
func orderOf(rec *record.Record) (order, bool) {
	if rec.Key == nil {
		return order{}, false
	}
	return order{string(rec.Header(record.HeaderNamespace)), string(rec.Key)}, true
}

// pull gives back the records of the head that bad finds at fault, each with whatever follows it in its key, also in the
// batches behind and in what waits for the topic to grow: nothing of a key passes a record that will be tried again. What
// is left is encoded anew, in order; the head's sequence was not used. The lock is held.
//
// N15.
func (s *Sink) pull(p *part, bad func(i int) *record.Refusal) {
	var (
		list   []record.Withdrawn
		behind = map[order]struct{}{}
		head   = p.q[0]
	)
	take := func(b *pending, i int, rec *record.Record) bool {
		o, ordered := orderOf(rec)
		if _, blocked := behind[o]; ordered && blocked {
			list = append(list, withdrawn(p.t, rec, b.tickets[i], nil, record.ErrBlocked))
			return true
		}
		if b != head {
			return false
		}
		why := bad(i)
		if why == nil {
			return false
		}
		if ordered && !why.Class.DeadAtOnce() {
			behind[o] = struct{}{}
		}
		list = append(list, withdrawn(p.t, rec, b.tickets[i], why, nil))
		return true
	}
	wanted := func(b *pending) bool { return b == head || len(behind) > 0 }
	err := s.sift(&p.q, &p.open, wanted, take)
	if err == nil {
		var none *pending
		err = s.sift(&p.t.waiting, &none, wanted, take)
	}
	if err != nil {
		s.end(fmt.Errorf("%w: %s-%d: reading batches of our own: %w", ErrBroken, p.tp.Topic, p.tp.Partition, err))
		return
	}
	s.hand(list)
}

// sift takes records out of those batches of a queue that are wanted; open is the one that still takes records, if any. The
// lock is held.
func (s *Sink) sift(q *[]*pending, open **pending, wanted func(*pending) bool, take func(b *pending, i int, rec *record.Record) bool) error {
	for at, b := range *q {
		if !wanted(b) {
			continue
		}
		gone := map[int]struct{}{}
		err := each(b, func(i int, rec *record.Record) {
			if take(b, i, rec) {
				gone[i] = struct{}{}
			}
		})
		if err != nil {
			return err
		}
		if len(gone) == 0 {
			continue
		}
		var rest *pending
		if len(gone) < len(b.tickets) {
			if rest, err = s.without(b, gone); err != nil {
				return err
			}
		}
		(*q)[at] = rest
		if *open == b {
			*open = rest
		}
		s.tickets.put(b.tickets)
		s.discard(b)
	}
	*q = slices.DeleteFunc(*q, func(b *pending) bool { return b == nil })
	return nil
}

// without encodes a batch anew, in the same order, without some of its records. The lock is held.
func (s *Sink) without(b *pending, gone map[int]struct{}) (*pending, error) {
	rest := s.newBatch(batch.Need(b.b.Len()))
	rest.hint, rest.plain = b.hint, b.plain
	err := each(b, func(i int, rec *record.Record) {
		if _, ok := gone[i]; ok {
			return
		}
		need, size := sizes(rec)
		s.put(rest, rec, b.tickets[i], size, need)
		s.resolved(1, size) // counted once already
		if len(b.parts) > 0 {
			rest.parts = append(rest.parts, b.parts[i])
		}
	})
	return rest, err
}
