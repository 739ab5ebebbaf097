package inbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/outrelay/outrelay/internal/base/hold"
	"github.com/outrelay/outrelay/internal/base/retry"
)

// Claim is the exclusive right to handle one message. A lease and a marker store it. Its methods are
// safe for concurrent use.
type Claim struct {
	inbox   *Inbox
	entry   Entry
	id      ID // of the marker and of the lease
	holder  Holder
	attempt int
	lease   time.Duration

	// generation is the generation of the partition, also if the id does not contain it.
	generation int64

	until   atomic.Pointer[time.Time] // time of this process until which the lease is certainly valid
	handled atomic.Bool
}

// Claim claims the message before its handler begins. If lease is 0, the lease of the Inbox is
// used. When Claim returns, the claim is committed. Call Release in the end, regardless of the result of
// the handler is.
//
// It returns a *DuplicateError if the message was handled, an *InProgressError if another holder has
// claimed it, and ErrInTransaction if ctx has a running transaction. It costs two writes, and also
// a read if the entry has a place.
func (x *Inbox) Claim(ctx context.Context, entry Entry, lease time.Duration) (*Claim, error) {
	if lease == 0 {
		lease = x.settings.Lease
	}

	err := entry.validateEntry()
	if lease < MinLease || lease > x.settings.Retention {
		err = errors.Join(err, fmt.Errorf("%w: invalid lease %s: it must be between %s and the retention", ErrInvalid, lease, MinLease))
	}

	// The claim must be committed before the handler begins.
	if x.store.CurrentTransaction(ctx) != nil {
		err = errors.Join(err, ErrInTransaction)
	}
	if err != nil {
		return nil, fmt.Errorf("claiming: %w", err)
	}

	claim := &Claim{inbox: x, entry: entry, holder: Holder{Owner: uuid.NewString()}, lease: lease}
	if err := claim.acquireClaim(ctx); err != nil {
		return nil, fmt.Errorf("claiming: %w", err)
	}

	// Release gives up all claims of a partition.
	x.mu.Lock()
	x.heldClaims[claim] = struct{}{}
	x.mu.Unlock()

	return claim, nil
}

// acquireClaim acquires the lease first, which orders concurrent claims. Then it writes owner and
// epoch into the marker. From then on, no earlier holder can finish.
func (c *Claim) acquireClaim(ctx context.Context) error {
	if err := c.locateMarker(ctx); err != nil {
		return err
	}
	if err := c.acquireLease(ctx); err != nil {
		return err
	}

	store := c.inbox.store
	for {
		marker, err := store.ClaimMarker(ctx, NewMarker{c.id, c.entry.Place}, c.holder)
		switch {
		case err != nil:
			return errors.Join(fmt.Errorf("writing the claim of %s: %w", c.entry.Key, err), c.deleteLease(ctx))
		case marker.State == StateHandled:
			return errors.Join(&DuplicateError{c.entry.Key}, c.deleteLease(ctx))
		case marker.Owner == c.holder.Owner:
			c.attempt = marker.Attempts
			return nil
		}

		// The marker contains a later epoch than the lease: the lease was deleted, and the server's
		// clock has gone back since. Set a higher epoch, if the lease is still held.
		c.holder.Epoch = marker.Epoch + 1
		ok, err := store.RaiseEpoch(ctx, c.id, c.holder)
		if err != nil {
			return fmt.Errorf("raising the epoch of %s: %w", c.entry.Key, err)
		}
		if !ok {
			return &InProgressError{Key: c.entry.Key, Until: store.Now()}
		}
	}
}

// locateMarker checks the watermark, and sets the generation and the id of the marker.
func (c *Claim) locateMarker(ctx context.Context) error {
	if c.entry.Place.Topic != "" {
		lane := entryLane(c.entry)
		marks, err := c.inbox.readMarks(ctx, lanesOf([]Entry{c.entry}))
		if err != nil {
			return err
		}

		c.generation = marks.currentGeneration(lane)
		if err := c.inbox.checkAttached(lane.Partition, c.generation); err != nil {
			return err
		}
		if marks.covers(c.entry) {
			return &DuplicateError{c.entry.Key}
		}
	}

	c.id = c.entry.markerID(c.generation)
	return nil
}

