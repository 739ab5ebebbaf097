package scheduled

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
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
	// maxConflicts is the number of runs of a claim that conflict with a service, before the claim is divided.
	maxConflicts      = 2
	codeWriteConflict = 112
	// lockedAtOnce bounds the locked envelopes that are tried again together: in the worst case, each needs transactions of its own.
	lockedAtOnce = 8
	// maxIdle bounds the wait for the next due envelope.
	maxIdle = time.Second
)

// part has the envelopes that a claim takes of one collection.
type part struct {
	*scheduledCollection
	query

	// Of the latest run of the transaction.
	list []taken
	full bool // more envelopes may be due
}

// claimDue claims envelopes that are due soon, until ctx ends or the lease is lost.
func (s *Scheduled) claimDue(ctx context.Context) error {
	for {
		parts, alone, err := s.awaitDue(ctx)
		if err != nil {
			return err
		}

		begin, n := time.Now(), 0
		if len(parts) > 0 {
			n, err = s.claimParts(ctx, parts...)
		}
		// These may fail again, and must not prevent the claim of the others.
		for i := 0; err == nil && i < len(alone); i++ {
			_, err = s.claimParts(ctx, alone[i])
		}
		if err != nil {
			return err
		}
		if n < smallClaim {
			if err := retry.Sleep(ctx, claimPause-time.Since(begin)); err != nil {
				return err
			}
		}
	}
}

// awaitDue blocks until envelopes are due soon and there is room for them, and returns the result of selectDue. It returns the cause of ctx
// when ctx ends.
func (s *Scheduled) awaitDue(ctx context.Context) (parts, alone []*part, err error) {
	idle := time.NewTimer(maxIdle)
	defer idle.Stop()

	for {
		if room := s.countRoom(); room > 0 {
			parts, alone, next := s.selectDue(time.Now(), min(room, s.maxClaim))
			if len(parts)+len(alone) > 0 {
				return parts, alone, nil
			}
			idle.Reset(time.Until(next))
		}

		select {
		case <-idle.C:
		case <-s.wake:
		case <-s.room:
		case <-ctx.Done():
			return nil, nil, context.Cause(ctx)
		}
	}
}

// countRoom returns how many more envelopes may be claimed. Only the end of a flight makes room.
func (s *Scheduled) countRoom() int {
	if s.bytes.Load() >= maxClaimedBytes {
		return 0
	}
	return maxScheduledInFlight - int(s.count.Load())
}

