package scheduled

import (
	"context"
	"errors"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/waiting"
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

// claimAhead is how long before its due time an envelope may be claimed. So many envelopes that are due at one moment are in memory
// when it comes. A service can no longer cancel or reschedule a claimed envelope.
const claimAhead = 500 * time.Millisecond

// claimGroup is a group of envelopes of one collection that are due.
type claimGroup struct {
	collection *scheduledCollection
	timers     []timer // of ids

	coll *mongo.Collection
	ids  []bson.RawValue
}

// dueEnvelope is a claimed envelope.
type dueEnvelope struct {
	timer timer
	at    int64 // due time in Unix milliseconds
	entry waiting.Entry
}

// claimDue claims envelopes that are due soon, until ctx ends or the lease is lost.
func (s *Scheduled) claimDue(ctx context.Context) error {
	backoff := retry.Reopen.Start()
	for {
		due, err := s.awaitDue(ctx)
		if err != nil {
			return err
		}

		begin := time.Now()
		claimed, err := s.claimGroups(ctx, groupByCollection(due), backoff)
		if err != nil {
			return err
		}
		crash.At("after-claim")

		if len(claimed) > 0 {
			select {
			case s.claimed <- claimed:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
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
	idle := time.NewTimer(maxIdle)
	defer idle.Stop()

	for {
		room := maxScheduledInFlight - s.timers.countInFlight()
		// Without room, only the end of a flight can change the result.
		if room > 0 {
			now := s.Now().Add(claimAhead)
			due, next, more := s.timers.takeDue(now.UnixMilli(), min(room, s.claimSize.Most()), claimCollections)
			// The entries that were taken leave room for others of the index.
			s.requestFeed(due)
			if len(due) > 0 {
				return due, nil
			}

			// The clock of the server may be set, so no wait is longer than maxIdle.
			wait := maxIdle
			if more {
				// A time in the past would make the loop spin.
				wait = min(max(time.UnixMilli(next).Sub(now), time.Millisecond), maxIdle)
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

// maxIdle bounds the wait for the next due envelope.
const maxIdle = time.Second

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
// It returns the claimed envelopes, puts back the others, and waits with backoff after a failure. It
// returns an error only if ctx ends or the lease is lost.
func (s *Scheduled) claimGroups(ctx context.Context, groups []*claimGroup, backoff *retry.Backoff) ([]dueEnvelope, error) {
	claimed, err := s.claimTogether(ctx, groups)
	if err == nil {
		backoff.Reset()
		s.claimSize.Ended()
		return claimed, nil
	}

	// The transaction took too long. Its groups, one after the other, would take as long.
	if errors.Is(err, mongodb.ErrSlow) {
		n := 0
		for _, g := range groups {
			s.putBack(g.timers)
			n += len(g.timers)
		}
		s.claimSize.Slow(n)
		return nil, nil
	}

	claimed = nil
	for _, g := range groups {
		// With one group, this claim would only repeat the failed one.
		if len(groups) > 1 && ctx.Err() == nil && !errors.Is(err, lease.ErrLeaseLost) {
			var list []dueEnvelope
			list, err = s.claimTogether(ctx, []*claimGroup{g})
			if err == nil {
				claimed = append(claimed, list...)
				continue
			}
		}

		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if errors.Is(err, lease.ErrLeaseLost) {
			return nil, err
		}
		// A claim of fewer documents may succeed.
		if errors.Is(err, mongodb.ErrSlow) || mongodb.IsRejection(err) {
			s.claimSize.Slow(len(g.timers))
		}

		s.OnRetry(err)
		s.putBack(g.timers)
	}
	return claimed, backoff.Wait(ctx)
}

// putBack returns timers to the heap, where they are due at once.
func (s *Scheduled) putBack(timers []timer) {
	for _, e := range timers {
		// The heap accepts no envelope that is in flight.
		s.endTimer(e)
		s.timers.pushTimer(e)
	}
}

// claimTogether claims the envelopes of the groups in one fenced transaction, and returns those that were still due. The sender leaves
// out the documents of the store until it gets the envelopes. Timers of other envelopes are released.
func (s *Scheduled) claimTogether(ctx context.Context, groups []*claimGroup) ([]dueEnvelope, error) {
	// Each envelope keeps its position in a repetition, because the position is part of its identity in the store.
	positions := map[string]string{}
	for _, g := range groups {
		for _, e := range g.timers {
			at := bson.Timestamp{T: uint32(s.Now().Unix()), I: s.positions.Add(1)}
			positions[g.collection.ns+mongodb.ValueKey(e.id)] = outboxes.PosAt(at)
		}
	}

	total := 0
	for _, g := range groups {
		total += len(g.ids)
	}
	var claimed []dueEnvelope
	var reserved [][waiting.IDSize]byte
	err := s.Fencer.Fenced(ctx, nil, mongodb.LimitRuns(total, func(tx context.Context) error {
		claimed = claimed[:0]
		client := mongo.SessionFromContext(tx).Client()
		left := mongodb.MaxBytes
		for _, g := range groups {
			coll := mongodb.Database(client, g.coll.Database().Name()).Collection(g.coll.Name())
			size, err := takeDue(tx, coll, g.ids, claimAhead, s.Mark, left, func(raw bson.Raw) {
				claimed = append(claimed, s.newDueEnvelope(g, raw, positions))
			})
			if err != nil {
				return err
			}
			left = max(left-size, 1)
		}

		entries := make([]waiting.Entry, len(claimed))
		for i := range claimed {
			entries[i] = claimed[i].entry
			reserved = append(reserved, entries[i].DocumentID())
		}
		// A scan of the sender may read the documents as soon as the transaction is committed.
		s.Sender.Reserve(reserved)
		store := mongodb.Database(client, s.Store.Collection().Database().Name()).Collection(s.Store.Collection().Name())
		return waiting.Enter(tx, store, entries)
	}))
	if err != nil {
		s.Sender.Unreserve(reserved)
		return nil, err
	}

	s.releaseOthers(groups, claimed)
	return claimed, nil
}

// newDueEnvelope returns the claimed envelope raw of g.
func (s *Scheduled) newDueEnvelope(g *claimGroup, raw bson.Raw, positions map[string]string) dueEnvelope {
	id := raw.Lookup("_id")
	due, _ := raw.Lookup("dueAt").DateTimeOK()
	d := dueEnvelope{at: due, entry: waiting.Entry{
		Watcher: s.Store.Watcher(),
		NS:      g.collection.ns,
		Raw:     raw,
		Slot:    waiting.SlotOf(raw),
		Pos:     positions[g.collection.ns+mongodb.ValueKey(id)],
		Reason:  waiting.Queued,
		Origin:  waiting.OriginScheduled,
	}}
	// A later owner does not send it before it is due.
	if at := time.UnixMilli(due); at.After(s.Now()) {
		d.entry.NextAt = at
	}
	// An envelope that cannot be read becomes a dead letter when it is sent.
	var v envelope.View
	if s.Mapping.Parse(raw, &v) == nil {
		d.entry.Key = string(v.OrderingKey())
	}
	for _, e := range g.timers {
		if mongodb.ValueKey(e.id) == mongodb.ValueKey(id) {
			d.timer = e
		}
	}
	return d
}

// releaseOthers releases the timers of envelopes that could not be claimed: they were canceled or rescheduled, there was no room for
// them, or they are not yet due by the clock of the server. Except for the first, another try makes sense before the index brings them
// again.
func (s *Scheduled) releaseOthers(groups []*claimGroup, claimed []dueEnvelope) {
	taken := make(map[uint64]bool, len(claimed))
	for _, d := range claimed {
		taken[d.timer.key] = true
	}

	for _, g := range groups {
		for _, e := range g.timers {
			if taken[e.key] {
				continue
			}
			s.endTimer(e)
			e.tries++
			if e.tries < maxEarlyTries && s.Now().UnixMilli()-e.due < 1000 {
				e.due, e.fed = s.Now().Add(claimAhead+earlyRetryDelay<<(e.tries-1)).UnixMilli(), false
				s.timers.pushTimer(e)
			}
		}
	}
}

// endTimer removes an envelope from those in flight, with any fate.
func (s *Scheduled) endTimer(e timer) {
	s.timers.endFlight(e.key)
	retry.Signal(s.room)
}
