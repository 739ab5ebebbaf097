package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// trouble is the state of a lane that waits for a cause outside the message: the database, or a
// claim of another member.
type trouble struct {
	backoff *retry.Backoff

	mu           sync.Mutex
	databaseAway bool
	timer        *time.Timer // of the wait for the database; nil without one
	waitID       int         // changes with each wait, so that a timer that fires too late does nothing
}

// claimPoll is how often a claim of another member is tried again. The member may release it before
// it expires.
const claimPoll = 500 * time.Millisecond

// maxQuerySilence is how long the database may take for a query of the consumer before the wait is
// reported.
const maxQuerySilence = 5 * time.Second

// maxCommitSilence is the same limit for the commit of a transaction. A commit waits for the disks
// of a majority of the replica set. If it is slow, queries of other partitions may still be fast.
const maxCommitSilence = 4 * maxQuerySilence

// watchDatabase starts a wait of the consumer, not of the handler, for the database. The wait ends
// with stopWatching. After limit the database counts as away even if no call has failed, because
// the driver looks for a server for 30 s.
func (o *trouble) watchDatabase(track *track, limit time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.restartLocked(track, limit)
}

// restartLocked ends the wait for the database, if there is one, and starts another one.
func (o *trouble) restartLocked(track *track, limit time.Duration) {
	o.stopLocked()
	id := o.waitID
	o.timer = time.AfterFunc(limit, func() {
		o.markAway(track, fmt.Errorf("no response for %v", limit), func() bool { return o.waitID == id })
	})
}

// stopWatching ends the wait that watchDatabase started.
func (o *trouble) stopWatching() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.stopLocked()
}

// stopLocked ends the wait for the database, if there is one.
func (o *trouble) stopLocked() {
	o.waitID++
	if o.timer != nil {
		o.timer.Stop()
		o.timer = nil
	}
}

// noteResponse begins the wait for the next response of the database, if the lane waits for one.
func (o *trouble) noteResponse(track *track) {
	o.markBack(track)
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.timer != nil {
		o.restartLocked(track, maxQuerySilence)
	}
}

// markBack removes the lane from the lanes that cannot reach the database.
func (o *trouble) markBack(track *track) {
	var report func()
	o.mu.Lock()
	if o.databaseAway {
		o.databaseAway = false
		report = track.p.s.outage.removeLane()
	}
	o.mu.Unlock()
	if report != nil {
		report()
	}
}

// markAway adds the lane to the lanes that cannot reach the database, if isCurrentLocked is nil or returns true.
func (o *trouble) markAway(track *track, err error, isCurrentLocked func() bool) {
	var report func()
	o.mu.Lock()
	if !o.databaseAway && (isCurrentLocked == nil || isCurrentLocked()) {
		o.databaseAway = true
		report = track.p.s.outage.addLane(err)
	}
	o.mu.Unlock()
	if report != nil {
		report()
	}
}

// waitOut waits before the next attempt after err, which is not the message's fault. It returns
// false if there must be no next attempt: the session ends, the consumer is paused, or the messages
// have to be fetched again.
func (o *trouble) waitOut(track *track, err error) bool {
	if o.backoff == nil {
		o.backoff = retry.Reopen.Start()
	}
	delay := o.backoff.Next()

	switch {
	case errors.Is(err, inbox.ErrRecreated), errors.Is(err, outbox.ErrStandalone):
		track.p.s.failRun(err)
		return false

	case errors.Is(err, inbox.ErrUnconfirmed):
		// The inbox confirms the log during the next attempt.

	// Another member handles the message now, which usually takes less than a back-off.
	case errors.Is(err, inbox.ErrInProgress), errors.Is(err, inbox.ErrClaimLost):
		delay = claimPoll

	// The leader of the partition is away. Other partitions go on.
	case errors.Is(err, errNoLog):
		track.p.reportTrouble("cannot read the end of the partition; its messages wait", err, "handler", track.reg.name)

	// MongoDB has responded, so other lanes go on.
	case mongodb.IsConflict(err):
		o.markBack(track)
		track.p.reportTrouble("cannot handle messages: another transaction holds documents of the inbox; they wait", err, "handler", track.reg.name)

	case errors.Is(err, inbox.ErrStale):
		// The messages are fetched again: those in memory may belong to the previous topic of that name.
		track.p.detachHandler(track.reg)
		track.p.reportTrouble("cannot use the messages in memory: another run of a member has begun with the partition; they are fetched again", err, "handler", track.reg.name)
		track.waitYielding(delay)
		return false

	default:
		o.markAway(track, err, nil)
	}

	track.waitYielding(delay)
	return !track.mustStop()
}

// clearTrouble resets the backoff, and removes the lane from the lanes that cannot reach the database.
func (o *trouble) clearTrouble(track *track) {
	o.backoff = nil
	o.markBack(track)
}

// outageError reports that the database does not respond, and later that it responds again. In
// between nothing is fetched, nothing is lost and no attempt is spent. Each of the two is reported
// once, however many messages wait.
type outageError struct {
	Over bool
	Took time.Duration // if it is over
	Err  error         // of the first failed call; nil if it is over
}

func (e *outageError) Error() string {
	if e.Over {
		return fmt.Sprintf("the database responds again after %v", e.Took.Round(time.Millisecond))
	}
	return fmt.Sprintf("waiting for the database, nothing is fetched until it responds: %v", e.Err)
}

// Unwrap returns the error of the first failed call.
func (e *outageError) Unwrap() error { return e.Err }

func (e *outageError) line() line {
	if e.Over {
		return line{slog.LevelInfo, "MongoDB responds again", []any{"took", e.Took}}
	}
	return line{slog.LevelWarn, "cannot reach MongoDB; nothing is fetched until it responds", []any{"error", e.Err}}
}

// outage counts the lanes that cannot reach the database. While there are any, nothing is fetched.
type outage struct {
	mu         sync.Mutex
	lanes      int
	since      time.Time
	over       chan struct{} // closed at the end of the current outage
	noteLocked func(on bool)
	report     func(err *outageError) // called without a lock
}

// addLane counts one more lane. The first lane starts the outage, with err as its cause. addLane then returns a function that
// reports that. The caller must call it without a lock, because it calls code of the user.
func (o *outage) addLane(err error) (report func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.lanes++; o.lanes > 1 {
		return nil
	}
	o.over, o.since = make(chan struct{}), time.Now()
	o.noteLocked(true)
	return func() { o.report(&outageError{Err: err}) }
}

// removeLane counts one lane less. The last lane ends the outage. removeLane then returns a function as addLane does.
func (o *outage) removeLane() (report func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.lanes--; o.lanes > 0 {
		return nil
	}
	close(o.over)
	o.noteLocked(false)
	took := time.Since(o.since)
	return func() { o.report(&outageError{Over: true, Took: took}) }
}

// isOn reports whether there is an outage.
func (o *outage) isOn() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.lanes > 0
}

// waitOver blocks until there is no outage. It returns the cause of ctx if ctx ends first.
func (o *outage) waitOver(ctx context.Context) error {
	for {
		o.mu.Lock()
		lanes, over := o.lanes, o.over
		o.mu.Unlock()
		if lanes == 0 {
			return nil
		}

		select {
		case <-over:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
