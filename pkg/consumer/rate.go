package consumer

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
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
// lost: with several members that are not busy, the group may stay below the limit by up to 250 ms, or one call, for each of them. Without MongoDB
// the handler waits.
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

	turn    chan struct{} // has an element while no lane reserves, or waits for a call
	slots   []time.Time   // reserved and not used; of the lane that has the turn
	waiting atomic.Int64  // lanes that wait
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
		store: store, turn: make(chan struct{}, 1),
		limit: rates.Limit{Name: name, Every: every, Burst: max(burst, 1)},
		block: max(int(rate.PerSecond*reserveAhead.Seconds()), 1),
	}
	limiter.endTurn()
	return limiter
}

// reserve reserves calls until the member has n, and returns how long to wait before them. The caller must have the turn.
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
		if err != nil {
			return 0, err
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
// A call is used only after its wait. So a lane that stops loses none, and the member has reserved one block at most, however many
// lanes wait.
func (l *rateLimiter) await(t *track, n int) error {
	if l == nil {
		return nil
	}
	if !l.takeTurn(t) {
		return errInterrupted
	}
	defer l.endTurn()

	wait, err := l.reserve(t.p.drainCtx, n)
	if err != nil {
		return &inboxFailure{fmt.Errorf("rate limit: %w", err)}
	}
	if wait > 0 {
		l.countWaiting(t, 1)
		t.waitYielding(wait)
		l.countWaiting(t, -1)
		if t.mustStop() {
			return errInterrupted
		}
	}
	l.slots = l.slots[n:]
	return nil
}

// takeTurn blocks until no other lane has the turn. It returns false if the track must stop first.
func (l *rateLimiter) takeTurn(t *track) bool {
	select {
	case <-l.turn:
		return true
	default:
	}

	l.countWaiting(t, 1)
	defer l.countWaiting(t, -1)
	taken := false
	t.yieldSlots(func() { taken = awaitSignal(t, l.turn) })
	if taken && t.mustStop() {
		l.endTurn()
		return false
	}
	return taken
}

// endTurn lets the next lane reserve.
func (l *rateLimiter) endTurn() { l.turn <- struct{}{} }

// countWaiting counts lanes that wait. Such a lane does not wait for the database any more.
func (l *rateLimiter) countWaiting(t *track, delta int64) {
	t.trouble.markBack(t)
	t.p.s.c.measure(telemetry.Measurement{Metric: telemetry.RateWaiting, N: l.waiting.Add(delta), Handler: t.reg.name})
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
