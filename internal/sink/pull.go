package sink

import (
	"fmt"
	"slices"

	"github.com/outrelay/outrelay/internal/kafkawire/batch"
	"github.com/outrelay/outrelay/internal/record"
)

// keyScope is the scope within which deliveries of a topic keep their order.
type keyScope struct{ ns, key string }

// keyScopeOf returns the scope of rec. It returns false for a record without a key, for which no
// other record waits.
func keyScopeOf(rec *record.Record) (keyScope, bool) {
	if rec.Key == nil {
		return keyScope{}, false
	}
	return keyScope{string(rec.Header(record.HeaderNamespace)), string(rec.Key)}, true
}

// withdrawBadLocked gives back the records of the head for which refusalOf returns a refusal. With
// each of them it gives back all records that follow it in its key, also those in later batches and
// in the list that waits for the topic to grow: no record of a key passes a record that will be tried
// again. The remaining records are encoded again, in order. The sequence of the head stays unused.
//
// N15.
func (s *Sink) withdrawBadLocked(p *partition, refusalOf func(i int) *record.Refusal) {
	var (
		list    []record.Withdrawn
		blocked = map[keyScope]struct{}{}
		head    = p.queue[0]
	)
	withdraw := func(b *pending, i int, rec *record.Record) bool {
		scope, ordered := keyScopeOf(rec)
		if _, isBlocked := blocked[scope]; ordered && isBlocked {
			list = append(list, newWithdrawn(p.topic, rec, b.tickets[i], nil, record.ErrBlocked))
			return true
		}
		if b != head {
			return false
		}

		refusal := refusalOf(i)
		if refusal == nil {
			return false
		}
		if ordered && !refusal.Class.DeadAtOnce() {
			blocked[scope] = struct{}{}
		}
		list = append(list, newWithdrawn(p.topic, rec, b.tickets[i], refusal, nil))
		return true
	}

	// Later batches matter only if the head has blocked a key.
	affected := func(b *pending) bool { return b == head || len(blocked) > 0 }
	err := s.removeRecordsLocked(&p.queue, &p.openBatch, affected, withdraw)
	if err == nil {
		var noOpenBatch *pending
		err = s.removeRecordsLocked(&p.topic.waiting, &noOpenBatch, affected, withdraw)
	}
	if err != nil {
		s.failLocked(fmt.Errorf("%w: %s-%d: decoding batches to send: %w", ErrBroken, p.tp.Topic, p.tp.Partition, err))
		return
	}
	s.withdrawLocked(list)
}

// removeRecordsLocked removes the records for which remove returns true from the affected batches of
// queue. If open is in the queue, it is replaced by its new encoding.
func (s *Sink) removeRecordsLocked(
	queue *[]*pending, open **pending,
	affected func(*pending) bool, remove func(b *pending, i int, rec *record.Record) bool,
) error {
	for at, b := range *queue {
		if !affected(b) {
			continue
		}

		removed := map[int]struct{}{}
		err := forEachRecord(b, func(i int, rec *record.Record) {
			if remove(b, i, rec) {
				removed[i] = struct{}{}
			}
		})
		if err != nil {
			return err
		}
		if len(removed) == 0 {
			continue
		}

		var rest *pending
		if len(removed) < len(b.tickets) {
			if rest, err = s.reencodeWithoutLocked(b, removed); err != nil {
				return err
			}
		}
		(*queue)[at] = rest
		if *open == b {
			*open = rest
		}
		s.tickets.put(b.tickets)
		s.releaseBatchLocked(b)
	}

	*queue = slices.DeleteFunc(*queue, func(b *pending) bool { return b == nil })
	return nil
}

// reencodeWithoutLocked encodes the records of b again, in the same order, without the removed ones.
func (s *Sink) reencodeWithoutLocked(b *pending, removed map[int]struct{}) (*pending, error) {
	rest := s.newBatchLocked(batch.BufferSize(b.builder.Len()))
	rest.sizeHint, rest.uncompressed = b.sizeHint, b.uncompressed
	err := forEachRecord(b, func(i int, rec *record.Record) {
		if _, ok := removed[i]; ok {
			return
		}

		// The record was counted when it was sent, so the second count is taken back.
		need, size := recordSizes(rec)
		s.appendRecordLocked(rest, rec, b.tickets[i], size, need)
		s.countResolvedLocked(1, size)
		if len(b.wantedPartitions) > 0 {
			rest.wantedPartitions = append(rest.wantedPartitions, b.wantedPartitions[i])
		}
	})
	return rest, err
}
