package scheduled

import (
	"context"
	"errors"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/crash"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

const (
	// claimCollections bounds the statements of one transaction, because the lease cannot be renewed
	// while it runs.
	claimCollections = 100
	// earlyRetryDelay is the first wait for an envelope that was due by the clock of this process, but
	// not by that of the server.
	earlyRetryDelay = 25 * time.Millisecond
	maxEarlyTries   = 3
	// The wait for an envelope that a service has locked. It doubles up to four seconds.
	lockedRetryDelay = 250 * time.Millisecond
	maxLockedShift   = 4
	// maxConflicts is the number of runs of a claim that conflict with a service, before the claim is divided.
	maxConflicts      = 2
	codeWriteConflict = 112
)

// claimAhead is how long before its due time an envelope may be claimed. So many envelopes that are due at one moment are in memory
// when it comes. If more of them are due soon than can be claimed in that time, the claims begin earlier, but at most maxClaimAhead
// before. A service can no longer cancel or reschedule a claimed envelope.
const (
	claimAhead    = 500 * time.Millisecond
	maxClaimAhead = 3 * time.Second
	// firstClaimCost is the assumed time of a claim for each of its envelopes, until one is measured.
	firstClaimCost = 100 * time.Microsecond
)

// claimGroup is a group of envelopes of one collection that are due.
type claimGroup struct {
	collection *scheduledCollection
	timers     []timer
	positions  []string       // of the timers, if they have to wait
	byID       map[string]int // index of the timer of each id, by mongodb.ValueKey

	coll *mongo.Collection
	ids  []bson.RawValue
}

// dueEnvelope is a claimed envelope.
type dueEnvelope struct {
	timer  timer
	due    int64     // due time in Unix milliseconds
	sendAt time.Time // the due time by the clock of this process

	envelope *waiting.Claimed
	claim    *flight
	index    int32 // in the claim
}

// claimDue claims envelopes that are due soon, until ctx ends or the lease is lost.
func (s *Scheduled) claimDue(ctx context.Context) error {
	for {
		due, err := s.awaitDue(ctx)
		if err != nil {
			return err
		}

		begin := time.Now()
		// An envelope that was locked may be so still, and then the claim is divided.
		fresh, locked := splitLocked(due)
		claimed, err := s.claimParts(ctx, s.Mark, fresh, locked)
		if err != nil {
			return err
		}
		if len(due) >= smallClaim {
			s.claimCost += (time.Since(begin)/time.Duration(len(due)) - s.claimCost) / 4
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

// splitLocked returns the envelopes of due that no service had locked, and the others.
func splitLocked(due []timer) (fresh, locked []timer) {
	for _, e := range due {
		if e.locked > 0 {
			locked = append(locked, e)
		} else {
			fresh = append(fresh, e)
		}
	}
	return fresh, locked
}

// awaitDue blocks until envelopes are due and there is room for them, and returns them. It returns the
// cause of ctx when ctx ends.
func (s *Scheduled) awaitDue(ctx context.Context) ([]timer, error) {
	idle := time.NewTimer(maxIdle)
	defer idle.Stop()

	for {
		room := maxScheduledInFlight - s.timers.countInFlight()
		if s.bytes.Load() >= maxClaimedBytes {
			room = 0
		}
		// Without room, only the end of a flight can change the result.
		if room > 0 {
			s.ahead = s.chooseAhead()
			now := s.Now().Add(s.ahead)
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

// chooseAhead returns how long before their due times envelopes are claimed now.
func (s *Scheduled) chooseAhead() time.Duration {
	soon := s.timers.countDue(s.Now().Add(maxClaimAhead).UnixMilli())
	return min(claimAhead+time.Duration(soon)*s.claimCost, maxClaimAhead)
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
func (s *Scheduled) groupByCollection(due []timer) []*claimGroup {
	byCollection := make(map[*scheduledCollection]*claimGroup, 1)
	var groups []*claimGroup

	for _, e := range due {
		group := byCollection[e.collection]
		if group == nil {
			group = &claimGroup{collection: e.collection, coll: e.collection.coll, byID: map[string]int{}}
			byCollection[e.collection] = group
			groups = append(groups, group)
		}
		group.byID[mongodb.ValueKey(e.id)] = len(group.timers)
		group.timers = append(group.timers, e)
		group.ids = append(group.ids, e.id)
		// Each envelope keeps its position in a repetition, because a position is part of the identity of an envelope that waits.
		group.positions = append(group.positions, s.nextPosition())
	}
	return groups
}

// nextPosition returns a position that no other claimed envelope has.
func (s *Scheduled) nextPosition() string {
	return outboxes.PosAt(bson.Timestamp{T: uint32(s.Now().Unix()), I: s.positions.Add(1)})
}

// claimTimers claims the envelopes of due in one transaction, and returns the claimed ones. With mark, they stay in their outboxes. No
// envelope and no outbox delays the others:
//   - If it fails for another reason than the ones below, it claims the envelopes of each outbox alone, and pauses the outbox that fails again.
//   - If the store rejects an envelope or a service has locked one, it claims the halves. A single envelope that is rejected becomes a
//     dead letter, and one that is locked is tried again later.
//   - If an outbox rejects the mark of an envelope (`recording: mark`), it claims the halves. A single envelope that is rejected is taken out
//     of its outbox, as without marks: it is due, and would be claimed again and again.
//   - If the server is too slow for so many, it puts all of them back, and the next claims are smaller.
//
// It returns an error only if ctx ends or the lease is lost.
func (s *Scheduled) claimTimers(ctx context.Context, due []timer, mark bool) ([]dueEnvelope, error) {
	groups := s.groupByCollection(due)
	claimed, err := s.claimTogether(ctx, groups, mark)
	var rejected *rejectedError
	isRejected := errors.As(err, &rejected)
	var unmarkable *unmarkableError
	isUnmarkable := errors.As(err, &unmarkable)

	switch {
	case err == nil:
		s.claimSize.Ended()
		return claimed, nil
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case errors.Is(err, lease.ErrLeaseLost):
		return nil, err
	case errors.Is(err, mongodb.ErrSlow):
		s.putBack(due...)
		s.claimSize.Slow(len(due))
		return nil, nil

	case len(due) > 1 && (isRejected || isUnmarkable || errors.Is(err, errLocked)):
		half := len(due) / 2
		return s.claimParts(ctx, mark, due[:half], due[half:])
	case errors.Is(err, errLocked):
		s.postpone(due[0])
		return nil, nil
	case isUnmarkable:
		s.Log.Error("an outbox rejects the mark of a due envelope, which is removed instead", "collection", groups[0].collection.ns,
			"id", due[0].id.String(), "error", unmarkable, "fix", "allow the field scheduledFor in the validator")
		return s.claimTimers(ctx, due, false)
	case isRejected:
		if err = s.bury(ctx, groups[0], rejected, mark); errors.As(err, &unmarkable) {
			err = s.bury(ctx, groups[0], rejected, false)
		}
		if err == nil {
			return nil, nil
		}
	case len(groups) > 1:
		parts := make([][]timer, len(groups))
		for i, g := range groups {
			parts[i] = g.timers
		}
		return s.claimParts(ctx, mark, parts...)
	}

	s.pauseCollection(collectionStep{groups[0].collection, true}, err)
	for _, e := range due {
		s.endTimer(e)
	}
	return nil, nil
}

// claimParts claims the envelopes of each part.
func (s *Scheduled) claimParts(ctx context.Context, mark bool, parts ...[]timer) (claimed []dueEnvelope, err error) {
	for _, part := range parts {
		if len(part) == 0 {
			continue
		}
		list, err := s.claimTimers(ctx, part, mark)
		if err != nil {
			return nil, err
		}
		claimed = append(claimed, list...)
	}
	return claimed, nil
}

// rejectedError means that the store rejects one of the envelopes.
type rejectedError struct {
	error
	claimed []waiting.Claimed
}

func (e *rejectedError) Unwrap() error { return e.error }

// bury stores the only envelope of group, which the store rejects, as a dead letter, and takes it out of its outbox.
func (s *Scheduled) bury(ctx context.Context, group *claimGroup, why *rejectedError, mark bool) error {
	if len(why.claimed) == 0 {
		return why
	}
	claimed := &why.claimed[0]
	stored := make(chan struct{})
	s.Ledger.Add(&ledger.Outcome{
		End: ledger.Dead, NS: claimed.NS, Raw: claimed.Raw, Key: claimed.Key, Partition: record.AnyPartition,
		// A repetition writes the same letter.
		Pos:     outboxes.PosAt(outboxes.Stamp(claimed.Raw)),
		Refusal: record.Refusal{Class: record.Malformed, Reason: "it is due, and MongoDB cannot store it as waiting: " + why.Error()},
		Stored:  func(*ledger.Outcome) { close(stored) },
	})
	select {
	case <-stored:
	case <-ctx.Done():
		return context.Cause(ctx)
	}

	err := s.Fencer.Fenced(ctx, nil, mongodb.LimitRuns(2, func(tx context.Context) error {
		coll := mongodb.InClient(mongo.SessionFromContext(tx).Client(), group.coll)
		_, err := takeDue(tx, coll, group.ids, s.ahead, mark, mongodb.MaxBytes, func(bson.Raw, time.Time) {})
		return err
	}))
	if err == nil {
		s.endTimer(group.timers[0])
	}
	return err
}

// postpone puts back an envelope that a service has locked. Its cancellation or its move may take long.
func (s *Scheduled) postpone(timer timer) {
	timer.locked++
	delay := lockedRetryDelay << min(timer.locked-1, maxLockedShift)
	timer.due, timer.fed = s.Now().Add(s.ahead+delay).UnixMilli(), false
	s.putBack(timer)
}

// putBack returns envelopes that were taken to the heap.
func (s *Scheduled) putBack(list ...timer) {
	for _, e := range list {
		// The heap accepts no envelope that is in flight.
		s.endTimer(e)
		s.timers.pushTimer(e)
	}
}

// errLocked means that a service changes one of the envelopes in a transaction that is open.
var errLocked = errors.New("an envelope is locked")

// claimTogether claims the envelopes of the groups in one fenced transaction, and returns those that were still due. With mark, they stay
// in their outboxes. Timers of other envelopes are released.
func (s *Scheduled) claimTogether(ctx context.Context, groups []*claimGroup, mark bool) ([]dueEnvelope, error) {
	total := 0
	for _, g := range groups {
		total += len(g.ids)
	}

	var claimed []dueEnvelope
	claim := &waiting.Claim{ID: waiting.NewClaimID(s.WatcherID)}
	full, conflicts, runs := false, 0, 0
	take := mongodb.LimitRuns(total, func(tx context.Context) error {
		if conflicts == maxConflicts {
			return errLocked
		}
		client := mongo.SessionFromContext(tx).Client()
		claimed, full = claimed[:0], false
		claim.Envelopes = claim.Envelopes[:0]
		left := mongodb.MaxBytes
		for _, g := range groups {
			coll := mongodb.InClient(client, g.coll)
			size, err := takeDue(tx, coll, g.ids, s.ahead, mark, left, func(raw bson.Raw, sendAt time.Time) {
				e, envelope := s.newDueEnvelope(g, raw, sendAt)
				claim.Envelopes = append(claim.Envelopes, e)
				claimed = append(claimed, envelope)
			})
			if errors.Is(err, errFull) {
				full = true
				break
			}
			if mongodb.HasCode(err, codeWriteConflict) {
				conflicts++
			}
			if err != nil {
				return err
			}
			left -= size
		}

		if len(claimed) == 0 {
			return nil
		}
		err := waiting.InsertClaim(tx, mongodb.InClient(client, s.Claims), claim)
		if mongodb.IsRejection(err) {
			return &rejectedError{err, claim.Envelopes}
		}
		return err
	})

	err := s.Fencer.Fenced(ctx, nil, func(tx context.Context) error {
		// The last run may have been committed although its outcome was unknown.
		if runs++; runs > 1 {
			committed, err := waiting.FindClaim(tx, mongodb.InClient(mongo.SessionFromContext(tx).Client(), s.Claims), claim.ID)
			if err != nil || committed != nil {
				return err
			}
		}
		return take(tx)
	})
	if err != nil {
		return nil, err
	}

	in := newFlight(claim.ID, len(claimed))
	for i := range claimed {
		claimed[i].envelope, claimed[i].claim, claimed[i].index = &claim.Envelopes[i], in, int32(i)
		s.bytes.Add(int64(claim.Envelopes[i].Size()))
	}
	for _, g := range groups {
		s.reportSuccess(collectionStep{g.collection, true})
	}
	s.releaseOthers(groups, claimed, full)
	return claimed, nil
}

// newDueEnvelope returns the claimed envelope raw of group, and when it is due.
func (s *Scheduled) newDueEnvelope(group *claimGroup, raw bson.Raw, sendAt time.Time) (waiting.Claimed, dueEnvelope) {
	due, _ := raw.Lookup("dueAt").DateTimeOK()
	dueEnvelope := dueEnvelope{due: due, sendAt: sendAt}
	claimed := waiting.Claimed{NS: group.collection.ns, Raw: raw}

	if i, ok := group.byID[mongodb.ValueKey(raw.Lookup("_id"))]; ok {
		dueEnvelope.timer, claimed.Pos = group.timers[i], group.positions[i]
	} else {
		// With a collation that ignores case, the server may find an envelope with another id.
		claimed.Pos = s.nextPosition()
	}

	// An envelope that cannot be read becomes a dead letter when it is sent.
	var view envelope.View
	if s.Mapping.Parse(raw, &view) == nil {
		claimed.Key = string(view.OrderingKey())
	}
	return claimed, dueEnvelope
}

// releaseOthers releases the timers of envelopes that could not be claimed: they were canceled or rescheduled, there was no room for
// them, which full reports, or they are not yet due by the clock of the server. Except for the first, another try makes sense before
// the index brings them again.
func (s *Scheduled) releaseOthers(groups []*claimGroup, claimed []dueEnvelope, full bool) {
	taken := make(map[uint64]bool, len(claimed))
	for _, d := range claimed {
		taken[d.timer.key] = true
	}

	for _, g := range groups {
		for _, e := range g.timers {
			switch {
			case taken[e.key]:
				continue
			case full:
				s.putBack(e)
				continue
			}
			e.locked = 0

			s.endTimer(e)
			e.tries++
			if e.tries < maxEarlyTries && s.Now().UnixMilli()-e.due < 1000 {
				e.due, e.fed = s.Now().Add(s.ahead+earlyRetryDelay<<(e.tries-1)).UnixMilli(), false
				s.timers.pushTimer(e)
			}
		}
	}
}

// endTimer removes an envelope from those in flight, with any fate.
func (s *Scheduled) endTimer(timer timer) {
	s.timers.endFlight(timer.key)
	retry.Signal(s.room)
}
