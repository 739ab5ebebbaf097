package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
)

// ledger numbers events by key, and counts errors in their delivery.
type ledger struct {
	mu     sync.Mutex
	keys   [keysUnderLoad]ledgerKey
	latest sender
	next   chan time.Time // gets the first arrival from another sender than latest
	base   int
}

const keysUnderLoad = 16

type ledgerKey struct {
	acked      int          // number of acknowledged events; they are numbered from 1
	seen       map[int]bool // arrived
	last       int          // highest arrived number
	duplicates int
	disorder   int
}

func newLedger() *ledger {
	// The base separates these numbers from those of bench.
	ledger := &ledger{base: 1 << 40}
	for i := range ledger.keys {
		ledger.keys[i].seen = map[int]bool{}
	}
	return ledger
}

func (l *ledger) eventNumber(key, n int) int { return l.base + n*keysUnderLoad + key }

// awaitNewSender returns a channel that gets the time of the first arrival from a new sender.
func (l *ledger) awaitNewSender() <-chan time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.next = make(chan time.Time, 1)
	return l.next
}

// recordArrival records the arrival of an event from a sender.
func (l *ledger) recordArrival(number int, arrivedAt time.Time, source sender) {
	l.mu.Lock()
	defer l.mu.Unlock()

	if source != l.latest {
		if l.next != nil {
			l.next <- arrivedAt
			l.next = nil
		}
		l.latest = source
	}

	if number < l.base {
		return
	}

	key, n := &l.keys[(number-l.base)%keysUnderLoad], (number-l.base)/keysUnderLoad
	if key.seen[n] {
		key.duplicates++
		return
	}
	if n != key.last+1 {
		key.disorder++
	}
	key.seen[n] = true
	key.last = max(key.last, n)
}

// insertLoad inserts until ctx ends. Each key has one writer, so that the commits of a key are ordered.
func (l *ledger) insertLoad(ctx context.Context, size int, insert func(context.Context, any) error) error {
	every := keysUnderLoad * time.Second / failoverRate
	errs := make([]error, keysUnderLoad)
	var wg sync.WaitGroup

	for key := range keysUnderLoad {
		wg.Go(func() {
			began := time.Now()
			for n := 1; ; n++ {
				due := began.Add(time.Duration(key)*every/keysUnderLoad + time.Duration(n)*every)
				if retry.Sleep(ctx, time.Until(due)) != nil {
					return
				}

				doc, err := newKeyedEnvelope(l.eventNumber(key, n), size, fmt.Sprintf("k-%d", key))
				if err == nil {
					err = insert(context.WithoutCancel(ctx), doc)
				}
				if err != nil {
					errs[key] = fmt.Errorf("inserting: %w", err)
					return
				}

				l.mu.Lock()
				l.keys[key].acked = n
				l.mu.Unlock()
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// awaitArrivals blocks until all events have arrived, and then waits a little for duplicates.
func (l *ledger) awaitArrivals(ctx context.Context, failed func() error) error {
	deadline := time.Now().Add(stall)
	for time.Now().Before(deadline) {
		if _, lost, _, _ := l.countErrors(); lost == 0 {
			break
		}
		if err := errors.Join(failed(), retry.Sleep(ctx, 50*time.Millisecond)); err != nil {
			return err
		}
	}
	return retry.Sleep(ctx, time.Second)
}

// countErrors returns the number of events, and of errors in their delivery.
func (l *ledger) countErrors() (events, lost, duplicates, outOfOrder int) {
	l.mu.Lock()
	defer l.mu.Unlock()

	for i := range l.keys {
		key := &l.keys[i]
		events += key.acked
		for n := 1; n <= key.acked; n++ {
			if !key.seen[n] {
				lost++
			}
		}
		duplicates += key.duplicates
		outOfOrder += key.disorder
	}
	return events, lost, duplicates, outOfOrder
}
