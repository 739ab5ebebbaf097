package sink

import (
	"slices"
	"sync"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire/batch"
)

// ticketLists is the free list of ticket slices of an Opener. The receiver of an ack gets a slice and returns it
// with Recycle, so the list has its own lock.
type ticketLists struct {
	mu   sync.Mutex
	free [][]record.Ticket
}

const (
	keepLists   = 512     // 24 bytes each, and their tickets
	keepTickets = 1 << 14 // longer slices, from a backlog of tiny records, are not kept
)

// get returns an empty slice from the free list, or nil.
func (l *ticketLists) get() []record.Ticket {
	l.mu.Lock()
	defer l.mu.Unlock()
	free := len(l.free)
	if free == 0 {
		return nil
	}
	list := l.free[free-1]
	l.free[free-1] = nil
	l.free = l.free[:free-1]
	return list
}

// put returns list to the free list, unless it is too long or the free list is full.
func (l *ticketLists) put(list []record.Ticket) {
	if cap(list) == 0 || cap(list) > keepTickets {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.free) < keepLists {
		l.free = append(l.free, list[:0])
	}
}

// batchPool makes batches and keeps their memory. It also counts the records that the sink has not
// resolved yet. The sink's lock guards it, except for the ticket lists and the chunks.
type batchPool struct {
	tickets     *ticketLists
	chunks      batch.Chunks
	freeBatches []*pending

	unresolvedBytes   int64 // reserved by the unresolved records
	unresolvedRecords int   // passed to Send, and neither acked nor given back
}

// appendRecordLocked encodes rec, which has reserved size bytes, into batch.
func (bp *batchPool) appendRecordLocked(batch *pending, rec *record.Record, ticket record.Ticket, size int) {
	batch.builder.Append(rec)

	if batch.tickets == nil {
		batch.tickets = bp.tickets.get()
	}
	batch.tickets = append(batch.tickets, ticket)
	batch.reserved += size
}

// newBatchLocked returns an open batch.
func (bp *batchPool) newBatchLocked() *pending {
	var batch *pending
	if n := len(bp.freeBatches); n > 0 {
		batch = bp.freeBatches[n-1]
		bp.freeBatches = bp.freeBatches[:n-1]
	} else {
		batch = &pending{}
	}

	batch.builder.Reset(&bp.chunks)
	return batch
}

// releaseBatchLocked returns the memory of batch to the free lists.
func (bp *batchPool) releaseBatchLocked(batch *pending) {
	bp.tickets.put(batch.tickets)
	batch.builder.Release()

	*batch = pending{builder: batch.builder, wantedPartitions: batch.wantedPartitions[:0]}
	if len(bp.freeBatches) < keepLists {
		bp.freeBatches = append(bp.freeBatches, batch)
	}
}

// changeUnresolvedLocked changes the number of unresolved records, and of their bytes.
func (bp *batchPool) changeUnresolvedLocked(records, bytes int) {
	bp.unresolvedRecords += records
	bp.unresolvedBytes += int64(bytes)
}

// removeRecordsLocked removes the records for which remove returns true from the affected batches of
// partition. The open batch is replaced by its new encoding.
func (bp *batchPool) removeRecordsLocked(
	partition *partition, affected func(*pending) bool, remove func(batch *pending, i int, rec *record.Record) bool,
) error {
	for at, b := range partition.queue {
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

		// A batch that would be empty is dropped.
		var rest *pending
		if len(removed) < len(b.tickets) {
			if rest, err = bp.reencodeWithoutLocked(b, removed); err != nil {
				return err
			}
		}
		partition.queue[at] = rest
		if partition.openBatch == b {
			partition.openBatch = rest
		}
		bp.releaseBatchLocked(b)
	}

	partition.queue = slices.DeleteFunc(partition.queue, func(batch *pending) bool { return batch == nil })
	return nil
}

// reencodeWithoutLocked encodes the records of old again, in the same order, without the removed ones.
func (bp *batchPool) reencodeWithoutLocked(old *pending, removed map[int]struct{}) (*pending, error) {
	rest := bp.newBatchLocked()
	rest.uncompressed = old.uncompressed
	err := forEachRecord(old, func(i int, rec *record.Record) {
		if _, ok := removed[i]; ok {
			return
		}

		_, size := recordSizes(rec)
		bp.appendRecordLocked(rest, rec, old.tickets[i], size)
	})
	return rest, err
}
