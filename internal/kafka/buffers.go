package kafka

import (
	mathbits "math/bits"
	"sync"

	"github.com/outrelay/outrelay/internal/record"
)

// buffers is the free list that batches take their memory from, in powers of two: a batch begins in the size that its
// partition's last one needed, at most hintLimit, and moves up when it outgrows it, so a thousand partitions with a record
// each do not hold a thousand full-size buffers. It is guarded by the sink's lock.
type buffers struct {
	free [classes][][]byte
	low  [classes]int // fewest free ones since the last trim: what nobody needed
}

const (
	smallest = 9  // log2 of the smallest class, 512 bytes: 60,000 partitions may wait with one small record each
	largest  = 24 // log2 of the largest class, 16 MiB; larger ones are made and forgotten
	classes  = largest - smallest + 1
)

// class of a buffer that holds n bytes; beyond the largest, classes.
func class(n int) int {
	return max(mathbits.Len(uint(max(n, 1)-1)), smallest) - smallest
}

// get returns a buffer with room for at least n bytes.
func (b *buffers) get(n int) []byte {
	c := class(n)
	if c >= classes {
		return make([]byte, 0, n)
	}
	if k := len(b.free[c]); k > 0 {
		buf := b.free[c][k-1]
		b.free[c][k-1] = nil
		b.free[c] = b.free[c][:k-1]
		b.low[c] = min(b.low[c], k-1)
		return buf
	}
	b.low[c] = 0
	return make([]byte, 0, 1<<(c+smallest))
}

// put gives a buffer back. One that append has made, of a size between the classes, is left to the collector.
func (b *buffers) put(buf []byte) {
	n := cap(buf)
	if n < 1<<smallest || n > 1<<largest || n&(n-1) != 0 {
		return
	}
	c := class(n)
	b.free[c] = append(b.free[c], buf[:0])
}

// trim drops half, at least one, of what nobody has needed since it was last called.
func (b *buffers) trim() {
	for c := range b.free {
		drop := min((b.low[c]+1)/2, len(b.free[c]))
		keep := len(b.free[c]) - drop
		clear(b.free[c][keep:])
		b.free[c] = b.free[c][:keep]
		b.low[c] = keep
	}
}

// bytes is what the free list holds.
func (b *buffers) bytes() int {
	n := 0
	for c := range b.free {
		n += len(b.free[c]) << (c + smallest)
	}
	return n
}

// ticketLists is the free list of ticket slices. They travel to the receiver of an ack and come back by Recycle, so it
// has a lock of its own.
type ticketLists struct {
	mu   sync.Mutex
	free [][]record.Ticket
}

const (
	keepLists   = 512     // 24 bytes each, and their tickets
	keepTickets = 1 << 14 // longer ones, of a backlog of tiny records, are left to the collector
)

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
