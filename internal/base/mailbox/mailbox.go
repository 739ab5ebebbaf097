// Package mailbox hands values from any goroutine to one goroutine that takes them in batches.
package mailbox

import (
	"sync"

	"github.com/outrelay/outrelay/internal/base/retry"
)

// Box holds values in the order in which they were put. Any goroutine may put values, and one takes them. Its memory grows with
// the values that were not taken.
type Box[T any] struct {
	ready chan struct{} // holds one token: list is not empty

	mu    sync.Mutex
	list  []T
	taken int // values that were taken and are not done
}

// New returns an empty box.
func New[T any]() *Box[T] { return &Box[T]{ready: make(chan struct{}, 1)} }

// Put adds values. It does not block.
func (b *Box[T]) Put(list ...T) {
	if len(list) == 0 {
		return
	}

	b.mu.Lock()
	b.list = append(b.list, list...)
	b.mu.Unlock()
	retry.Signal(b.ready)
}

// Ready receives a token after values were put. One token stands for any number of values.
func (b *Box[T]) Ready() <-chan struct{} { return b.ready }

// Take removes up to limit values and returns them; with a limit of 0, all. They count in Len until Done.
func (b *Box[T]) Take(limit int) []T {
	b.mu.Lock()
	defer b.mu.Unlock()

	n := len(b.list)
	if limit > 0 {
		n = min(n, limit)
	}
	list := b.list[:n:n]
	b.list = b.list[n:]
	if len(b.list) == 0 {
		// A slice of the rest would keep the whole array in memory.
		b.list = nil
	}
	b.taken += n
	return list
}

// Done ends the handling of n values that were taken.
func (b *Box[T]) Done(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.taken -= n
}

// Len returns the number of values that were put and are not done.
func (b *Box[T]) Len() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.list) + b.taken
}
