package reconcile

import (
	"context"
	"errors"
	"time"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/store"
)

const (
	// claimCollections bounds the statements of one transaction: while it runs, the lease cannot be renewed.
	claimCollections = 100
	// earlyRetryDelay is how long an envelope rests that was due by this process's reckoning and not by the server's.
	earlyRetryDelay = 25 * time.Millisecond
	maxEarlyTries   = 3
)

// claimGroup are envelopes of one collection that were due; those that still were now bear the claim.
type claimGroup struct {
	collection   *scheduledCollection
	timers       []timer
	claimedCount int64 // of these, bear it
}

// claimDue claims what has become due, until ctx ends or the lease is lost.
func (s *Scheduled) claimDue(ctx context.Context) error {
	back := retry.Reopen.Start()
	for {
		due, err := s.awaitDue(ctx)
		if err != nil {
			return err
		}
		begin := time.Now()
		groups, err := s.claimGroups(ctx, groupByCollection(due), back)
		if err != nil {
			return err
		}
		crash.At("after-claim")
		select {
		case s.claimedGroups <- groups:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if len(due) < smallClaim {
			if err := retry.Sleep(ctx, claimPause-time.Since(begin)); err != nil {
				return err
			}
		}
	}
}

// awaitDue blocks until envelopes are due and there is room for them, and takes them.
func (s *Scheduled) awaitDue(ctx context.Context) ([]timer, error) {
	idle := time.NewTimer(time.Hour)
	defer idle.Stop()
	for {
		var wait time.Duration
		if room := maxScheduledInFlight - s.timers.countInFlight(); room > 0 {
			now := s.Now()
			due, next, more := s.timers.takeDue(nil, now.UnixMilli(), min(room, s.claimSize.Most()), claimCollections)
			s.requestFeed(due)
			if len(due) > 0 {
				return due, nil
			}
			wait = time.Hour
			if more {
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

// requestFeed asks the index to go on where the heap has run low.
func (s *Scheduled) requestFeed(taken []timer) {
	for _, e := range taken {
		if e.collection.passPending.Load() && e.collection.indexEntries.Load() < feedLow {
			signal(s.feedWake)
			return
		}
	}
}

// groupByCollection sorts envelopes by their collection.
func groupByCollection(due []timer) []claimGroup {
	at := make(map[*scheduledCollection]int, 1)
	var out []claimGroup
	for _, e := range due {
		i, ok := at[e.collection]
		if !ok {
			i = len(out)
			at[e.collection] = i
			out = append(out, claimGroup{collection: e.collection})
		}
		out[i].timers = append(out[i].timers, e)
	}
	return out
}

// claimGroups claims the groups together, or, if that does not succeed, each alone, so that a collection that cannot be
// written holds up nobody else. Those that are not claimed are put back. It returns an error only if going on is
// pointless. Where the server is too slow for so many, all are put back, and the next claims are smaller.
func (s *Scheduled) claimGroups(ctx context.Context, groups []claimGroup, back *retry.Backoff) ([]claimGroup, error) {
	err := s.claimTogether(ctx, groups)
	if err == nil {
		back.Reset()
		s.claimSize.Ended()
		return groups, nil
	}
	if errors.Is(err, store.ErrSlow) {
		n := 0
		for _, g := range groups {
			s.putBack(g)
			n += len(g.timers)
		}
		s.claimSize.Slow(n)
		return nil, nil
	}
	var had []claimGroup
	for _, g := range groups {
		if len(groups) > 1 && ctx.Err() == nil && !errors.Is(err, lease.ErrLeaseLost) {
			one := []claimGroup{g}
			if err = s.claimTogether(ctx, one); err == nil {
				had = append(had, one...)
				continue
			}
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if errors.Is(err, lease.ErrLeaseLost) {
			return nil, err
		}
		if errors.Is(err, store.ErrSlow) {
			s.claimSize.Slow(len(g.timers))
		}
		s.reportTrouble(err)
		if back.Attempts() == 0 {
			s.Log.Warn("cannot claim scheduled envelopes; trying again", "collection", g.collection.ns, "error", err)
		}
		s.putBack(g)
	}
	return had, back.Wait(ctx)
}

// putBack has a group wait for its next turn, which comes at once.
func (s *Scheduled) putBack(g claimGroup) {
	for _, e := range g.timers {
		s.endTimers(e.key)
		s.timers.pushTimer(e)
	}
}

func (s *Scheduled) claimTogether(ctx context.Context, groups []claimGroup) error {
	list := make([]store.Due, len(groups))
	for i := range groups {
		list[i] = groups[i].storeDue()
	}
	err := store.ClaimDue(ctx, s.Fencer, s.claim, s.Now(), list)
	for i := range list {
		groups[i].claimedCount = list[i].Have
	}
	return err
}

// storeDue are the ids of a group.
func (c *claimGroup) storeDue() store.Due {
	d := store.Due{Coll: c.collection.coll}
	for i := range c.timers {
		d.IDs = append(d.IDs, c.timers[i].id)
	}
	return d
}

// endTimers ends the flight of envelopes, whatever became of them.
func (s *Scheduled) endTimers(keys ...uint64) {
	s.timers.endFlights(keys...)
	signal(s.room)
}

// releaseUnclaimed lets go of an envelope that was not to be claimed: it was cancelled or moved, somebody else has it, or it is not
// yet due by the server's clock. Only in the last case it is worth another try before the index says so.
func (s *Scheduled) releaseUnclaimed(e timer) {
	s.endTimers(e.key)
	if e.tries++; e.tries < maxEarlyTries && s.Now().UnixMilli()-e.due < 1000 {
		e.due, e.fed = s.Now().Add(earlyRetryDelay<<(e.tries-1)).UnixMilli(), false
		s.timers.pushTimer(e)
	}
}
