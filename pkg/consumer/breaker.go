package consumer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// BreakerState is the state of a circuit breaker.
type BreakerState uint8

// The states of a circuit breaker.
const (
	BreakerClosed   BreakerState = iota // all messages pass
	BreakerOpen                         // no messages pass
	BreakerHalfOpen                     // a few messages pass as probes
)

// String returns the name of the state. It can be used as a metric label.
func (s BreakerState) String() string {
	switch s {
	case BreakerOpen:
		return "open"
	case BreakerHalfOpen:
		return "half_open"
	default:
		return "closed"
	}
}

// BreakerConfig configures a circuit breaker.
type BreakerConfig struct {
	// Name identifies the breaker in errors.
	Name string
	// Share is the share of failures within Window that opens the breaker: above 0, at most 1. Defaults to 0.5.
	Share float64
	// MinThroughput is the minimum number of messages in the window before the breaker may open. Defaults to 10.
	MinThroughput int
	// Window is the length of the sliding window. Defaults to 30 s.
	Window time.Duration
	// Open is how long the breaker stays open before it lets probes through. Defaults to 30 s.
	Open time.Duration
	// Probes is the maximum number of concurrent messages while the breaker is half open, and the number of successes
	// that close it. Defaults to 1.
	Probes int
	// Failure selects the errors that count as failures. Discard and duplicates never count. Defaults to all other errors.
	Failure Matcher
	// Consumer pauses the whole consumer while the breaker is open, instead of only the lanes of its messages.
	Consumer bool
	// OnChange is called at each change of the state. The breaker is locked during the call, so OnChange must not block
	// or call the breaker.
	OnChange func(from, to BreakerState)
	// Now is the clock. Defaults to time.Now.
	Now func() time.Time
}

// windowBuckets is the number of parts in which the window slides.
const windowBuckets = 10

// Breaker is a circuit breaker. It opens when too many messages fail within its window, and then lets no messages through
// for a while. Afterwards it lets a few through as probes, and closes or opens again depending on their outcome. Give its
// Middleware to one handler or to several. Handlers that share a Breaker are held back together.
//
// Messages that a breaker holds back use no attempts. Their lane, or with BreakerConfig.Consumer the whole consumer, waits
// until the next try may succeed. A Breaker is safe for concurrent use and starts no goroutine.
type Breaker struct {
	cfg BreakerConfig

	mu              sync.Mutex
	state           BreakerState
	openUntil       time.Time // while open
	runningProbes   int
	succeededProbes int
	round           int // counts changes of the state: outcomes of earlier rounds are ignored
	window          [windowBuckets]struct {
		slot       int64 // the number of the time slot that this bucket counts
		total, bad int
	}
}

// NewBreaker returns a closed breaker. Its errors are ErrConfiguration.
func NewBreaker(cfg BreakerConfig) (*Breaker, error) {
	setDefault(&cfg.Share, 0.5)
	setDefault(&cfg.MinThroughput, 10)
	setDefault(&cfg.Window, 30*time.Second)
	setDefault(&cfg.Open, 30*time.Second)
	setDefault(&cfg.Probes, 1)
	if cfg.Failure == nil {
		cfg.Failure = func(error) bool { return true }
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}

	var errs []error
	rejectIf := func(wrong bool, format string, args ...any) {
		if wrong {
			args = append([]any{ErrConfiguration, cfg.Name}, args...)
			errs = append(errs, fmt.Errorf("%w: circuit breaker %q: "+format, args...))
		}
	}
	rejectIf(cfg.Share < 0 || cfg.Share > 1, "invalid share %g: set a value above 0 and at most 1", cfg.Share)
	rejectIf(cfg.MinThroughput < 1, "invalid minimum throughput %d: set at least 1", cfg.MinThroughput)
	rejectIf(cfg.Window < windowBuckets, "window of %s is too short", cfg.Window)
	rejectIf(cfg.Open < 0, "invalid open time %s: it must not be negative", cfg.Open)
	rejectIf(cfg.Probes < 1, "invalid number of probes %d: set at least 1", cfg.Probes)
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return &Breaker{cfg: cfg}, nil
}