// selectDue returns the collections in which envelopes are due soon, with equal parts of limit. alone has the parts that failed before:
// collections whose claims fail, and envelopes that a service had locked. next is when there will be another part, if there is none now.
func (s *Scheduled) selectDue(now time.Time, limit int) (parts, alone []*part, next time.Time) {
	next = now.Add(maxIdle)
	note := func(moment time.Time) {
		if !moment.IsZero() && moment.Before(next) {
			next = moment
		}
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.collections {
		if c.isPaused(now) {
			continue
		}
		if !c.claimAt.IsZero() && !now.Before(c.claimAt) {
			parts = append(parts, &part{scheduledCollection: c, query: query{except: c.exceptLocked()}})
		} else {
			note(c.claimAt)
		}

		ids, retryAt := c.lockedUntil(now)
		note(retryAt)
		if len(ids) > 0 {
			ids = ids[:min(len(ids), lockedAtOnce, c.size.Most())]
			alone = append(alone, s.newPartOf(c, query{ids: ids, mark: s.Mark}))
		}
	}

	slices.SortFunc(parts, func(a, b *part) int { return a.claimAt.Compare(b.claimAt) })
	due := parts[:min(len(parts), claimCollections, limit)]
	parts = parts[:0]
	for _, p := range due {
		p.slot, p.mark, p.limit, p.from = s.Slot, s.Mark, min(limit/len(due), p.size.Most()), bson.DateTime(p.first)
		if p.suspects > 0 {
			p.limit = min(p.limit, max(p.suspects/2, 1))
		}

		if p.failedClaims > 0 {
			alone = append(alone, p)
		} else {
			parts = append(parts, p)
		}
	}
	return parts, alone, next
}

// newPartOf returns a part with the envelopes of ids.
func (s *Scheduled) newPartOf(collection *scheduledCollection, query query) *part {
	query.slot, query.limit = s.Slot, len(query.ids)
	return &part{scheduledCollection: collection, query: query}
}

// claimParts claims the envelopes of parts in one transaction, and returns their number. No envelope and no outbox delays the others. If the
// transaction of several parts fails, it claims each part alone. If that of one part fails:
//   - If the store rejects an envelope, or an outbox its mark, or a service has locked it, the next claims of the collection are smaller, until
//     they have found that envelope.
//   - If the transaction does not end in time, the next claims of the collection are smaller, after a pause.
//   - For every other reason, it pauses the collection.
//
// It returns an error only if ctx ends or the lease is lost.
func (s *Scheduled) claimParts(ctx context.Context, parts ...*part) (n int, err error) {
	err = s.claimTogether(ctx, parts)
	for _, p := range parts {
		n += len(p.list)
	}

	switch {
	case err == nil:
		if s.noteClaimed(parts) {
			s.OnRecovered()
		}
		return n, nil
	case ctx.Err() != nil:
		return 0, context.Cause(ctx)
	case errors.Is(err, lease.ErrLeaseLost):
		return 0, err
	case len(parts) == 1:
		return 0, s.isolate(ctx, parts[0], err)
	}

	n = 0
	for _, p := range parts {
		claimed, err := s.claimParts(ctx, p)
		if err != nil {
			return n, err
		}
		n += claimed
	}
	s.mu.Lock()
	isFailing := slices.ContainsFunc(parts, func(p *part) bool { return p.failedClaims > 0 })
	s.mu.Unlock()
	// If no outbox is at fault, the server is too slow for all of them together.
	if errors.Is(err, mongodb.ErrSlow) && !isFailing {
		for _, p := range parts {
			p.size.Slow(p.limit)
		}
	}
	return n, nil
}

// noteClaimed records that the envelopes of parts were claimed. recovered is that of endFailuresLocked.
func (s *Scheduled) noteClaimed(parts []*part) (recovered bool) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range parts {
		c := p.scheduledCollection
		recovered = s.endFailuresLocked(&c.failedClaims) || recovered
		c.stale = c.looking
		if p.ids != nil {
			c.unlock(p.ids)
			c.suspects = 0
			s.lookSoonLocked(c)
			continue
		}

		c.size.Ended()
		c.suspects = max(c.suspects-len(p.list), 0)
		switch {
		case p.full:
			// Other collections come first.
			c.claimAt = now
			// A look may have found an earlier envelope since the claim began.
			if n := len(p.list); n > 0 && c.first >= int64(p.from) {
				c.first = int64(p.list[n-1].due)
			}
		case len(p.list) > 0:
			c.claimAt, c.suspects = time.Time{}, 0
			s.lookSoonLocked(c)
		default:
			// The envelope was canceled or moved, or the server has set its clock back. The next look is soon enough.
			c.claimAt, c.suspects, c.lookAt = time.Time{}, 0, now.Add(s.Poll)
		}
	}
	return recovered
}

