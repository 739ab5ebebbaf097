package consumer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/pkg/inbox"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// trouble is one lane's wait for what is not the message's fault: the database, or somebody else's claim.
type trouble struct {
	b *retry.Backoff

	mu      sync.Mutex
	away    bool
	timer   *time.Timer // of the wait for the database
	waiting int         // changes with each wait, so that a timer that fires too late does nothing
}

// claimPoll is how often a claim of somebody else's is asked for: it may be given up before its time.
const claimPoll = 500 * time.Millisecond

// silence is how long the database may take for what the consumer asks of it before the wait is reported.
const silence = 5 * time.Second

// commitSilence is the same for the commit of a transaction, which waits for a majority of the members and their disks: a slow
// one says nothing about what the other partitions ask for.
const commitSilence = 4 * silence

// awaits says that the consumer, not the handler, waits for the database from now on, until answered is called. After limit
// the database counts as away, before any call has failed: the driver looks for a server for 30 s.
func (o *trouble) awaits(t *track, limit time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.waiting++
	wait := o.waiting
	o.timer = time.AfterFunc(limit, func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		if o.waiting == wait {
			o.enter(t, fmt.Errorf("no answer for %v", limit))
		}
	})
}

// answered ends what awaits began.
func (o *trouble) answered() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.waiting++
	o.timer.Stop()
}

// enter counts the lane among those that find the database away. The lock is held.
func (o *trouble) enter(t *track, err error) {
	if !o.away {
		o.away = true
		t.p.s.away.enter(err)
	}
}

// wait waits; false if it was interrupted.
func (o *trouble) wait(t *track, err error) bool {
	if o.b == nil {
		o.b = retry.Reopen.Start()
	}
	d := o.b.Next()
	var recreated *inbox.RecreatedError
	switch {
	case errors.As(err, &recreated), errors.Is(err, outbox.ErrStandalone):
		t.p.s.fail(err)
		return false
	case errors.Is(err, inbox.ErrUnconfirmed): // asked again
	case errors.Is(err, inbox.ErrClaimed), errors.Is(err, inbox.ErrClaimLost):
		d = claimPoll
	case errors.Is(err, inbox.ErrStale):
		// It is read again first: what is in memory may be of the topic that was there before.
		t.p.detachHandler(t.reg)
		t.p.s.report(err)
		t.wait(d)
		return false
	default:
		o.mu.Lock()
		o.enter(t, err)
		o.mu.Unlock()
	}
	t.wait(d)
	return !t.interrupted()
}

func (o *trouble) over(t *track) {
	o.b = nil
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.away {
		o.away = false
		t.p.s.away.leave()
	}
}

// OutageError says that the database does not answer, and later that it answers again. Between the two nothing is fetched,
// nothing is lost and no attempt is spent. Each is reported once, however many messages wait.
type OutageError struct {
	Over bool
	Took time.Duration // if it is over
	Err  error         // what the first call returned; nil if it is over
}

func (e *OutageError) Error() string {
	if e.Over {
		return fmt.Sprintf("the database answers again after %v", e.Took.Round(time.Millisecond))
	}
	return fmt.Sprintf("waiting for the database, nothing is fetched until it answers: %v", e.Err)
}

// Is reports ErrOperational.
func (e *OutageError) Is(target error) bool { return target == ErrOperational }

// Unwrap is what the first call returned.
func (e *OutageError) Unwrap() error { return e.Err }

// outage counts the lanes that find the database away. While there are any, nothing is fetched.
type outage struct {
	mu     sync.Mutex
	n      int
	since  time.Time
	over   chan struct{} // of the present one
	notify func(on bool)
	report func(err error)
}

func (o *outage) enter(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.n++; o.n == 1 {
		o.over, o.since = make(chan struct{}), time.Now()
		o.notify(true)
		o.report(&OutageError{Err: err})
	}
}

func (o *outage) leave() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.n--; o.n == 0 {
		close(o.over)
		o.notify(false)
		o.report(&OutageError{Over: true, Took: time.Since(o.since)})
	}
}

func (o *outage) wait(ctx context.Context) error {
	for {
		o.mu.Lock()
		n, over := o.n, o.over
		o.mu.Unlock()
		if n == 0 {
			return nil
		}
		select {
		case <-over:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
