package reconcile

import (
	"context"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/store"
)

const (
	feedReply       = 2000 // ids and times in a reply
	feedHigh        = 4 * store.MaxClaim
	feedLow         = feedHigh / 2
	feedConcurrency = 4 // collections that are asked at a time
	feedTimeout     = 30 * time.Second
	// passPauseFactor bounds what asking costs: a look that took long is repeated after this many times as long.
	passPauseFactor = 10
	maxPassPause    = 30 * time.Second
)

// feedTimers fills the heap from the indexes. A look at a collection is one cursor, which is left open while the heap has enough
// of it: so many envelopes that are due at once are read once, in the order of their times.
func (s *Scheduled) feedTimers(ctx context.Context) error {
	tick := time.NewTicker(s.Poll)
	defer tick.Stop()
	for {
		list, begin := s.watchedCollections(), time.Now()
		g, within := errgroup.WithContext(ctx)
		g.SetLimit(feedConcurrency)
		for _, c := range list {
			if s.shouldRead(c) {
				g.Go(func() error { s.continuePass(within, c); return nil })
			}
		}
		_ = g.Wait()
		s.indexHasMore.Store(slices.ContainsFunc(list, func(c *scheduledCollection) bool { return c.passPending.Load() }))
		s.lastRound = time.Since(begin)
		select {
		case <-tick.C:
		case <-s.feedWake:
		case <-ctx.Done():
			for _, c := range list {
				c.closeCursor()
			}
			return context.Cause(ctx)
		}
	}
}

// shouldRead reports whether the index of a collection is to be asked now.
func (s *Scheduled) shouldRead(c *scheduledCollection) bool {
	if c.cursor != nil {
		return c.indexEntries.Load() < feedLow
	}
	return !time.Now().Before(c.nextPass) || c.restedAfterPass && !c.idle.Load()
}

// continuePass goes on with the pass over a collection, or begins one.
func (s *Scheduled) continuePass(over context.Context, c *scheduledCollection) {
	ctx, cancel := context.WithTimeout(over, feedTimeout)
	defer cancel()
	begin := time.Now()
	done, err := s.readIndex(ctx, c)
	c.passTook += time.Since(begin)
	switch {
	case err != nil:
		c.closeCursor()
		c.nextPass = time.Now().Add(max(s.Poll, time.Second))
		if over.Err() != nil {
			return
		}
		s.reportTrouble(err)
		if !c.failed {
			s.Log.Warn("cannot ask for scheduled envelopes; trying again", "collection", c.ns, "error", err)
		}
		c.failed = true
	case done:
		c.closeCursor()
		c.failed = false
		c.nextPass = s.nextPassTime(ctx, c)
	}
}

// readIndex reads on until the heap has enough, or to the end.
func (s *Scheduled) readIndex(ctx context.Context, c *scheduledCollection) (done bool, err error) {
	if c.cursor == nil {
		c.passBegan, c.passTook, c.passFound = time.Now(), 0, 0
		if c.cursor, err = store.ScheduledUntil(ctx, c.coll, s.claim, s.Now().Add(lookahead), feedReply, s.Part); err != nil {
			return false, err
		}
	}
	for c.indexEntries.Load() < feedHigh && c.cursor.Next(ctx) {
		c.passFound++
		id, at := c.cursor.Current.Lookup("_id"), c.cursor.Current.Lookup("dueAt")
		ms, ok := at.DateTimeOK()
		if !ok {
			continue
		}
		s.timers.addCopy(c, id, ms, true)
	}
	if err := c.cursor.Err(); err != nil {
		return false, err
	}
	done = c.indexEntries.Load() < feedHigh
	c.passPending.Store(!done)
	return done, nil
}

// nextPassTime is when the next pass over the collection begins.
func (s *Scheduled) nextPassTime(ctx context.Context, c *scheduledCollection) time.Time {
	c.restedAfterPass = false
	if c.passFound == 0 && time.Since(c.checkedAhead) >= idleRecheck {
		saw := c.lastHint.Load()
		list, err := store.ScheduledAfter(ctx, c.coll, s.Now(), 1, s.Part)
		if err == nil {
			c.checkedAhead = time.Now()
			c.restedAfterPass = len(list) == 0
			c.idle.Store(c.restedAfterPass)
		}
		if c.lastHint.Load() != saw {
			c.idle.Store(false) // it was told of while it was asked
		}
	}
	if c.restedAfterPass {
		return c.passBegan.Add(idleRecheck)
	}
	return c.passBegan.Add(min(max(s.Poll, passPauseFactor*c.passTook, 2*s.lastRound), maxPassPause))
}

// closeCursor gives the cursor back; the collection is asked from the beginning again.
func (c *scheduledCollection) closeCursor() {
	if c.cursor == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = c.cursor.Close(ctx) // an idle cursor ends by itself
	c.cursor = nil
	c.passPending.Store(false)
}
