package sink

import (
	"fmt"

	"github.com/outrelay/outrelay/internal/contract/record"
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

// withdrawBadLocked gives back the records of the head for which rejectionOf returns a rejection. With
// each of them it gives back all records that follow it in its key, also those in later batches: no
// record of a key passes a record that will be tried again. The remaining records are encoded again, in
// order. The sequence of the head stays unused.
//
// N15.
func (l *loop) withdrawBadLocked(partition *partition, rejectionOf func(i int) *record.Rejection) {
	var (
		list    []record.Withdrawn
		blocked = map[keyScope]struct{}{}
		head    = partition.queue[0]
	)
	withdraw := func(batch *pending, i int, rec *record.Record) bool {
		scope, ordered := keyScopeOf(rec)
		if _, isBlocked := blocked[scope]; ordered && isBlocked {
			list = append(list, newWithdrawn(partition.topic, rec, batch, batch.tickets[i], nil, record.ErrBlocked))
			return true
		}
		if batch != head {
			return false
		}

		rejection := rejectionOf(i)
		if rejection == nil {
			return false
		}
		if ordered && !rejection.Class.DeadAtOnce() {
			blocked[scope] = struct{}{}
		}
		list = append(list, newWithdrawn(partition.topic, rec, batch, batch.tickets[i], rejection, nil))
		return true
	}

	// Later batches matter only if the head has blocked a key.
	affected := func(batch *pending) bool { return batch == head || len(blocked) > 0 }
	if err := l.sink.batches.removeRecordsLocked(partition, affected, withdraw); err != nil {
		l.sink.failLocked(fmt.Errorf("%w: %s-%d: decoding batches to send: %w", ErrBroken, partition.tp.Topic, partition.tp.Partition, err))
		return
	}
	l.sink.parker.withdrawLocked(list)
}
