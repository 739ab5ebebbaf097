package memory

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/hold"
	"github.com/outrelay/outrelay/internal/inbox"
)

// claim is an inbox.Claim in a DB.
type claim struct {
	inbox      *Inbox
	entry      inbox.Entry
	id         string
	generation int64
	attempt    int
	lease      time.Duration
	handled    atomic.Bool // Handled was called with success; its transaction decides
}

// Claim claims the message before its handler begins, for the time d. If d is 0, the lease of the
// Inbox is used. See inbox.Inbox.Claim.
func (x *Inbox) Claim(ctx context.Context, e inbox.Entry, d time.Duration) (inbox.Claim, error) {
	if d == 0 {
		d = x.lease
	}

	err := validateEntries([]inbox.Entry{e})
	if d < inbox.MinLease || d > x.retention {
		err = errors.Join(err, fmt.Errorf("%w: invalid lease %s: it must be between %s and the retention",
			inbox.ErrInvalid, d, inbox.MinLease))
	}
	if x.db.InTransaction(ctx) {
		err = errors.Join(err, inbox.ErrInTransaction)
	}

	c := &claim{inbox: x, entry: e, lease: d}
	if err == nil {
		err = x.db.runAlone(ctx, c.acquireClaim)
	}
	if err != nil {
		return nil, fmt.Errorf("claiming: %w", err)
	}

	x.mu.Lock()
	x.heldClaims[c] = struct{}{}
	x.mu.Unlock()

	return c, nil
}

// acquireClaim checks the watermark, the marker and the lease, and writes marker and lease.
func (c *claim) acquireClaim(t *tx) error {
	x, e := c.inbox, c.entry
	if e.Place.Topic != "" {
		l := entryLane(e)
		m := x.readMarks(t, []inbox.Entry{e})
		c.generation = m.currentGeneration(l.partitionKey, l.lane)
		if err := x.checkAttached(l.partitionKey, c.generation); err != nil {
			return err
		}
		if e.Place.Offset < m.nextOffset(l, c.generation) {
			return &inbox.DuplicateError{Keys: []inbox.Key{e.Key}}
		}
	}

	c.id = x.markerKey(e, c.generation)
	m := x.findMarker(t, c.id)
	if m != nil && m.handled {
		return &inbox.DuplicateError{Keys: []inbox.Key{e.Key}}
	}
	if l := x.liveLease(t, c.id); l != nil {
		return &inbox.ClaimedError{Key: e.Key, Until: l.until}
	}

	c.attempt = 1
	if m != nil {
		c.attempt = m.attempts + 1
	}

	now := x.db.clock.Now()
	m = &marker{owner: c, attempts: c.attempt, expires: now.Add(x.retention)}
	if err := t.putRow(x.markers, c.id, m); err != nil {
		return err
	}

	return t.putRow(x.claims, c.id, &lease{owner: c, until: now.Add(c.lease)})
}

func (c *claim) Entry() inbox.Entry { return c.entry }

func (c *claim) Attempt() int { return c.attempt }

// renewalsPerLease is the number of renewals within a lease.
const renewalsPerLease = 3

// Run renews the lease: see inbox.Claim.
func (c *claim) Run(ctx context.Context) error {
	clock := c.inbox.db.clock
	for {
		reached, stop := clock.At(clock.Now().Add(c.lease / renewalsPerLease))
		select {
		case <-reached:
		case <-ctx.Done():
			stop()
			return nil
		}

		err := c.renewLease(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
		case c.handled.Load():
			return nil
		default:
			return err
		}
	}
}

// renewLease extends the lease, or returns an *inbox.ClaimLostError.
func (c *claim) renewLease(ctx context.Context) error {
	return c.inbox.db.runAlone(ctx, func(t *tx) error {
		l, _ := t.getRow(c.inbox.claims, c.id).(*lease)
		if l == nil || l.owner != c {
			return &inbox.ClaimLostError{Key: c.entry.Key}
		}

		return t.putRow(c.inbox.claims, c.id, &lease{owner: c, until: c.inbox.db.clock.Now().Add(c.lease)})
	})
}

// Hold runs fn while it renews the lease: see inbox.Claim.
func (c *claim) Hold(ctx context.Context, fn func(ctx context.Context) error) error {
	lost, err := hold.RunWhile(ctx, c.Run, fn)
	switch {
	case lost == nil || errors.Is(err, inbox.ErrClaimLost):
		return err
	case err == nil && c.handled.Load():
		return nil
	}
	return errors.Join(lost, err)
}

// Handled marks the message as handled: see inbox.Claim.
func (c *claim) Handled(ctx context.Context) error {
	x := c.inbox
	err := x.db.runOperation(ctx, func(t *tx) error {
		m, _ := t.getRow(x.markers, c.id).(*marker)
		if m == nil || m.owner != c {
			return &inbox.ClaimLostError{Key: c.entry.Key}
		}

		done := x.newHandledMarker(m.attempts)
		done.owner = c
		if err := t.putRow(x.markers, c.id, done); err != nil {
			return err
		}
		if c.entry.Place.Topic == "" {
			return nil
		}

		// The watermark moves only in the generation of the claim. If a newer one has begun, the
		// topic of the message is deleted.
		l := entryLane(c.entry)
		current := marks{}
		x.readMark(t, current, l)
		current[laneKey{l.partitionKey, partitionLane}] = mark{generation: c.generation}
		if current[l].generation > c.generation {
			return nil
		}
		return x.advanceWatermarks(t, []inbox.Entry{c.entry}, current)
	})
	if err != nil {
		return err
	}

	c.handled.Store(true)
	x.db.unitFromContext(ctx).storeAnswer(x.collection, c.entry, true)
	return nil
}

