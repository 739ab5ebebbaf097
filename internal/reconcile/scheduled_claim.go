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
	// soonAgain is how long an envelope rests that was due by this process's reckoning and not by the server's.
	soonAgain = 25 * time.Millisecond
	mostTries = 3
)

// claimed are envelopes of one collection that were due; those that still were now bear the claim.
type claimed struct {
	cal    *calendar
	timers []timer
	have   int64 // of these, bear it
}

// claimDue claims what has become due, until ctx ends or the lease is lost.
func (s *Scheduled) claimDue(ctx context.Context) error {
	back := retry.Reopen.Start()
	for {
		due, err := s.await(ctx)
		if err != nil {
			return err
		}
		begin := time.Now()
		groups, err := s.claimEach(ctx, group(due), back)
		if err != nil {
			return err
		}
		crash.At("after-claim")
		select {
		case s.ready <- groups:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if len(due) < fewClaims {
			if err := retry.Sleep(ctx, breath-time.Since(begin)); err != nil {
				return err
			}
		}
	}
}

// await blocks until envelopes are due and there is room for them, and takes them.
func (s *Scheduled) await(ctx context.Context) ([]timer, error) {
	idle := time.NewTimer(time.Hour)
	defer idle.Stop()
	for {
		var wait time.Duration
		if room := maxAloft - s.timers.aloft(); room > 0 {
			now := s.Now()
			due, next, more := s.timers.take(nil, now.UnixMilli(), min(room, s.most), claimCollections)
			s.hungry(due)
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

// hungry asks the index to go on where the heap has run low.
func (s *Scheduled) hungry(taken []timer) {
	for _, e := range taken {
		if e.cal.more.Load() && e.cal.fed.Load() < feedLeast {
			signal(s.asked)
			return
		}
	}
}

// group sorts envelopes by their collection.
func group(due []timer) []claimed {
	at := make(map[*calendar]int, 1)
	var out []claimed
	for _, e := range due {
		i, ok := at[e.cal]
		if !ok {
			i = len(out)
			at[e.cal] = i
			out = append(out, claimed{cal: e.cal})
		}
		out[i].timers = append(out[i].timers, e)
	}
	return out
}

// claimEach claims the groups together, or, if that does not succeed, each alone, so that a collection that cannot be
// written holds up nobody else. Those that are not claimed are put back, and all of them where the server is too slow for so
// many. It returns an error only if going on is pointless.
func (s *Scheduled) claimEach(ctx context.Context, groups []claimed, back *retry.Backoff) ([]claimed, error) {
	err := s.claimAll(ctx, groups)
	if err == nil {
		back.Reset()
		if s.ended++; s.ended == growAfter {
			s.most, s.ended = min(2*s.most, store.MaxClaim), 0
		}
		return groups, nil
	}
	if errors.Is(err, store.ErrSlow) {
		n := 0
		for _, g := range groups {
			n += len(g.timers)
			s.putBack(g)
		}
		s.most, s.ended = max(n/4, 1), 0
		return nil, nil
	}
	var had []claimed
	for _, g := range groups {
		if len(groups) > 1 && ctx.Err() == nil && !errors.Is(err, lease.ErrLeaseLost) {
			one := []claimed{g}
			if err = s.claimAll(ctx, one); err == nil {
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
		s.trouble(err)
		if back.Attempts() == 0 {
			s.Log.Warn("cannot claim scheduled envelopes; trying again", "collection", g.cal.ns, "error", err)
		}
		s.putBack(g)
	}
	return had, back.Wait(ctx)
}

func (s *Scheduled) putBack(g claimed) {
	for _, e := range g.timers {
		s.land(e.key)
		s.timers.push(e)
	}
}

func (s *Scheduled) claimAll(ctx context.Context, groups []claimed) error {
	list := make([]store.Due, len(groups))
	for i := range groups {
		list[i] = groups[i].due()
	}
	err := store.ClaimDue(ctx, s.Fencer, s.claim, s.Now(), list)
	for i := range list {
		groups[i].have = list[i].Have
	}
	return err
}

// due are the ids of a group.
func (c *claimed) due() store.Due {
	d := store.Due{Coll: c.cal.coll}
	for i := range c.timers {
		d.IDs = append(d.IDs, c.timers[i].id)
	}
	return d
}

// land ends the flight of envelopes, whatever became of them.
func (s *Scheduled) land(keys ...uint64) {
	s.timers.landed(keys...)
	signal(s.room)
}

// notHad lets go of an envelope that was not to be claimed: it was cancelled or moved, somebody else has it, or it is not
// yet due by the server's clock. Only in the last case it is worth another try before the index says so.
func (s *Scheduled) notHad(e timer) {
	s.land(e.key)
	if e.tries++; e.tries < mostTries && s.Now().UnixMilli()-e.due < 1000 {
		e.due, e.fed = s.Now().Add(soonAgain<<(e.tries-1)).UnixMilli(), false
		s.timers.push(e)
	}
}
