// Package breaker is a circuit breaker for handlers that share a dependency. A single handler needs none: consumer.Retry
// suspends it if everything fails. Retry.Outage counts the keys of one handler that fail in a row. A breaker counts the share of
// attempts that fail, over all handlers that use it.
//
// Order: while the breaker is open, messages keep the order of their keys, because the handler is suspended.
// Blocking: the middleware never blocks, and starts no goroutine. Cost: one lock for each message.
package breaker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/pkg/consumer"
)

// ErrOpen is wrapped by the errors of messages that met an open breaker. These messages spend no attempt.
var ErrOpen = errors.New("circuit breaker is open")

// State is the state of a Breaker.
type State uint8

// The states of a Breaker.
const (
	Closed   State = iota // all messages pass
	Open                  // no messages pass
	HalfOpen              // one message at a time passes as a probe
)

// String returns the name of the state. It can be used as a metric label.
func (s State) String() string {
	switch s {
	case Open:
		return "open"
	case HalfOpen:
		return "half_open"
	default:
		return "closed"
	}
}

// windowBuckets is the number of parts in which the window slides.
const windowBuckets = 10

// Breaker opens if too many messages fail within its window, and then suspends the handlers that it guards. Afterwards it lets
// one message through as a probe, and closes or opens again depending on its outcome. A Breaker is safe for concurrent use and
// starts no goroutine.
type Breaker struct {
	name    string
	share   float64
	window  time.Duration
	minimum int
	openFor time.Duration
	isFault func(err error) bool

	mu        sync.Mutex
	state     State
	openUntil time.Time // while open
	probing   bool      // while half open
	round     int       // counts changes of the state: outcomes of earlier rounds are ignored
	buckets   [windowBuckets]struct {
		slot       int64 // the number of the time slot that this bucket counts
		total, bad int
	}
}

// Option configures a Breaker. Zero and nil mean the default, negative means none, as in package consumer.
type Option interface{ apply(*Breaker) }

type optionFunc func(*Breaker)

func (f optionFunc) apply(breaker *Breaker) { f(breaker) }

// WithShare sets the share of failures within the window that opens the breaker: above 0, at most 1. Defaults to 0.5: a dependency
// that fails for one customer only should not suspend the handlers for all.
func WithShare(share float64) Option {
	return optionFunc(func(breaker *Breaker) { breaker.share = share })
}

// WithWindow sets the length of the sliding window. Defaults to 30 s: long enough for slow handlers to reach WithMinimum, and
// short enough to forget an outage that is over.
func WithWindow(window time.Duration) Option {
	return optionFunc(func(breaker *Breaker) { breaker.window = window })
}

// WithMinimum sets how many messages of the window it takes before the breaker may open. Defaults to 10, so
// that a few failures in a quiet hour do not open it. A negative n means no minimum.
func WithMinimum(n int) Option {
	return optionFunc(func(breaker *Breaker) { breaker.minimum = n })
}

// WithOpenFor sets how long the breaker stays open before it lets a probe through. Defaults to 30 s: a
// service that restarts needs about that long, and a probe costs no attempt. A negative wait means no wait.
func WithOpenFor(wait time.Duration) Option {
	return optionFunc(func(breaker *Breaker) { breaker.openFor = wait })
}

// WithFailure selects the errors that count as failures. The breaker ignores all other errors. Defaults to all errors. Errors
// of consumer.Reject and consumer.Discard, and inbox.ErrDuplicate, never count, because they are about the message.
func WithFailure(match func(err error) bool) Option {
	return optionFunc(func(breaker *Breaker) { breaker.isFault = match })
}

// New returns a closed breaker. The name appears in its errors. New panics if an option is out of range.
func New(name string, opts ...Option) *Breaker {
	breaker := &Breaker{name: name}
	for _, o := range opts {
		if o != nil {
			o.apply(breaker)
		}
	}

	breaker.share = cmp.Or(breaker.share, 0.5)
	breaker.window = cmp.Or(breaker.window, 30*time.Second)
	breaker.minimum = cmp.Or(breaker.minimum, 10)
	breaker.openFor = max(cmp.Or(breaker.openFor, 30*time.Second), 0)
	if breaker.isFault == nil {
		breaker.isFault = func(error) bool { return true }
	}

	if breaker.share < 0 || breaker.share > 1 || breaker.window < windowBuckets {
		panic(fmt.Sprintf("breaker %q: invalid option: WithShare %g must be above 0 and at most 1, WithWindow %s must be positive",
			name, breaker.share, breaker.window))
	}
	return breaker
}

// errNoOutcome is the outcome of a handler that was interrupted.
var errNoOutcome = errors.New("the handler was interrupted")