// Release gives the claim up: see inbox.Claim.
func (c *claim) Release(ctx context.Context) error { return c.Defer(ctx, 0) }

// Defer gives the claim up. The message can be claimed again after the time d.
func (c *claim) Defer(ctx context.Context, d time.Duration) error {
	x := c.inbox
	x.mu.Lock()
	delete(x.heldClaims, c)
	x.mu.Unlock()

	err := x.db.runAlone(ctx, func(t *tx) error {
		l, _ := t.getRow(x.claims, c.id).(*lease)
		switch {
		case l == nil || l.owner != c:
			return nil
		case d <= 0:
			return t.putRow(x.claims, c.id, nil)
		}

		return t.putRow(x.claims, c.id, &lease{until: x.db.clock.Now().Add(d)})
	})
	if err != nil {
		return fmt.Errorf("releasing the claim of %s: %w", c.entry.Key, err)
	}

	return nil
}

// Release releases all claims of a consumer that this Inbox holds for messages of a partition. It
// joins the errors of all releases.
func (x *Inbox) Release(ctx context.Context, consumer, topic string, part int32) error {
	var claims []*claim
	x.mu.Lock()
	for c := range x.heldClaims {
		p := c.entry.Place
		if c.entry.Key.Consumer == consumer && p.Topic == topic && p.Partition == part {
			claims = append(claims, c)
		}
	}
	x.mu.Unlock()

	var errs []error
	for _, c := range claims {
		errs = append(errs, c.Release(ctx))
	}

	return errors.Join(errs...)
}

// Once runs fn if the identity was not handled before. Otherwise it returns an
// *inbox.DuplicateError. See inbox.Inbox.Once.
func (x *Inbox) Once(
	ctx context.Context, consumer, id string, fn func(ctx context.Context) error, opts ...inbox.OnceOption,
) error {
	var c inbox.OnceConfig
	for _, o := range opts {
		o(&c)
	}

	e := inbox.Entry{Key: inbox.Key{Consumer: consumer, Namespace: c.Namespace, ID: id}, Place: c.Place}
	if err := validateEntries([]inbox.Entry{e}); err != nil {
		return err
	}

	fresh, _ := x.db.unitFromContext(ctx).knownAnswer(x.collection, e)
	switch {
	case c.Mode == inbox.None:
		return fn(ctx)
	case c.Mode != inbox.Optimistic && c.Mode != inbox.Eager:
		return fmt.Errorf("%w: unknown mode %s", inbox.ErrInvalid, c.Mode)
	case fresh:
		return x.db.Transaction(ctx, fn)
	}

	ctx, leave, ok, err := x.singleFlight.Enter(ctx, x.markerKey(e, 0), !c.NoWait)
	switch {
	case err != nil:
		return err
	case !ok:
		return &inbox.BusyError{Key: e.Key}
	}
	defer leave()

	if c.Mode == inbox.Eager {
		return x.runEager(ctx, e, c.Lease, fn)
	}

	return x.runOptimistic(ctx, e, fn)
}

// runOptimistic runs fn and marks the entry in the same transaction.
func (x *Inbox) runOptimistic(ctx context.Context, e inbox.Entry, fn func(context.Context) error) error {
	var duplicate bool
	err := x.db.Transaction(ctx, func(ctx context.Context) error {
		fresh, err := x.Admit(ctx, []inbox.Entry{e})
		if err != nil {
			return err
		}
		// A duplicate is not a reason to roll back: the watermark may have moved.
		duplicate = !fresh[0]
		if duplicate {
			return nil
		}

		return fn(ctx)
	})
	if err == nil && duplicate {
		err = &inbox.DuplicateError{Keys: []inbox.Key{e.Key}}
	}

	return err
}

// runEager claims the entry, runs fn and marks the entry in one transaction, and releases the
// claim.
func (x *Inbox) runEager(ctx context.Context, e inbox.Entry, d time.Duration, fn func(context.Context) error) error {
	c, err := x.Claim(ctx, e, d)
	if err != nil {
		return err
	}

	err = c.Hold(ctx, func(ctx context.Context) error {
		return x.db.Transaction(ctx, func(ctx context.Context) error {
			x.db.unitFromContext(ctx).storeAnswer(x.collection, e, true)
			if err := fn(ctx); err != nil {
				return err
			}

			return c.Handled(ctx)
		})
	})

	releaseErr := c.Release(context.WithoutCancel(ctx))
	if err != nil {
		return errors.Join(err, releaseErr)
	}

	// The message is handled and committed, so an error of the release does not matter.
	return nil
}
