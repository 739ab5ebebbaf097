package scheduled

import (
	"context"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/base/retry"
)

const (
	lookConcurrency = 4 // collections that are looked at at the same time
	lookTimeout     = 30 * time.Second
	// lookPauseFactor bounds the cost of looks: after a slow one, the next begins only after this many times its duration, but at most
	// maxLookPause later.
	lookPauseFactor = 10
	maxLookPause    = 30 * time.Second
)

// lookForDue looks at the index of each collection for the envelope that is due first, until ctx ends, and returns its cause.
func (s *Scheduled) lookForDue(ctx context.Context) error {
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(lookConcurrency)
	// look handles its errors itself, so a collection does not end the looks at the others.
	defer func() { _ = group.Wait() }()
	wait := time.NewTimer(0)
	defer wait.Stop()

	var refreshed time.Time
	for {
		if time.Since(refreshed) >= s.Poll {
			s.refreshCollections()
			refreshed = time.Now()
		}
		list, next := s.takeLooks(time.Now())
		for _, c := range list {
			group.Go(func() error { s.look(groupCtx, c); return nil })
		}
		wait.Reset(min(time.Until(next), time.Until(refreshed.Add(s.Poll))))

		select {
		case <-wait.C:
		case <-s.lookWake:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// takeLooks returns the collections that are to be looked at now, and when the next one is.
func (s *Scheduled) takeLooks(now time.Time) (list []*scheduledCollection, next time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next = now.Add(s.Poll)

	for _, c := range s.collections {
		switch {
		case c.looking:
		case !now.Before(c.lookAt):
			c.looking, c.lookAgain, c.stale = true, false, false
			list = append(list, c)
		case c.lookAt.Before(next):
			next = c.lookAt
		}
	}
	return list, next
}

// look looks at the index of a collection.
func (s *Scheduled) look(parent context.Context, collection *scheduledCollection) {
	s.mu.Lock()
	except := collection.exceptLocked()
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(parent, lookTimeout)
	defer cancel()

	began := time.Now()
	first, err := findFirstDue(ctx, collection.coll, s.Slot, except)
	if err != nil {
		// The end of the term is no problem of the server.
		if parent.Err() == nil {
			s.pauseCollection(collection, &collection.failedLooks, err)
		}
		s.mu.Lock()
		collection.looking = false
		s.mu.Unlock()
		return
	}
	if s.noteLook(collection, first, began, time.Now()) {
		s.OnRecovered()
	}
}

// noteLook records the result of a look. recovered is that of endFailuresLocked.
func (s *Scheduled) noteLook(collection *scheduledCollection, first *firstDue, began, ended time.Time) (recovered bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	took := ended.Sub(began)
	s.lookTook += (took - s.lookTook) / 8
	// Many collections take turns: their looks use half of the time at most.
	round := s.lookTook * time.Duration(len(s.collections)) / lookConcurrency
	collection.looking, collection.lookedAt = false, ended
	collection.lookAt = began.Add(min(max(s.Poll, lookPauseFactor*took, 2*round), maxLookPause))
	if collection.lookAgain || collection.stale {
		s.lookSoonLocked(collection)
	}
	if collection.stale {
		// A claim begins with the last due time of the previous claim. A look finds an envelope that was stored or moved to an earlier time since.
		if first != nil {
			collection.first = min(collection.first, first.at)
		}
		return s.endFailuresLocked(&collection.failedLooks)
	}
	// Nothing is left whose claim could fail.
	if first == nil {
		recovered = s.endFailuresLocked(&collection.failedClaims)
	}

	collection.claimAt = time.Time{}
	if first != nil {
		collection.first = first.at
		collection.claimAt = ended.Add(first.until - s.ahead + s.ahead/claimDelay)
		retry.Signal(s.wake)
	}
	return s.endFailuresLocked(&collection.failedLooks) || recovered
}
