package memory

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/hold"
	"github.com/outrelay/outrelay/pkg/inbox"
)

// claim is an inbox.Claim.
type claim struct {
	inbox      *Inbox
	entry      inbox.Entry
	id         string
	generation int64
	attempt    int
	lease      time.Duration
	done       atomic.Bool // Handled was called with success; its transaction decides
}

// Claim takes the message before its handler begins, for that lease or, if 0, that of the Inbox.
func (x *Inbox) Claim(ctx context.Context, e inbox.Entry, d time.Duration) (inbox.Claim, error) {
	if d == 0 {
		d = x.lease
	}
	err := validate([]inbox.Entry{e})
	if d < inbox.MinLease || d > x.retention {
		err = errors.Join(err, fmt.Errorf("%w: a lease of %s; it must be at least %s and at most the retention", inbox.ErrInvalid, d, inbox.MinLease))
	}
	if x.db.InTransaction(ctx) {
		err = errors.Join(err, inbox.ErrInTransaction)
	}
	c := &claim{inbox: x, entry: e, lease: d}
	if err == nil {
		err = x.db.alone(ctx, c.take)
	}
	if err != nil {
		return nil, fmt.Errorf("claiming: %w", err)
	}
	x.mu.Lock()
	x.held[c] = struct{}{}
	x.mu.Unlock()
	return c, nil
}

func (c *claim) take(t *tx) error {
	x, e := c.inbox, c.entry
	if e.Place.Topic != "" {
		l := laneOf(e)
		m := x.marks(t, []inbox.Entry{e})
		c.generation = m.generation(l.partitionKey, l.lane)
		if err := x.checkAttached(l.partitionKey, c.generation); err != nil {
			return err
		}
		if e.Place.Offset < m.next(l, c.generation) {
			return &inbox.DuplicateError{Keys: []inbox.Key{e.Key}}
		}
	}
	c.id = x.id(e, c.generation)
	m := x.marker(t, c.id)
	if m != nil && m.handled {
		return &inbox.DuplicateError{Keys: []inbox.Key{e.Key}}
	}
	if l := x.holder(t, c.id); l != nil {
		return &inbox.ClaimedError{Key: e.Key, Until: l.until}
	}
	c.attempt = 1
	if m != nil {
		c.attempt = m.attempts + 1
	}
	now := x.db.clock.Now()
	if err := t.put(x.markers, c.id, &marker{owner: c, attempts: c.attempt, expires: now.Add(x.retention)}); err != nil {
		return err
	}
	return t.put(x.claims, c.id, &lease{owner: c, until: now.Add(c.lease)})
}

func (c *claim) Entry() inbox.Entry { return c.entry }

func (c *claim) Attempt() int { return c.attempt }

// renewals in the time of a lease.
const renewals = 3

func (c *claim) Run(ctx context.Context) error {
	clock := c.inbox.db.clock
	for {
		reached, stop := clock.At(clock.Now().Add(c.lease / renewals))
		select {
		case <-reached:
		case <-ctx.Done():
			stop()
			return nil
		}
		err := c.renew(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
		case c.done.Load():
			return nil
		default:
			return err
		}
	}
}

func (c *claim) renew(ctx context.Context) error {
	return c.inbox.db.alone(ctx, func(t *tx) error {
		l, _ := t.get(c.inbox.claims, c.id).(*lease)
		if l == nil || l.owner != c {
			return &inbox.ClaimLostError{Key: c.entry.Key}
		}
		return t.put(c.inbox.claims, c.id, &lease{owner: c, until: c.inbox.db.clock.Now().Add(c.lease)})
	})
}

func (c *claim) Hold(ctx context.Context, fn func(ctx context.Context) error) error {
	lost, err := hold.While(ctx, c.Run, fn)
	switch {
	case lost == nil || errors.Is(err, inbox.ErrClaimLost):
		return err
	case err == nil && c.done.Load():
		return nil
	}
	return errors.Join(lost, err)
}

func (c *claim) Handled(ctx context.Context) error {
	x := c.inbox
	err := x.db.do(ctx, func(t *tx) error {
		m, _ := t.get(x.markers, c.id).(*marker)
		if m == nil || m.owner != c {
			return &inbox.ClaimLostError{Key: c.entry.Key}
		}
		done := x.handled(m.attempts)
		done.owner = c
		if err := t.put(x.markers, c.id, done); err != nil {
			return err
		}
		if c.entry.Place.Topic == "" {
			return nil
		}
		at := marks{}
		x.readMark(t, at, laneOf(c.entry))
		own := laneKey{laneOf(c.entry).partitionKey, partitionLane}
		at[own] = mark{generation: c.generation}
		if at[laneOf(c.entry)].generation > c.generation {
			return nil // of a topic that is no more
		}
		return x.advance(t, []inbox.Entry{c.entry}, at)
	})
	if err != nil {
		return err
	}
	c.done.Store(true)
	x.db.unitOf(ctx).remember(x.collection, c.entry, true)
	return nil
}

