package consumer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/service/consuming"
	"github.com/outrelay/outrelay/internal/service/rates"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

// Rate limits the calls of a handler over all members of its group.
type Rate struct {
	// PerSecond is the largest number of messages per second, for example 0.5 or 100. At most 1,000,000. Zero or negative: no limit.
	PerSecond float64

	// Burst is how many messages may follow each other at once after a pause, in the whole group. Defaults to a tenth of PerSecond, and
	// at least 1. Negative: 1.
	Burst int
}

// WithRate limits how many messages a handler gets, over all members of the group, for example because it calls a service with a quota.
// In any time of t seconds, the group handles at most PerSecond × t + Burst messages. Each attempt at a message counts, also a retry; a
// run that repeats a transaction which MongoDB rolled back does not. Defaults to no limit. As an option of New it limits each handler
// separately.
//
// The messages wait in their lanes, in the order of each key, while other lanes and handlers go on, until the buffer of a partition is
// full (WithBuffer). A member reserves the calls of up to 250 ms with one write to the collection inbox_rates. So a busy member needs
// at most four writes per second, and one for each message below four per second. Calls that a member has reserved and not used are
// lost: with several members that are not busy, the group may stay below the limit by up to 250 ms, or one call, for each of them.
// If other handlers keep all lanes of a member busy (WithConcurrency), up to Burst calls of that member may be late and follow each
// other at once. Without MongoDB the handler waits.
func WithRate(rate Rate) HandlerOption {
	return handlerOption(func(handling *handling) { handling.rate = rate })
}

const (
	maxRate = 1e6
	// reserveAhead is the time whose calls a member reserves at once.
	reserveAhead = 250 * time.Millisecond
	// reserveTimeout bounds a reservation. After it the handler waits for the database.
	reserveTimeout = 10 * time.Second
)

// errInterrupted reports that an attempt did not begin because the track must stop.
var errInterrupted = errors.New("the consumer stops or is paused")

// rateLimiter reserves the calls of one handler for this member. Its lanes wait for a call one after another.
type rateLimiter struct {
	store rates.Store
	limit rates.Limit
	block int // calls of a reservation

	lock   chan struct{} // of slots: has an element while it is free, so that a lane can stop waiting for it
	slots  []time.Time   // reserved and not used
	starts chan struct{} // has an element for each call that a lane may use before it has its slots

	mu        sync.Mutex
	waiting   map[*track]struct{} // the lanes that wait
	isReached bool                // the last reservation succeeded
}

// newRateLimiter returns the limiter of a handler with this name in the inbox, or nil if the rate has no limit.
func newRateLimiter(store rates.Store, name string, rate Rate) *rateLimiter {
	if rate.PerSecond <= 0 {
		return nil
	}
	burst := rate.Burst
	if burst == 0 {
		burst = int(rate.PerSecond / 10)
	}

	// Rounded up, so that the rate is never exceeded.
	every := time.Duration(math.Ceil(1e6/rate.PerSecond)) * time.Microsecond
	limiter := &rateLimiter{
		store: store, lock: make(chan struct{}, 1), starts: make(chan struct{}, max(burst, 1)), waiting: map[*track]struct{}{},
		limit: rates.Limit{Name: name, Every: every, Burst: max(burst, 1)},
		block: max(int(rate.PerSecond*reserveAhead.Seconds()), 1),
	}

	limiter.unlockCalls()
	limiter.allowStarts(limiter.limit.Burst)
	return limiter
}

// reserve reserves calls until the member has n, and returns how long to wait before them. The caller must have locked the
// calls.
func (l *rateLimiter) reserve(ctx context.Context, n int) (time.Duration, error) {
	// Old slots of this member would add to the burst of the others.
	oldest := time.Now().Add(-l.limit.Window())
	for len(l.slots) > 0 && l.slots[0].Before(oldest) {
		l.slots = l.slots[1:]
	}

	if missing := n - len(l.slots); missing > 0 {
		missing = max(missing, l.block)
		limited, cancel := context.WithTimeout(ctx, reserveTimeout)
		defer cancel()
		var first time.Duration
		err := retry.Do(limited, retry.Reopen, func(ctx context.Context) (err error) {
			if first, err = l.store.Reserve(ctx, l.limit, missing); !isTransient(err) {
				return retry.Permanent(err)
			}
			return err
		}, nil)
		l.noteReservation(err)
		if err != nil {
			return 0, &inboxFailure{fmt.Errorf("rate limit: %w", err)}
		}
		// The clock of the server was read before the response, so a slot is never used too early.
		next := time.Now().Add(first)
		for range missing {
			l.slots = append(l.slots, next)
			next = next.Add(l.limit.Every)
		}
	}

	return time.Until(l.slots[n-1]), nil
}

