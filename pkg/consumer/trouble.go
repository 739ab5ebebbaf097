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
	backoff *retry.Backoff

	mu      sync.Mutex
	databaseAway    bool
	timer   *time.Timer // of the wait for the database
	waitID int         // changes with each wait, so that a timer that fires too late does nothing
}

// claimPoll is how often a claim of somebody else's is asked for: it may be given up before its time.
const claimPoll = 500 * time.Millisecond

// maxQuerySilence is how long the database may take for what the consumer asks of it before the wait is reported.
const maxQuerySilence = 5 * time.Second

// maxCommitSilence is the same for the commit of a transaction, which waits for a majority of the members and their disks: a slow
// one says nothing about what the other partitions ask for.
const maxCommitSilence = 4 * maxQuerySilence

// watchDatabase says that the consumer, not the handler, waits for the database from now on, until answered is called. After limit
// the database counts as away, before any call has failed: the driver looks for a server for 30 s.
func (o *trouble) watchDatabase(t *track, limit time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.waitID++
	wait := o.waitID
	o.timer = time.AfterFunc(limit, func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		if o.waitID == wait {
			o.markAwayLocked(t, fmt.Errorf("no answer for %v", limit))
		}
	})
}

// stopWatching ends what awaits began.
func (o *trouble) stopWatching() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.waitID++
	o.timer.Stop()
}

// markAwayLocked counts the lane among those that find the database away. The lock is held.
func (o *trouble) markAwayLocked(t *track, err error) {
	if !o.databaseAway {
		o.databaseAway = true
		t.p.s.outage.addLane(err)
	}
}

// waitOut waits; false if it was interrupted.
func (o *trouble) waitOut(t *track, err error) bool {
	if o.backoff == nil {
		o.backoff = retry.Reopen.Start()
	}
	d := o.backoff.Next()
	var recreated *inbox.RecreatedError
	switch {
	case errors.As(err, &recreated), errors.Is(err, outbox.ErrStandalone):
		t.p.s.failRun(err)
		return false
	case errors.Is(err, inbox.ErrUnconfirmed): // asked again
	case errors.Is(err, inbox.ErrClaimed), errors.Is(err, inbox.ErrClaimLost):
		d = claimPoll
	case errors.Is(err, inbox.ErrStale):
		// It is read again first: what is in memory may be of the topic that was there before.
		t.p.detachHandler(t.reg)
		t.p.s.report(err)
		t.waitYielding(d)
		return false
	default:
		o.mu.Lock()
		o.markAwayLocked(t, err)
		o.mu.Unlock()
	}
	t.waitYielding(d)
	return !t.mustStop()
}

func (o *trouble) clearTrouble(t *track) {
	o.backoff = nil
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.databaseAway {
		o.databaseAway = false
		t.p.s.outage.removeLane()
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
	lanes      int
	since  time.Time
	over   chan struct{} // of the present one
	notify func(on bool)
	report func(err error)
}

func (o *outage) addLane(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.lanes++; o.lanes == 1 {
		o.over, o.since = make(chan struct{}), time.Now()
		o.notify(true)
		o.report(&OutageError{Err: err})
	}
}

func (o *outage) removeLane() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.lanes--; o.lanes == 0 {
		close(o.over)
		o.notify(false)
		o.report(&OutageError{Over: true, Took: time.Since(o.since)})
	}
}

func (o *outage) waitOver(ctx context.Context) error {
	for {
		o.mu.Lock()
		n, over := o.lanes, o.over
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