func (c *claim) Release(ctx context.Context) error { return c.Defer(ctx, 0) }

func (c *claim) Defer(ctx context.Context, d time.Duration) error {
	x := c.inbox
	x.mu.Lock()
	delete(x.held, c)
	x.mu.Unlock()
	err := x.db.alone(ctx, func(t *tx) error {
		l, _ := t.get(x.claims, c.id).(*lease)
		switch {
		case l == nil || l.owner != c:
			return nil
		case d <= 0:
			return t.put(x.claims, c.id, nil)
		}
		return t.put(x.claims, c.id, &lease{until: x.db.clock.Now().Add(d)})
	})
	if err != nil {
		return fmt.Errorf("releasing the claim of %s: %w", c.entry.Key, err)
	}
	return nil
}

// Release gives up what this Inbox holds as claims of a partition.
func (x *Inbox) Release(ctx context.Context, consumer, topic string, part int32) error {
	var mine []*claim
	x.mu.Lock()
	for c := range x.held {
		if p := c.entry.Place; c.entry.Key.Consumer == consumer && p.Topic == topic && p.Partition == part {
			mine = append(mine, c)
		}
	}
	x.mu.Unlock()
	var errs []error
	for _, c := range mine {
		errs = append(errs, c.Release(ctx))
	}
	return errors.Join(errs...)
}

// Once runs fn for an identity that was not handled yet, and else returns an *inbox.DuplicateError.
func (x *Inbox) Once(ctx context.Context, consumer, id string, fn func(ctx context.Context) error, opts ...inbox.OnceOption) error {
	var c inbox.OnceConfig
	for _, o := range opts {
		o(&c)
	}
	e := inbox.Entry{Key: inbox.Key{Consumer: consumer, Namespace: c.Namespace, ID: id}, Place: c.Place}
	if err := validate([]inbox.Entry{e}); err != nil {
		return err
	}
	switch fresh, _ := x.db.unitOf(ctx).known(x.collection, e); {
	case c.Mode == inbox.None:
		return fn(ctx)
	case c.Mode != inbox.Optimistic && c.Mode != inbox.Eager:
		return fmt.Errorf("%w: unknown mode %s", inbox.ErrInvalid, c.Mode)
	case fresh:
		return x.db.Transaction(ctx, fn)
	}
	ctx, leave, ok, err := x.guard.Enter(ctx, x.id(e, 0), !c.NoWait)
	switch {
	case err != nil:
		return err
	case !ok:
		return &inbox.BusyError{Key: e.Key}
	}
	defer leave()
	if c.Mode == inbox.Eager {
		return x.eager(ctx, e, c.Lease, fn)
	}
	return x.optimistic(ctx, e, fn)
}

func (x *Inbox) optimistic(ctx context.Context, e inbox.Entry, fn func(context.Context) error) error {
	var duplicate bool
	err := x.db.Transaction(ctx, func(ctx context.Context) error {
		fresh, err := x.Admit(ctx, []inbox.Entry{e})
		if err != nil {
			return err
		}
		if duplicate = !fresh[0]; duplicate {
			return nil
		}
		return fn(ctx)
	})
	if err == nil && duplicate {
		err = &inbox.DuplicateError{Keys: []inbox.Key{e.Key}}
	}
	return err
}

func (x *Inbox) eager(ctx context.Context, e inbox.Entry, d time.Duration, fn func(context.Context) error) error {
	c, err := x.Claim(ctx, e, d)
	if err != nil {
		return err
	}
	err = c.Hold(ctx, func(ctx context.Context) error {
		return x.db.Transaction(ctx, func(ctx context.Context) error {
			x.db.unitOf(ctx).remember(x.collection, e, true)
			if err := fn(ctx); err != nil {
				return err
			}
			return c.Handled(ctx)
		})
	})
	if rerr := c.Release(context.WithoutCancel(ctx)); err != nil {
		return errors.Join(err, rerr)
	}
	return nil // handled and committed
}
