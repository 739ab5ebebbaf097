package pipeline

import (
	"context"
	"sync"

	"github.com/outrelay/outrelay/internal/retry"
)

// maxRecorded is the size limit of a batch: a fenced transaction takes at most 1,000 documents (N3).
const maxRecorded = 1000

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

// run calls record with one batch after the other until ctx ends, and then returns nil. record returns
// early with an error that is final.
func (q *recordQueue[T]) run(ctx context.Context, record func(batch []T) error) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-q.wake:
		}

		// One signal stands for any number of outcomes.
		for batch := q.nextBatch(); len(batch) > 0; batch = q.nextBatch() {
			if err := record(batch); err != nil {
				if ctx.Err() != nil {
					return nil
				}
				return err
			}
		}
	}
}

// nextBatch removes the next batch from the queue and returns it. The batch is empty if the queue is.
func (q *recordQueue[T]) nextBatch() []T {
	q.mu.Lock()
	defer q.mu.Unlock()

	n := min(len(q.list), maxRecorded)
	batch := q.list[:n:n]
	q.list = q.list[n:]
	if len(q.list) == 0 {
		// A slice of the rest would keep the whole array in memory.
		q.list = nil
	}
	return batch
}
