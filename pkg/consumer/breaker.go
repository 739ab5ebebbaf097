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
	BreakerClosed   BreakerState = iota // everything passes
	BreakerOpen                         // nothing passes
	BreakerHalfOpen                     // a few pass, to find out
)

// String is a name fit for a label.
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

// BreakerConfig is how a circuit breaker judges.
type BreakerConfig struct {
	// Name tells breakers apart in errors.
	Name string
	// Share of failures within Window, above 0 up to 1, that opens it. Defaults to 0.5.
	Share float64
	// MinThroughput is how many messages of the window it takes to judge. Defaults to 10.
	MinThroughput int
	// Window is how far back it looks. Defaults to 30 s.
	Window time.Duration
	// Open is how long nothing passes once it opened. Defaults to 30 s.
	Open time.Duration
	// Probes is how many pass at once while it is half open, and how many have to succeed to close it. Defaults to 1.
	Probes int
	// Failure says which errors count. Defaults to all but ErrDrop and duplicates.
	Failure Matcher
	// Consumer pauses the whole consumer while it is open, instead of the lanes that its messages are in.
	Consumer bool
	// OnChange hears of each change. It is called with the breaker locked and must not block.
	OnChange func(from, to BreakerState)
	// Now is the clock. Defaults to time.Now.
	Now func() time.Time
}

// windowBuckets is how finely the window slides.
const windowBuckets = 10

// Breaker is a circuit breaker: when too many messages fail within its window, it opens, and lets nothing through for a
// while; then it lets a few through and closes or opens again by what becomes of them. One for a handler, or one for all,
// depending on whom its Middleware is given to.
//
// What it holds back spends no attempts: its lane waits, or with Consumer the whole consumer, until it is worth trying.
// It is safe for concurrent use and starts no goroutine.
type Breaker struct {
	cfg BreakerConfig

	mu     sync.Mutex
	state  BreakerState
	openUntil  time.Time // while open
	runningProbes int       // probes on their way
	succeededProbes int       // probes that succeeded
	round  int       // counts changes of the state: an answer from an earlier one says nothing
	window [windowBuckets]struct {
		slot       int64 // which stretch of time it counts
		total, bad int
	}
}

// NewBreaker makes a closed breaker. Errors are ErrConfiguration.
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
	bad := func(wrong bool, format string, args ...any) {
		if wrong {
			errs = append(errs, fmt.Errorf("%w: circuit breaker %q: "+format, append([]any{ErrConfiguration, cfg.Name}, args...)...))
		}
	}
	bad(cfg.Share < 0 || cfg.Share > 1, "a share of %g; above 0 up to 1 is allowed", cfg.Share)
	bad(cfg.MinThroughput < 1, "a minimum throughput of %d; at least 1", cfg.MinThroughput)
	bad(cfg.Window < windowBuckets, "a window of %s is too short", cfg.Window)
	bad(cfg.Open < 0, "open for %s", cfg.Open)
	bad(cfg.Probes < 1, "%d probes; at least 1", cfg.Probes)
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return &Breaker{cfg: cfg}, nil
}

// setDefault sets what is not set.
func setDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// Middleware returns a *BreakerOpenError instead of running the handler while the breaker is open.
func (b *Breaker) Middleware() Middleware {
	return func(next Handler) Handler {
		return HandlerFunc(func(ctx context.Context, m *Message) (err error) {
			done, err := b.Allow()
			if err != nil {
				return err
			}
			outcome := error(&PanicError{}) // what it was if next does not return
			defer func() {
				if outcome == nil && AfterBatch(ctx, done) {
					return // the batch is still to be handled
				}
				if outcome != nil && ctx.Err() != nil && !errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
					outcome = ErrDrop // it was told to stop: that says nothing
				}
				done(outcome)
			}()
			outcome = next.Handle(ctx, m)
			return outcome
		})
	}
}

// Allow asks whether something may run now: a *BreakerOpenError, or a function that takes its outcome, once.
func (b *Breaker) Allow() (done func(err error), err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.cfg.Now()
	if b.state == BreakerOpen && !now.Before(b.openUntil) {
		b.changeStateLocked(BreakerHalfOpen)
	}
	switch b.state {
	case BreakerOpen:
		return nil, b.newOpenError(b.openUntil.Sub(now), now)
	case BreakerHalfOpen:
		if b.runningProbes >= b.cfg.Probes {
			return nil, b.newOpenError(max(b.cfg.Open/10, time.Millisecond), now)
		}
		b.runningProbes++
	default:
	}
	round, once := b.round, sync.Once{}
	return func(err error) { once.Do(func() { b.recordOutcome(err, round) }) }, nil
}

func (b *Breaker) newOpenError(wait time.Duration, now time.Time) error {
	return &BreakerOpenError{Name: b.cfg.Name, Until: now.Add(wait), Wait: wait, Consumer: b.cfg.Consumer}
}

// recordOutcome counts an outcome.
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
		switch {
		case failed:
			b.openLocked()
		case !neutral:
			if b.succeededProbes++; b.succeededProbes >= b.cfg.Probes {
				b.changeStateLocked(BreakerClosed)
			}
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

// isNeutral reports whether an error says nothing about what the breaker guards.
func isNeutral(err error) bool {
	switch Class(err) {
	case ClassDropped, ClassBlocked, ClassBreaker, ClassNotDue:
		return true
	}
	return isDuplicate(err)
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

// countLocked adds an outcome and says how many the window has, and how many of them failed.
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

// State is the state now. An open breaker whose time is over is half open from the next message on.
func (b *Breaker) State() BreakerState {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state
}