// isolate finds the envelope that prevents the claim of a part, and continues without it. Any other fault pauses the collection. It
// returns an error only if ctx ends.
func (s *Scheduled) isolate(ctx context.Context, part *part, fault error) error {
	var rejected *rejectedError
	isRejected := errors.As(fault, &rejected)
	var unmarkable *unmarkableError
	isUnmarkable := errors.As(fault, &unmarkable)
	isLocked := errors.Is(fault, errLocked)

	switch n := len(part.list); {
	case errors.Is(fault, mongodb.ErrSlow):
		// It may not even have read the envelopes.
		part.size.Slow(cmp.Or(n, part.limit))
		fault = fmt.Errorf("claiming due envelopes of %s: %w", part.ns, fault)
	case n == 0 || !isRejected && !isUnmarkable && !isLocked:
	case n > 1 && part.ids != nil:
		for _, ids := range [][]bson.RawValue{part.ids[:len(part.ids)/2], part.ids[len(part.ids)/2:]} {
			if _, err := s.claimParts(ctx, s.newPartOf(part.scheduledCollection, query{ids: ids, mark: part.mark})); err != nil {
				return err
			}
		}
		return nil
	case n > 1:
		s.mu.Lock()
		part.suspects = n
		s.mu.Unlock()
		return nil
	case isLocked:
		if s.noteLocked(part) {
			return nil
		}
	case isUnmarkable:
		// It is due, and would be claimed again and again.
		s.Log.Error("an outbox rejects the mark of a due envelope, which is removed instead", "collection", part.ns,
			"id", part.list[0].id().String(), "error", unmarkable, "fix", "allow the field scheduledFor in the validator")
		_, err := s.claimParts(ctx, s.newPartOf(part.scheduledCollection, query{ids: []bson.RawValue{part.list[0].id()}}))
		return err
	default:
		err := s.bury(ctx, part, rejected)
		if errors.As(err, &unmarkable) {
			part.mark = false
			err = s.bury(ctx, part, rejected)
		}
		if err == nil || ctx.Err() != nil {
			return context.Cause(ctx)
		}
		fault = err
	}

	s.pauseCollection(part.scheduledCollection, &part.failedClaims, fault)
	return nil
}

// noteLocked records that a service has locked the only envelope of part. It returns false if too many are locked.
func (s *Scheduled) noteLocked(part *part) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	part.lock(part.list[0].id(), time.Now())
	if part.ids == nil {
		part.suspects = 0
	}
	return len(part.locked) <= maxLocked
}

// rejectedError means that the store rejects one of the envelopes.
type rejectedError struct{ error }

func (e *rejectedError) Unwrap() error { return e.error }

// bury stores the only envelope of part, which the store rejects, as a dead letter, and takes it out of its outbox.
func (s *Scheduled) bury(ctx context.Context, part *part, why error) error {
	dead := &part.list[0]
	key, stamp, _ := s.readEnvelope(dead.raw, new(envelope.View))
	stored := make(chan struct{})
	s.Ledger.Add(&ledger.Outcome{
		End: ledger.Dead, NS: part.ns, Raw: dead.raw, Key: key, Partition: record.AnyPartition,
		// A repetition writes the same letter.
		Pos:       outboxes.PosAt(stamp),
		Rejection: record.Rejection{Class: record.Malformed, Reason: "it is due, and MongoDB cannot store it as waiting: " + why.Error()},
		Stored:    func(*ledger.Outcome) { close(stored) },
	})
	select {
	case <-stored:
	case <-ctx.Done():
		return context.Cause(ctx)
	}

	remove := part.query
	remove.ids, remove.limit, remove.bytes = []bson.RawValue{dead.id()}, 1, maxClaimBytes
	return s.Fencer.Fenced(ctx, nil, mongodb.LimitRuns(func(tx context.Context) error {
		coll := mongodb.InClient(mongo.SessionFromContext(tx).Client(), part.coll)
		list, full, err := readDue(tx, coll, &remove, dead.due)
		if err != nil {
			return err
		}
		return removeTaken(tx, coll, &remove, list, full)
	}))
}

// errLocked means that a service changes one of the envelopes in a transaction that is open.
var errLocked = errors.New("cannot claim scheduled envelopes: transactions of services that have not ended have locked them; end these transactions")