// isAboutMessage reports whether the handler has rejected or discarded the message.
func isAboutMessage(err error) bool {
	var decided interface{ GivesUp() bool }
	return errors.As(err, &decided) && decided.GivesUp()
}

// Middleware returns a middleware that runs the handler while the breaker lets messages through. Otherwise it suspends the
// handler, as consumer.Suspend does, until the next message may pass. Give one breaker to all handlers that share the
// dependency. Timeouts, panics and the failures of batches count.
func (b *Breaker) Middleware() consumer.Middleware {
	return func(next consumer.HandlerFunc) consumer.HandlerFunc {
		return func(ctx context.Context, message *consumer.Message) (err error) {
			done, err := b.allow()
			if err != nil {
				return err
			}

			// Stays a panic if next does not return.
			outcome := consumer.ErrPanic
			defer func() {
				// In a batch the outcome is known only after the batch has run.
				if outcome == nil && consumer.AfterBatch(ctx, module.Key{}, done) {
					return
				}

				// An interrupted handler neither succeeded nor failed.
				interrupted := ctx.Err() != nil && !errors.Is(context.Cause(ctx), context.DeadlineExceeded)
				if outcome != nil && interrupted {
					outcome = errNoOutcome
				}
				done(outcome)
			}()

			outcome = next(ctx, message)
			return outcome
		}
	}
}

// allow reports whether a call may run now. If so, it returns a function that must be called with the outcome of the call. Only
// the first call of that function counts. Otherwise it returns an error that suspends the handler.
func (b *Breaker) allow() (done func(err error), err error) {
	b.mu.Lock()
	defer b.mu.Unlock()

	now := time.Now()
	// The time is checked when a call comes, so an idle breaker needs no timer.
	if b.state == Open && !now.Before(b.openUntil) {
		b.changeStateLocked(HalfOpen)
	}

	if b.state == Open {
		return nil, b.newOpenError(b.openUntil.Sub(now))
	}
	if b.state == HalfOpen {
		if b.probing {
			return nil, b.newOpenError(max(b.openFor/10, time.Millisecond))
		}
		b.probing = true
	}

	round := b.round
	var once sync.Once
	return func(err error) { once.Do(func() { b.recordOutcome(err, round) }) }, nil
}

func (b *Breaker) newOpenError(wait time.Duration) error {
	return consumer.Suspend(wait, fmt.Errorf("%w: %s", ErrOpen, b.name))
}

// recordOutcome counts the outcome of a call that was allowed in round, and changes the state if necessary.
func (b *Breaker) recordOutcome(err error, round int) {
	failed := err != nil
	// The function of WithFailure may use the breaker, so it is called without the lock.
	ignored := failed && b.ignores(err)
	b.mu.Lock()
	defer b.mu.Unlock()
	// The call began before the last change of the state, so it is no evidence about the new one.
	if round != b.round {
		return
	}

	// An ignored error frees the place of the probe without a decision.
	if ignored {
		b.probing = false
		return
	}

	if b.state == HalfOpen {
		if failed {
			b.openLocked()
		} else {
			b.changeStateLocked(Closed)
		}
		return
	}

	total, bad := b.countLocked(failed)
	if failed && total >= b.minimum && float64(bad) >= b.share*float64(total) {
		b.openLocked()
	}
}

// ignores reports whether err is neither a success nor a failure of the dependency.
func (b *Breaker) ignores(err error) bool {
	for _, neutral := range []error{errNoOutcome, ErrOpen, inbox.ErrDuplicate} {
		if errors.Is(err, neutral) {
			return true
		}
	}
	return isAboutMessage(err) || !b.isFault(err)
}

func (b *Breaker) openLocked() {
	b.changeStateLocked(Open)
	b.openUntil = time.Now().Add(b.openFor)
}

func (b *Breaker) changeStateLocked(next State) {
	b.state, b.probing = next, false
	b.round++
	clear(b.buckets[:])
}

// countLocked adds an outcome to the window. It returns the number of outcomes in the window, and how many are failures.
func (b *Breaker) countLocked(failed bool) (total, bad int) {
	slot := time.Now().UnixNano() / int64(b.window/windowBuckets)
	bucket := &b.buckets[slot%windowBuckets]
	if bucket.slot != slot {
		bucket.slot, bucket.total, bucket.bad = slot, 0, 0
	}
	bucket.total++
	if failed {
		bucket.bad++
	}

	for i := range b.buckets {
		if bucket := &b.buckets[i]; bucket.slot > slot-windowBuckets {
			total += bucket.total
			bad += bucket.bad
		}
	}
	return total, bad
}

// State returns the current state. If the time of an open breaker is over, it becomes half open with the next message.
func (b *Breaker) State() State {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state
}
