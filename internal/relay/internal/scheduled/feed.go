package scheduled

import (
	"context"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	// lookahead is the time by which an envelope is read from the index before it is due. It is longer than maxClaimAhead and the
	// time between two reads of the index together.
	lookahead       = 5 * time.Second
	feedReply       = 2000 // ids and times in a reply
	feedHigh        = 12 * maxClaim
	feedLow         = feedHigh / 2
	feedConcurrency = 4 // collections that are read at the same time
	feedTimeout     = 30 * time.Second
	// passPauseFactor bounds the cost of passes: after a slow pass, the next one begins only after this
	// many times its duration, but at most maxPassPause later.
	passPauseFactor = 10
	maxPassPause    = 30 * time.Second
)

// feedTimers fills the heap from the indexes until ctx ends, and returns its cause. A pass over a
// collection is one cursor, which stays open while the heap has enough of its entries. Even if many
// envelopes are due at once, each is read once, in the order of the due times.
func (s *Scheduled) feedTimers(ctx context.Context) error {
	tick := time.NewTicker(s.Poll)
	defer tick.Stop()

	for {
		list, begin := s.watchedCollections(), time.Now()
		group, groupCtx := errgroup.WithContext(ctx)
		group.SetLimit(feedConcurrency)
		for _, c := range list {
			// continuePass handles its errors itself, so one collection does not end the passes of the others.
			if s.shouldRead(c) {
				group.Go(func() error { s.continuePass(groupCtx, c); return nil })
			}
		}
		_ = group.Wait()

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

// shouldRead reports whether the index of a collection is to be read now.
func (s *Scheduled) shouldRead(collection *scheduledCollection) bool {
	if s.isPaused(collection) {
		return false
	}
	if collection.cursor != nil {
		return collection.indexEntries.Load() < feedLow
	}
	return !time.Now().Before(collection.nextPass)
}

// continuePass begins or continues the pass over a collection. After an error the next pass starts from
// the beginning.
func (s *Scheduled) continuePass(parent context.Context, collection *scheduledCollection) {
	ctx, cancel := context.WithTimeout(parent, feedTimeout)
	defer cancel()

	begin := time.Now()
	done, err := s.readIndex(ctx, collection)
	collection.passTook += time.Since(begin)

	if err != nil {
		// The error may have ended the cursor.
		collection.closeCursor()
		// The end of the term is no problem of the server.
		if parent.Err() == nil {
			s.pauseCollection(collectionStep{collection, false}, err)
		}
		return
	}

	s.reportSuccess(collectionStep{collection, false})
	if done {
		collection.closeCursor()
		collection.nextPass = collection.passBegan.Add(min(max(s.Poll, passPauseFactor*collection.passTook, 2*s.lastRound), maxPassPause))
	}
}

// readIndex reads entries into the heap until the heap has enough of them, or to the end, which it
// reports as done.
func (s *Scheduled) readIndex(ctx context.Context, collection *scheduledCollection) (done bool, err error) {
	if collection.cursor == nil {
		collection.passBegan, collection.passTook = time.Now(), 0
		collection.cursor, err = scheduledUntil(ctx, collection.coll, s.Now().Add(lookahead), feedReply, s.Slot)
		if err != nil {
			return false, err
		}
	}

	for collection.indexEntries.Load() < feedHigh && collection.cursor.Next(ctx) {
		id, at := collection.cursor.Current.Lookup("_id"), collection.cursor.Current.Lookup("dueAt")
		ms, ok := at.DateTimeOK()
		// An array that contains a time matches the query as well.
		if !ok {
			continue
		}
		s.timers.addCopy(collection, id, ms, true)
	}
	if err := collection.cursor.Err(); err != nil {
		return false, err
	}

	done = collection.indexEntries.Load() < feedHigh
	collection.passPending.Store(!done)
	return done, nil
}

// closeCursor ends the pass over the collection. It blocks for at most a second.
func (c *scheduledCollection) closeCursor() {
	if c.cursor == nil {
		return
	}

	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()

	// The server closes idle cursors itself.
	_ = c.cursor.Close(ctx)
	c.cursor = nil
	c.passPending.Store(false)
}