// claimTogether claims the envelopes of parts in one fenced transaction.
func (s *Scheduled) claimTogether(ctx context.Context, parts []*part) error {
	claim := &waiting.Claim{ID: waiting.NewClaimID(s.WatcherID)}
	flight := newFlight(claim.ID)
	conflicts, runs := 0, 0
	take := mongodb.LimitRuns(func(tx context.Context) error {
		if conflicts == maxConflicts {
			return errLocked
		}
		clock, err := s.readParts(tx, parts)
		if err != nil {
			return err
		}

		// The server removes the envelopes while the claim is made of them.
		removed := make(chan error, 1)
		go func() { removed <- removeParts(tx, parts) }()
		s.fillClaim(claim, flight, parts, clock)
		err = <-removed
		if mongodb.HasCode(err, codeWriteConflict) {
			conflicts++
		}
		if err != nil || len(claim.Envelopes) == 0 {
			return err
		}
		err = waiting.InsertClaim(tx, mongodb.InClient(mongo.SessionFromContext(tx).Client(), s.Claims), claim)
		if mongodb.IsRejection(err) {
			return &rejectedError{err}
		}
		return err
	})

	err := s.Fencer.Fenced(ctx, nil, func(tx context.Context) error {
		// The last run may have been committed although its outcome was unknown.
		if runs++; runs > 1 {
			committed, err := waiting.HasClaim(tx, mongodb.InClient(mongo.SessionFromContext(tx).Client(), s.Claims), claim.ID)
			if err != nil || committed {
				return err
			}
		}
		return take(tx)
	})
	if err != nil {
		return err
	}
	crash.At("after-claim")
	s.holdFlight(flight)
	return nil
}

// readParts reads the envelopes of parts that are due, in the transaction of tx.
func (s *Scheduled) readParts(tx context.Context, parts []*part) (clock serverClock, err error) {
	client := mongo.SessionFromContext(tx).Client()
	left := maxClaimBytes
	for _, p := range parts {
		p.list, p.full = nil, false
	}

	if clock, err = readClock(tx, mongodb.InClient(client, s.Watchers), s.WatcherID); err != nil {
		return clock, err
	}
	latest := clock.now + bson.DateTime(s.ahead.Milliseconds())
	for _, p := range parts {
		p.bytes = left
		if p.list, p.full, err = readDue(tx, mongodb.InClient(client, p.coll), &p.query, latest); err != nil {
			return clock, err
		}
		for i := range p.list {
			left -= len(p.list[i].raw)
		}
	}
	return clock, nil
}

// removeParts takes the envelopes of parts out of their outboxes, in the transaction of tx that has read them.
func removeParts(tx context.Context, parts []*part) error {
	client := mongo.SessionFromContext(tx).Client()
	for _, p := range parts {
		if err := removeTaken(tx, mongodb.InClient(client, p.coll), &p.query, p.list, p.full); err != nil {
			return err
		}
	}
	return nil
}

// fillClaim makes the claim and its flight of the envelopes that were taken.
func (s *Scheduled) fillClaim(claim *waiting.Claim, flight *flight, parts []*part, clock serverClock) {
	n := 0
	for _, p := range parts {
		n += len(p.list)
	}
	claim.Envelopes, flight.envelopes = slices.Grow(claim.Envelopes[:0], n), slices.Grow(flight.envelopes[:0], n)

	var view envelope.View
	claimedAt := uint32(s.Now().Unix())
	for _, p := range parts {
		for i := range p.list {
			taken := &p.list[i]
			key, stamp, rejection := s.readEnvelope(taken.raw, &view)
			// No other claimed envelope has this position.
			pos := outboxes.PosAt(bson.Timestamp{T: claimedAt, I: s.positions.Add(1)})
			claim.Envelopes = append(claim.Envelopes, waiting.Claimed{NS: p.ns, Raw: taken.raw, Key: key, Pos: pos})
			flight.envelopes = append(flight.envelopes, dueEnvelope{
				due: int64(taken.due), sendAt: clock.localTime(taken.due), stamp: stamp, rejection: rejection, index: int32(len(flight.envelopes)),
			})
		}
	}

	for i := range flight.envelopes {
		flight.envelopes[i].Claimed = claim.Envelopes[i]
	}
}

// readEnvelope returns the ordering key and the stamp of an envelope. An envelope that cannot be read becomes a dead letter when it is due. view
// is memory for any number of calls.
func (s *Scheduled) readEnvelope(raw bson.Raw, view *envelope.View) (key string, stamp bson.Timestamp, rejection *record.Rejection) {
	if err := s.Mapping.Parse(raw, view); err != nil {
		return "", stamp, record.RejectionOf(err)
	}
	return string(view.OrderingKey()), view.TS, nil
}