// acquireLease acquires the lease, if it has expired.
func (c *Claim) acquireLease(ctx context.Context) error {
	// The lease is counted from before the request, so this process never considers it valid for
	// too long.
	asked := c.inbox.store.Now()
	lease, err := c.inbox.store.AcquireLease(ctx, c.id, c.holder.Owner, c.lease)
	if err != nil {
		return fmt.Errorf("taking the lease of %s: %w", c.entry.Key, err)
	}
	if lease.Owner == c.holder.Owner {
		c.holder.Epoch = lease.Epoch
		c.extendLease(asked)
		return nil
	}

	// Another holder may have handled the message without deleting its lease.
	markers, err := c.inbox.store.ReadMarkers(ctx, []ID{c.id})
	if err != nil {
		return fmt.Errorf("reading the marker of %s: %w", c.entry.Key, err)
	}
	if markers[c.id].State == StateHandled {
		return &DuplicateError{c.entry.Key}
	}
	return &InProgressError{Key: c.entry.Key, Until: lease.Until}
}

// extendLease records that the lease is valid for its length from the time asked, when the renewal
// was sent.
func (c *Claim) extendLease(asked time.Time) {
	until := asked.Add(c.lease)
	c.until.Store(&until)
}

// timeLeft returns the time for which the lease is certainly valid.
func (c *Claim) timeLeft() time.Duration { return c.until.Load().Sub(c.inbox.store.Now()) }

// Entry returns the message.
func (c *Claim) Entry() Entry { return c.entry }

// Attempt returns 1 for the first claim of this identity, and one more for each later claim.
func (c *Claim) Attempt() int { return c.attempt }

// Handled marks the message as handled and moves the watermark, in the transaction of ctx. If
// another holder has claimed the message, the error is ErrClaimLost, and the transaction
// cannot commit. Without a transaction it takes effect at once. If the process crashes before
// that, the message is handled again.
func (c *Claim) Handled(ctx context.Context) error {
	// If this process is killed, the next owner of the partition can end the transaction.
	c.inbox.store.RecordTransaction(ctx)
	err := c.inbox.joinTransaction(ctx, func(ctx context.Context) error {
		// The holder stays in the marker, so marking the message again changes nothing.
		ok, err := c.inbox.store.MarkHandled(ctx, c.id, c.holder, KeepHolder)
		if err != nil {
			return fmt.Errorf("marking %s as handled: %w", c.entry.Key, err)
		}
		if !ok {
			return c.takenOverError()
		}

		c.handled.Store(true)
		if c.entry.Place.Topic == "" {
			return nil
		}

		// The watermark moves only in the generation of the claim.
		place := c.entry.Place
		watermark := Mark{Generation: c.generation, Next: place.Offset + 1, Epoch: place.LeaderEpoch}
		return c.inbox.advanceWatermarks(ctx, []Move{{entryLane(c.entry), watermark}})
	})
	if err != nil {
		return err
	}

	c.inbox.memoFromContext(ctx).storeResults([]Entry{c.entry}, []bool{true})
	return nil
}

// renewalsPerLease is the number of renewals within a lease. Two of them may fail.
const renewalsPerLease = 3

// Run renews the lease until ctx ends, and then returns nil. If the claim is lost, it returns
// ErrClaimLost. If the lease cannot be renewed, it does so when the lease has expired by the
// clock of this process. That time is counted from before the last renewal was sent.
func (c *Claim) Run(ctx context.Context) error {
	// The lease is renewed outside of the transaction of the handler, never in it.
	ctx = c.inbox.store.Outside(ctx)

	backoff := retry.Policy{Base: c.lease / 20, Cap: c.lease / 6}.Start()
	for wait := c.lease / renewalsPerLease; ; {
		if c.inbox.store.Wait(ctx, wait) != nil {
			return nil
		}

		err := c.renewLease(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			backoff.Reset()
			wait = c.lease / renewalsPerLease
		case errors.Is(err, ErrClaimLost):
			return c.lostError(err)
		default:
			// The lease is still valid, so the renewal is repeated until it expires.
			left := c.timeLeft()
			if left <= 0 {
				return c.lostError(fmt.Errorf("%w: %s could not be renewed in time: %w", ErrClaimLost, c.entry.Key, err))
			}

			wait = min(backoff.Next(), left)
		}
	}
}