// await blocks until the rate allows n messages of a track. Other lanes use the slots of the track during the wait. It returns
// errInterrupted if the track must stop first. A nil limiter has no limit.
//
// A call is used only after its wait. So a lane that stops during the wait loses none, and the member has reserved one block at most,
// however many lanes wait.
func (l *rateLimiter) await(t *track, n int) error {
	if l == nil {
		return nil
	}
	// Without a wait, the track keeps its slots.
	select {
	case <-l.lock:
		wait, err := l.reserve(t.p.drainCtx, n)
		if err == nil && wait <= 0 {
			l.slots = l.slots[n:]
		}
		l.unlockCalls()
		if err != nil || wait <= 0 {
			return err
		}
	default:
	}

	l.addWaiting(t)
	defer l.removeWaiting(t)
	var err error
	t.yieldSlots(func() { err = l.useCalls(t, n) })
	if err != nil {
		return err
	}
	l.allowStarts(n)
	if t.mustStop() {
		return errInterrupted
	}
	return nil
}

// useCalls waits for n calls and uses them. The track has no slots. The caller must call allowStarts for the calls when it has some.
func (l *rateLimiter) useCalls(t *track, n int) error {
	if !awaitSignal(t, l.lock) {
		return errInterrupted
	}
	defer l.unlockCalls()

	wait, err := l.reserve(t.p.drainCtx, n)
	if err != nil {
		return err
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	if !awaitSignal(t, timer.C) {
		return errInterrupted
	}

	// While other handlers keep all slots busy, lanes with calls gather. Later they start together, but not more than a burst.
	for i := range n {
		if !awaitSignal(t, l.starts) {
			l.allowStarts(i)
			return errInterrupted
		}
	}
	l.slots = l.slots[n:]
	return nil
}

// unlockCalls lets the next lane reserve and use calls.
func (l *rateLimiter) unlockCalls() { l.lock <- struct{}{} }

// allowStarts lets lanes use n more calls before they have their slots.
func (l *rateLimiter) allowStarts(n int) {
	for range n {
		l.starts <- struct{}{}
	}
}

// addWaiting counts a lane that waits. Such a lane does not wait for the database, unless the last reservation failed.
func (l *rateLimiter) addWaiting(t *track) {
	l.mu.Lock()
	l.waiting[t] = struct{}{}
	n, isReached := len(l.waiting), l.isReached
	l.mu.Unlock()

	if isReached {
		t.trouble.markBack(t)
	}
	l.measureWaiting(t, n)
}

// removeWaiting undoes addWaiting.
func (l *rateLimiter) removeWaiting(t *track) {
	l.mu.Lock()
	delete(l.waiting, t)
	n := len(l.waiting)
	l.mu.Unlock()
	l.measureWaiting(t, n)
}

func (l *rateLimiter) measureWaiting(t *track, n int) {
	t.p.s.c.measure(telemetry.Measurement{Metric: telemetry.RateWaiting, N: int64(n), Handler: t.reg.name})
}

// countWaiting returns the number of lanes that wait.
func (l *rateLimiter) countWaiting() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.waiting)
}

// noteReservation notes the result of a reservation. After a failed one, a success is the response for which the other lanes wait too.
func (l *rateLimiter) noteReservation(err error) {
	l.mu.Lock()
	var lanes []*track
	if err == nil && !l.isReached {
		lanes = slices.Collect(maps.Keys(l.waiting))
	}
	l.isReached = err == nil
	l.mu.Unlock()

	for _, lane := range lanes {
		lane.trouble.markBack(lane)
	}
}

// largestBatch returns how many messages one attempt may have by the rate of the handler: a batch waits for the last of its calls.
func (l *rateLimiter) largestBatch(n int) int {
	if l == nil {
		return n
	}
	return min(n, l.limit.Burst)
}

// openRates returns the store of the rate limits. Without a database, it is that of the inbox, or nil.
func openRates(db *mongo.Database, inbox consuming.Inbox) rates.Store {
	if db != nil {
		return rates.NewMongo(db)
	}
	if own, ok := inbox.(interface{ Rates() rates.Store }); ok {
		return own.Rates()
	}
	return nil
}
