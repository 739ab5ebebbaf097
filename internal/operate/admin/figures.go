package admin

import (
	"cmp"
	"context"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/outrelay/outrelay/internal/relay/figures"
)

// Counts are numbers of documents in the watcher's collections, and in the databases that contain them.
type Counts = figures.Counts

const (
	// slowCount is the duration of a count from which its result is shown again to the next readers, for countShare times as long. So readers
	// do not keep the server busy.
	slowCount  = time.Second
	countShare = 10
)

// countDesk counts the figures of watchers for which no process counts now. Its size is bounded by the number of watchers in the state
// database.
type countDesk struct {
	flights singleflight.Group

	mu        sync.Mutex
	byWatcher map[string]*countedWatcher
}

// countedWatcher has the last count of a watcher. Only one flight at a time uses it.
type countedWatcher struct {
	counter figures.Counter
	last    figures.Figures
	until   time.Time // last is shown again until then
}

// readFigures returns the figures of the watcher, and whether a process counts for it. If none does, or an operator has acted since,
// readFigures counts now.
func (o Operator) readFigures(ctx context.Context) (found figures.Figures, counts bool, err error) {
	stored, err := figures.Read(ctx, o.State, o.Watcher)
	if err != nil || stored.Current && !stored.Acted {
		return stored.Figures, stored.Current, err
	}

	found, err = cmp.Or(o.counts, &countDesk{}).count(ctx, o)
	// The rules compare several counts, so one count has no result of its own.
	if stored.Current {
		found.Health, found.Unreadable = stored.Figures.Health, stored.Figures.Unreadable
	}
	return found, stored.Current, err
}

// count counts the figures of the operator's watcher, once for all who ask at the same time. If ctx ends, the count continues for the
// others.
func (d *countDesk) count(ctx context.Context, operator Operator) (figures.Figures, error) {
	result := d.flights.DoChan(operator.Watcher, func() (any, error) {
		watcher := d.findOrAdd(operator)
		if time.Now().Before(watcher.until) {
			return watcher.last, nil
		}

		began := time.Now()
		counted, err := watcher.counter.Count(context.WithoutCancel(ctx))
		if cost := time.Since(began); err == nil && cost > slowCount {
			watcher.last, watcher.until = counted, time.Now().Add(countShare*cost)
		}
		return counted, err
	})
	select {
	case counted := <-result:
		return counted.Val.(figures.Figures), counted.Err
	case <-ctx.Done():
		return figures.Figures{}, context.Cause(ctx)
	}
}

func (d *countDesk) findOrAdd(operator Operator) *countedWatcher {
	d.mu.Lock()
	defer d.mu.Unlock()
	watcher := d.byWatcher[operator.Watcher]
	if watcher == nil {
		watcher = &countedWatcher{counter: operator.newCounter()}
		if d.byWatcher == nil {
			d.byWatcher = map[string]*countedWatcher{}
		}
		d.byWatcher[operator.Watcher] = watcher
	}
	return watcher
}

// newCounter returns a counter for the watcher.
func (o Operator) newCounter() figures.Counter {
	return figures.Counter{
		State: o.State, Watcher: o.Watcher, HandlerLetters: o.HandlerLetters, ConsumerDatabases: consumerDatabases(o), Now: time.Now, Oplog: o.Oplog,
	}
}
