package scheduled

import (
	"context"
	"errors"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/retry"
)

const (
	// claimCollections bounds the statements of one transaction, because the lease cannot be renewed
	// while it runs.
	claimCollections = 100
	// earlyRetryDelay is the first wait for an envelope that was due by the clock of this process, but
	// not by that of the server.
	earlyRetryDelay = 25 * time.Millisecond
	maxEarlyTries   = 3
)

// claimGroup is a group of envelopes of one collection that were due.
type claimGroup struct {
	collection *scheduledCollection
	timers     []timer // of ids

	coll *mongo.Collection
	ids  []bson.RawValue
	have int64 // how many of them were still due and have the claim, after claimGroups
}

// claimDue claims envelopes that have become due, until ctx ends or the lease is lost.
func (s *Scheduled) claimDue(ctx context.Context) error {
	backoff := retry.Reopen.Start()
	for {
		due, err := s.awaitDue(ctx)
		if err != nil {
			return err
		}

		begin := time.Now()
		groups, err := s.claimGroups(ctx, groupByCollection(due), backoff)
		if err != nil {
			return err
		}
		crash.At("after-claim")

		select {
		case s.claimedGroups <- groups:
		case <-ctx.Done():
			return context.Cause(ctx)
		}

		// Otherwise a trickle of envelopes would cost one transaction each.
		if len(due) < smallClaim {
			if err := retry.Sleep(ctx, claimPause-time.Since(begin)); err != nil {
				return err
			}
		}
	}
}

// awaitDue blocks until envelopes are due and there is room for them, and returns them. It returns the
// cause of ctx when ctx ends.
func (s *Scheduled) awaitDue(ctx context.Context) ([]timer, error) {
	idle := time.NewTimer(time.Hour)
	defer idle.Stop()

	for {
		room := maxScheduledInFlight - s.timers.countInFlight()
		// Without room, only the end of a flight can change the result.
		if room > 0 {
			now := s.Now()
			due, next, more := s.timers.takeDue(now.UnixMilli(), min(room, s.claimSize.Most()), claimCollections)
			// The entries that were taken leave room for others of the index.
			s.requestFeed(due)
			if len(due) > 0 {
				return due, nil
			}

			wait := time.Hour
			if more {
				// A time in the past would make the loop spin.
				wait = max(time.UnixMilli(next).Sub(now), time.Millisecond)
			}
			idle.Reset(wait)
		}

		select {
		case <-idle.C:
		case <-s.timers.wake:
		case <-s.room:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// requestFeed requests a look at the indexes if the heap is low on entries of a collection of taken
// whose index has more.
func (s *Scheduled) requestFeed(taken []timer) {
	for _, e := range taken {
		if e.collection.passPending.Load() && e.collection.indexEntries.Load() < feedLow {
			retry.Signal(s.feedWake)
			return
		}
	}
}

// groupByCollection returns the envelopes grouped by collection.
func groupByCollection(due []timer) []*claimGroup {
	byCollection := make(map[*scheduledCollection]*claimGroup, 1)
	var groups []*claimGroup

	for _, e := range due {
		g := byCollection[e.collection]
		if g == nil {
			g = &claimGroup{collection: e.collection, coll: e.collection.coll}
			byCollection[e.collection] = g
			groups = append(groups, g)
		}
		g.timers = append(g.timers, e)
		g.ids = append(g.ids, e.id)
	}
	return groups
}

// claimGroups claims the groups in one transaction. If that fails, it claims each group alone, so that a
// collection that cannot be written does not block the others. If the server is too slow for so many,
// it puts all of them back, and the next claims are smaller.
//
// It returns the claimed groups, puts back the others, and waits with backoff after a failure. It
// returns an error only if ctx ends or the lease is lost.
func (s *Scheduled) claimGroups(
	ctx context.Context, groups []*claimGroup, backoff *retry.Backoff,
) ([]*claimGroup, error) {
	err := s.claimTogether(ctx, groups)
	if err == nil {
		backoff.Reset()
		s.claimSize.Ended()
		return groups, nil
	}

	// The transaction took too long. Its groups, one after the other, would take as long.
	if errors.Is(err, mongodb.ErrSlow) {
		n := 0
		for _, g := range groups {
			s.putBack(g)
			n += len(g.timers)
		}
		s.claimSize.Slow(n)
		return nil, nil
	}

	var claimed []*claimGroup
	for _, g := range groups {
		// With one group, this claim would only repeat the failed one.
		if len(groups) > 1 && ctx.Err() == nil && !errors.Is(err, lease.ErrLeaseLost) {
			err = s.claimTogether(ctx, []*claimGroup{g})
			if err == nil {
				claimed = append(claimed, g)
				continue
			}
		}

		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if errors.Is(err, lease.ErrLeaseLost) {
			return nil, err
		}
		if errors.Is(err, mongodb.ErrSlow) {
			s.claimSize.Slow(len(g.timers))
		}

		s.OnRetry(err)
		s.putBack(g)
	}
	return claimed, backoff.Wait(ctx)
}

// putBack returns a group to the heap, where it is due at once. Its claim may have been committed although the attempt failed,
// and the index does not bring envelopes that this owner has claimed.
func (s *Scheduled) putBack(g *claimGroup) {
	for _, e := range g.timers {
		// The heap accepts no envelope that is in flight.
		s.endTimer(e)
		e.kept = true
		s.timers.pushTimer(e)
	}
}

// claimTogether claims the groups in one transaction.
func (s *Scheduled) claimTogether(ctx context.Context, groups []*claimGroup) error {
	return claimGroups(ctx, s.Fencer, s.claim, s.Now(), groups)
}

// endTimer removes an envelope from those in flight, with any fate.
func (s *Scheduled) endTimer(e timer) {
	s.timers.endFlight(e.key)
	retry.Signal(s.room)
}

// releaseUnclaimed releases an envelope that could not be claimed: it was canceled or rescheduled,
// another owner has claimed it, or it is not yet due by the clock of the server. Only in the last case
// another try makes sense before the index brings it again.
func (s *Scheduled) releaseUnclaimed(e timer) {
	s.endTimer(e)

	e.tries++
	if e.tries < maxEarlyTries && s.Now().UnixMilli()-e.due < 1000 {
		e.due, e.fed = s.Now().Add(earlyRetryDelay<<(e.tries-1)).UnixMilli(), false
		s.timers.pushTimer(e)
	}
}
