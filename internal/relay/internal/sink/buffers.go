package sink

import (
	mathbits "math/bits"
	"slices"
	"sync"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire/batch"
)

// buffers is the free list for the memory of batches, in powers of two. A batch begins with the size
// that the last batch of its partition needed, at most maxInitialBuffer, and moves to a larger buffer
// when it grows. So a thousand partitions with one record each do not hold a thousand full-size
// buffers. The sink's lock guards it.
type buffers struct {
	free    [classCount][][]byte
	minFree [classCount]int // smallest number of free buffers since the last trim: these were unused
}

const (
	minClassBits = 9  // log2 of the smallest class, 512 bytes: 60,000 partitions may wait with one small record each
	maxClassBits = 20 // log2 of the largest class, 1 MiB; larger buffers are not kept
	classCount   = maxClassBits - minClassBits + 1
)

// sizeClass returns the class of buffers that hold n bytes. It returns classCount or more if n is
// larger than the largest class.
func sizeClass(n int) int {
	return max(mathbits.Len(uint(max(n, 1)-1)), minClassBits) - minClassBits
}

// get returns an empty buffer with room for at least n bytes.
func (b *buffers) get(n int) []byte {
	class := sizeClass(n)
	if class >= classCount {
		return make([]byte, 0, n)
	}

	if free := len(b.free[class]); free > 0 {
		buf := b.free[class][free-1]
		b.free[class][free-1] = nil
		b.free[class] = b.free[class][:free-1]
		b.minFree[class] = min(b.minFree[class], free-1)
		return buf
	}

	// The list was empty, so none of its buffers was unused.
	b.minFree[class] = 0
	return make([]byte, 0, 1<<(class+minClassBits))
}

// put returns buf to the free list. It drops a buffer whose size is not that of a class, which append
// has made.
func (b *buffers) put(buf []byte) {
	n := cap(buf)
	if n < 1<<minClassBits || n > 1<<maxClassBits || n&(n-1) != 0 {
		return
	}
	class := sizeClass(n)
	b.free[class] = append(b.free[class], buf[:0])
}

// trimUnused drops half of the buffers that were not used since the last call, but at least one of
// them.
func (b *buffers) trimUnused() {
	for class := range b.free {
		drop := min((b.minFree[class]+1)/2, len(b.free[class]))
		keep := len(b.free[class]) - drop
		clear(b.free[class][keep:])
		b.free[class] = b.free[class][:keep]
		b.minFree[class] = keep
	}
}

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
// resolved yet. The sink's lock guards it, except for the ticket lists.
type batchPool struct {
	maxBytes    int64 // the memory that all records share
	tickets     *ticketLists
	freeBuffers buffers
	freeBatches []*pending
	liveBatches int // batches that were begun and not released

	unresolvedBytes   int64 // reserved by the unresolved records
	unresolvedRecords int   // passed to Send, and neither acked nor given back
}

const (
	// maxInitialBuffer bounds the buffer of a new batch. One large batch in the past must not
	// claim as much memory for every record that follows.
	maxInitialBuffer = 64 << 10

	// maxGrowthFactor bounds one step of a buffer towards the expected size. Steps of four copy
	// a third of a full batch; doubling would copy all of it.
	maxGrowthFactor = 4
)

// appendRecordLocked encodes rec into batch and grows its buffer as needed. See enqueueLocked for size
// and need.
func (bp *batchPool) appendRecordLocked(batch *pending, rec *record.Record, ticket record.Ticket, size, need int) {
	if batch.builder.Room() < need {
		n := len(batch.builder.Buffer())
		larger := bp.freeBuffers.get(max(n+need, min(batch.sizeHint, maxGrowthFactor*n)))
		bp.freeBuffers.put(batch.builder.Move(larger))
	}
	batch.builder.Append(rec)

	if batch.tickets == nil {
		batch.tickets = bp.tickets.get()
	}
	batch.tickets = append(batch.tickets, ticket)
	batch.reserved += size
}

// initialBufferLimitLocked returns the largest buffer that the next batch may begin with, beyond
// the need of its first record. All batches together get a quarter of the memory for records. If
// many partitions have batches, new batches begin small.
func (bp *batchPool) initialBufferLimitLocked() int {
	if int64(bp.liveBatches+1)*maxInitialBuffer > bp.maxBytes/4 {
		return 0
	}
	return maxInitialBuffer
}

// newBatchLocked returns an open batch in a buffer of at least size bytes.
func (bp *batchPool) newBatchLocked(size int) *pending {
	var batch *pending
	if n := len(bp.freeBatches); n > 0 {
		batch = bp.freeBatches[n-1]
		bp.freeBatches = bp.freeBatches[:n-1]
	} else {
		batch = &pending{}
	}

	batch.builder.Reset(bp.freeBuffers.get(size))
	bp.liveBatches++
	return batch
}

// releaseBatchLocked returns the memory of batch to the free lists.
func (bp *batchPool) releaseBatchLocked(batch *pending) {
	bp.liveBatches--
	bp.tickets.put(batch.tickets)
	if batch.builder.Buffer() != nil {
		bp.freeBuffers.put(batch.builder.Buffer())
	}
	if batch.compressed != nil {
		bp.freeBuffers.put(batch.compressed)
	}

	*batch = pending{wantedPartitions: batch.wantedPartitions[:0]}
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
	rest := bp.newBatchLocked(batch.BufferSize(old.builder.Len()))
	rest.sizeHint, rest.uncompressed = old.sizeHint, old.uncompressed
	err := forEachRecord(old, func(i int, rec *record.Record) {
		if _, ok := removed[i]; ok {
			return
		}

		need, size := recordSizes(rec)
		bp.appendRecordLocked(rest, rec, old.tickets[i], size, need)
	})
	return rest, err
}