// takenOverError returns ErrClaimLost with the identity of the message.
func (c *Claim) takenOverError() error {
	return fmt.Errorf("%w: %s was taken over by another holder, or released", ErrClaimLost, c.entry.Key)
}

// lostError returns err, unless Handled was called. Then the transaction decides, and its commit
// must not be interrupted.
func (c *Claim) lostError(err error) error {
	if c.handled.Load() {
		return nil
	}
	return err
}

// renewLease makes one attempt to renew the lease, which ends when the lease expires.
func (c *Claim) renewLease(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, c.timeLeft())
	defer cancel()

	asked := c.inbox.store.Now()
	ok, err := c.inbox.store.RenewLease(ctx, c.id, c.holder.Owner, c.lease)
	if err != nil {
		return fmt.Errorf("renewing the claim of %s: %w", c.entry.Key, err)
	}
	if !ok {
		return c.takenOverError()
	}

	c.extendLease(asked)
	return nil
}

// Hold runs fn and renews the lease at the same time. If the claim is lost, the context of fn
// is canceled with ErrClaimLost as its cause, and Hold returns that error joined with
// the error of fn.
func (c *Claim) Hold(ctx context.Context, fn func(ctx context.Context) error) error {
	lost, err := hold.RunWhile(ctx, c.Run, fn)
	switch {
	case lost == nil || errors.Is(err, ErrClaimLost):
		return err
	case err == nil && c.handled.Load():
		return nil
	}
	return errors.Join(lost, err)
}

// Release gives the claim up, so that the message can be claimed again at once. After Handled
// was committed it only deletes the lease. It may be called at any time and more than once.
func (c *Claim) Release(ctx context.Context) error {
	// A handled message is not claimed again, so its epoch is not needed any more.
	if c.handled.Load() {
		return c.deleteLease(ctx)
	}
	return c.Defer(ctx, 0)
}

// Defer gives the claim up. The message can be claimed again after the time duration. It keeps the lease,
// because it contains the epoch.
func (c *Claim) Defer(ctx context.Context, duration time.Duration) error {
	c.untrackClaim()

	err := c.inbox.store.ReleaseLease(c.inbox.store.Outside(ctx), c.id, c.holder.Owner, max(duration, 0))
	if err != nil {
		return fmt.Errorf("releasing the claim of %s: %w", c.entry.Key, err)
	}
	return nil
}

// deleteLease deletes the lease if this claim holds it.
func (c *Claim) deleteLease(ctx context.Context) error {
	c.untrackClaim()

	if err := c.inbox.store.DeleteLease(c.inbox.store.Outside(ctx), c.id, c.holder.Owner); err != nil {
		return fmt.Errorf("removing the claim of %s: %w", c.entry.Key, err)
	}
	return nil
}

// untrackClaim removes the claim from the claims that Inbox.Release releases.
func (c *Claim) untrackClaim() {
	c.inbox.mu.Lock()
	defer c.inbox.mu.Unlock()
	delete(c.inbox.heldClaims, c)
}

// Release releases all claims that this Inbox holds for messages of the partitions, and gives the
// partitions back. Call it when no transaction for them is open any more, before they are assigned to
// another process. It does not affect other consumers of the same Inbox. It joins the errors of all
// releases.
func (x *Inbox) Release(ctx context.Context, list ...Partition) error {
	var claims []*Claim
	x.mu.Lock()
	for c := range x.heldClaims {
		if slices.Contains(list, entryPartition(c.entry)) {
			claims = append(claims, c)
		}
	}
	// attached is kept: a handler that is still running may admit a message.
	for _, p := range list {
		delete(x.suspicions, p)
	}
	x.mu.Unlock()

	var errs []error
	for _, c := range claims {
		errs = append(errs, c.Release(ctx))
	}
	errs = append(errs, x.store.RemovePartitions(ctx, list))
	return errors.Join(errs...)
}
