package pipeline

import (
	"context"
	"slices"
	"sync"

	"github.com/outrelay/outrelay/internal/retry"
)

const (
	// maxRecorded is the size limit of a batch: a fenced transaction takes at most 1,000 documents (N3).
	maxRecorded = 1000
	// maxPrepared bounds the outcomes that are prepared together. One read of the stream serves all of them.
	maxPrepared = 20 * maxRecorded
)

// recordQueue holds outcomes that are to be recorded in MongoDB. Any goroutine may add to it.
type recordQueue[T any] struct {
	wake chan struct{} // one token: list is not empty

	mu   sync.Mutex
	list []T
}

func newRecordQueue[T any]() *recordQueue[T] {
	return &recordQueue[T]{wake: make(chan struct{}, 1)}
}

// add queues list for run. It does not block.
func (q *recordQueue[T]) add(list ...T) {
	q.mu.Lock()
	q.list = append(q.list, list...)
	q.mu.Unlock()

	retry.Signal(q.wake)
}

// run calls record with one batch after the other until ctx ends, and then returns nil. Before that, it calls prepare with
// many of them together, unless it is nil. Both return early with an error that is final.
func (q *recordQueue[T]) run(ctx context.Context, prepare, record func(list []T) error) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-q.wake:
		}

		// One signal stands for any number of outcomes.
		for list := q.take(); len(list) > 0; list = q.take() {
			if err := recordList(list, prepare, record); err != nil {
				if ctx.Err() != nil {
					return nil
				}
				return err
			}
		}
	}
}

// recordList prepares list and records it in batches.
func recordList[T any](list []T, prepare, record func(list []T) error) error {
	if prepare != nil {
		if err := prepare(list); err != nil {
			return err
		}
	}

	for batch := range slices.Chunk(list, maxRecorded) {
		if err := record(batch); err != nil {
			return err
		}
		// The others may take long, and must not keep the memory of these.
		clear(batch)
	}
	return nil
}

// take removes outcomes from the queue and returns them. The list is empty if the queue is.
func (q *recordQueue[T]) take() []T {
	q.mu.Lock()
	defer q.mu.Unlock()

	n := min(len(q.list), maxPrepared)
	list := q.list[:n:n]
	q.list = q.list[n:]
	if len(q.list) == 0 {
		// A slice of the rest would keep the whole array in memory.
		q.list = nil
	}
	return list
}
