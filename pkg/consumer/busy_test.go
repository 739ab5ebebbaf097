package consumer_test

import (
	"context"
	"sync"
	"testing"

	"github.com/outrelay/outrelay/pkg/consumer"
)

// rounds lets callers through together, size at a time, until there were enough rounds. Then it blocks none.
type rounds struct {
	mu      sync.Mutex
	size    int
	wanted  int
	waiting int
	full    chan struct{}
	done    int
}

// enter blocks until size callers have entered, or returns at once if no further round is wanted.
func (r *rounds) enter(ctx context.Context) error {
	r.mu.Lock()
	if r.done >= r.wanted {
		r.mu.Unlock()
		return nil
	}
	r.waiting++
	full := r.full
	if r.waiting == r.size {
		close(full)
		r.waiting, r.full, r.done = 0, make(chan struct{}), r.done+1
	}
	r.mu.Unlock()

	select {
	case <-full:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// countDone returns how many rounds have ended.
func (r *rounds) countDone() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.done
}

// One partition with many keys is enough for all handlers that may run at once: each round ends only if as many run.
func TestOnePartitionKeepsAllLanesBusy(t *testing.T) {
	t.Parallel()
	const lanes, wanted = 16, 50
	k := newKit(t, 1)
	k.publish(newMessages(2000, 4000)...)

	busy := &rounds{size: lanes, wanted: wanted, full: make(chan struct{})}
	c := k.newConsumer(consumer.WithMode(consumer.AtLeastOnce))
	addHandler(t, c, "*", func(ctx context.Context, _ *consumer.Message) error { return busy.enter(ctx) }, withTries(1))

	k.start(c)
	k.waitUntil("rounds of all lanes", func(context.Context) bool { return busy.countDone() >= wanted })
}