// setDefault sets v to d if v is the zero value.
func setDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// Middleware returns a middleware that runs the handler while the breaker lets messages through. Otherwise it returns a
// *BreakerOpenError without running the handler.
func (b *Breaker) Middleware() Middleware {
	return func(next HandlerFunc) HandlerFunc {
		return func(ctx context.Context, m *Message) (err error) {
			done, err := b.Allow()
			if err != nil {
				return err
			}

			// Stays a panic if next does not return.
			outcome := error(&PanicError{})
			defer func() {
				// In a batch the outcome is known only after the batch has run.
				if outcome == nil && AfterBatch(ctx, done) {
					return
				}

				// An interrupted handler neither succeeded nor failed. Discard is neutral for the breaker.
				interrupted := ctx.Err() != nil && !errors.Is(context.Cause(ctx), context.DeadlineExceeded)
				if outcome != nil && interrupted {
					outcome = errBatchNotRun
				}
				done(outcome)
			}()

			outcome = next(ctx, m)
			return outcome
		}
	}
}

// Allow reports whether a call may run now. If so, it returns a function that must be called with the outcome of the call.
// Only the first call of that function counts. Otherwise it returns a *BreakerOpenError.
func (b *Breaker) Allow() (done func(err error), err error) {
	b.mu.Lock()
	defer b.mu.Unlock()

	now := b.cfg.Now()
	if b.state == BreakerOpen && !now.Before(b.openUntil) {
		b.changeStateLocked(BreakerHalfOpen)
	}

	if b.state == BreakerOpen {
		return nil, b.newOpenError(b.openUntil.Sub(now), now)
	}
	if b.state == BreakerHalfOpen {
		if b.runningProbes >= b.cfg.Probes {
			return nil, b.newOpenError(max(b.cfg.Open/10, time.Millisecond), now)
		}
		b.runningProbes++
	}

	round := b.round
	var once sync.Once
	return func(err error) { once.Do(func() { b.recordOutcome(err, round) }) }, nil
}

func (b *Breaker) newOpenError(wait time.Duration, now time.Time) error {
	return &BreakerOpenError{Name: b.cfg.Name, Until: now.Add(wait), Wait: wait, Consumer: b.cfg.Consumer}
}

// recordOutcome counts the outcome of a call that was allowed in round, and changes the state if necessary.
func (b *Breaker) recordOutcome(err error, round int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if round != b.round {
		return
	}

	neutral := err != nil && isNeutral(err)
	failed := err != nil && !neutral && b.cfg.Failure(err)

	if b.state == BreakerHalfOpen {
		b.runningProbes--
		if failed {
			b.openLocked()
			return
		}
		if neutral {
			return
		}
		b.succeededProbes++
		if b.succeededProbes >= b.cfg.Probes {
			b.changeStateLocked(BreakerClosed)
		}
		return
	}

	if neutral {
		return
	}
	total, bad := b.countLocked(failed)
	if failed && total >= b.cfg.MinThroughput && float64(bad) >= b.cfg.Share*float64(total) {
		b.openLocked()
	}
}

// isNeutral reports whether err is neither a success nor a failure of the resource that the breaker protects.
func isNeutral(err error) bool {
	switch Class(err) {
	case ClassBreaker, ClassNotDue:
		return true
	}
	return isDuplicate(err) || isDiscard(err)
}

func (b *Breaker) openLocked() {
	b.changeStateLocked(BreakerOpen)
	b.openUntil = b.cfg.Now().Add(b.cfg.Open)
}

func (b *Breaker) changeStateLocked(to BreakerState) {
	from := b.state
	b.state, b.runningProbes, b.succeededProbes = to, 0, 0
	b.round++
	clear(b.window[:])
	if b.cfg.OnChange != nil {
		b.cfg.OnChange(from, to)
	}
}

// countLocked adds an outcome to the window. It returns the number of outcomes in the window, and how many are failures.
func (b *Breaker) countLocked(failed bool) (total, bad int) {
	slot := b.cfg.Now().UnixNano() / int64(b.cfg.Window/windowBuckets)
	w := &b.window[slot%windowBuckets]
	if w.slot != slot {
		w.slot, w.total, w.bad = slot, 0, 0
	}
	w.total++
	if failed {
		w.bad++
	}

	for i := range b.window {
		if w := &b.window[i]; w.slot > slot-windowBuckets {
			total += w.total
			bad += w.bad
		}
	}
	return total, bad
}

// State returns the current state. If the time of an open breaker is over, it becomes half open with the next message.
func (b *Breaker) State() BreakerState {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state
}
