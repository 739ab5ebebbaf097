package sink

import (
	mathbits "math/bits"
	"sync"

	"github.com/outrelay/outrelay/internal/record"
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
	maxClassBits = 24 // log2 of the largest class, 16 MiB; larger buffers are not kept
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

	if k := len(b.free[class]); k > 0 {
		buf := b.free[class][k-1]
		b.free[class][k-1] = nil
		b.free[class] = b.free[class][:k-1]
		b.minFree[class] = min(b.minFree[class], k-1)
		return buf
	}

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

// totalBytes returns the memory that the free list holds.
func (b *buffers) totalBytes() int {
	n := 0
	for class := range b.free {
		n += len(b.free[class]) << (class + minClassBits)
	}
	return n
}

// ticketLists is the free list of ticket slices. The receiver of an ack gets a slice and returns it
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
	k := len(l.free)
	if k == 0 {
		return nil
	}
	list := l.free[k-1]
	l.free[k-1] = nil
	l.free = l.free[:k-1]
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
