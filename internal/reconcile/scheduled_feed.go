package reconcile

import (
	"context"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/store"
)

const (
	feedReply   = 2000 // ids and times in a reply
	feedMost    = 4 * store.MaxClaim
	feedLeast   = feedMost / 2
	feedAtOnce  = 4 // collections that are asked at a time
	feedTimeout = 30 * time.Second
	// slowLook bounds what asking costs: a look that took long is repeated after this many times as long.
	slowLook = 10
	mostWait = 30 * time.Second
)

// feed fills the heap from the indexes. A look at a collection is one cursor, which is left open while the heap has enough
// of it: so many envelopes that are due at once are read once, in the order of their times.
func (s *Scheduled) feed(ctx context.Context) error {
	tick := time.NewTicker(s.Poll)
	defer tick.Stop()
	for {
		list, begin := s.watched(), time.Now()
		g, within := errgroup.WithContext(ctx)
		g.SetLimit(feedAtOnce)
		for _, c := range list {
			if s.due(c) {
				g.Go(func() error { s.look(within, c); return nil })
			}
		}
		_ = g.Wait()
		s.feeding.Store(slices.ContainsFunc(list, func(c *calendar) bool { return c.more.Load() }))
		s.round = time.Since(begin)
		select {
		case <-tick.C:
		case <-s.asked:
		case <-ctx.Done():
			for _, c := range list {
				c.close()
			}
			return context.Cause(ctx)
		}
	}
}

// due reports whether the index of a collection is to be asked now.
func (s *Scheduled) due(c *calendar) bool {
	if c.cur != nil {
		return c.fed.Load() < feedLeast
	}
	return !time.Now().Before(c.next) || c.rested && !c.idle.Load()
}

// look goes on with the pass over a collection, or begins one.
func (s *Scheduled) look(over context.Context, c *calendar) {
	ctx, cancel := context.WithTimeout(over, feedTimeout)
	defer cancel()
	begin := time.Now()
	done, err := s.pass(ctx, c)
	c.took += time.Since(begin)
	switch {
	case err != nil:
		c.close()
		c.next = time.Now().Add(max(s.Poll, time.Second))
		if over.Err() != nil {
			return
		}
		s.trouble(err)
		if !c.failed {
			s.Log.Warn("cannot ask for scheduled envelopes; trying again", "collection", c.ns, "error", err)
		}
		c.failed = true
	case done:
		c.close()
		c.failed = false
		c.next = s.again(ctx, c)
	}
}

// pass reads on until the heap has enough, or to the end.
func (s *Scheduled) pass(ctx context.Context, c *calendar) (done bool, err error) {
	if c.cur == nil {
		c.began, c.took, c.found = time.Now(), 0, 0
		if c.cur, err = store.ScheduledUntil(ctx, c.coll, s.claim, s.Now().Add(lookahead), feedReply, s.Part); err != nil {
			return false, err
		}
	}
	for c.fed.Load() < feedMost && c.cur.Next(ctx) {
		c.found++
		id, at := c.cur.Current.Lookup("_id"), c.cur.Current.Lookup("dueAt")
		ms, ok := at.DateTimeOK()
		if !ok {
			continue
		}
		s.timers.add(c, id, ms, true)
	}
	if err := c.cur.Err(); err != nil {
		return false, err
	}
	done = c.fed.Load() < feedMost
	c.more.Store(!done)
	return done, nil
}

// again is when the next pass over the collection begins.
func (s *Scheduled) again(ctx context.Context, c *calendar) time.Time {
	c.rested = false
	if c.found == 0 && time.Since(c.checked) >= recheck {
		saw := c.saw.Load()
		list, err := store.ScheduledAfter(ctx, c.coll, s.Now(), 1, s.Part)
		if err == nil {
			c.checked = time.Now()
			c.rested = len(list) == 0
			c.idle.Store(c.rested)
		}
		if c.saw.Load() != saw {
			c.idle.Store(false) // it was told of while it was asked
		}
	}
	if c.rested {
		return c.began.Add(recheck)
	}
	return c.began.Add(min(max(s.Poll, slowLook*c.took, 2*s.round), mostWait))
}

// close gives the cursor back; the collection is asked from the beginning again.
func (c *calendar) close() {
	if c.cur == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = c.cur.Close(ctx) // an idle cursor ends by itself
	c.cur = nil
	c.more.Store(false)
}
