package inbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/hold"
	"github.com/outrelay/outrelay/internal/retry"
)

// renewalsPerLease is the number of renewals within a lease. Two of them may fail.
const renewalsPerLease = 3

// extendLease records that the lease is valid for its length from the time asked, when the renewal
// was sent.
func (c *claim) extendLease(asked time.Time) {
	until := asked.Add(c.lease)
	c.until.Store(&until)
}

// Run renews the lease: see Claim.Run.
func (c *claim) Run(ctx context.Context) error {
	// The lease is renewed outside of the transaction of the handler, never in it.
	ctx = mongo.NewSessionContext(ctx, nil)

	backoff := retry.Policy{Base: c.lease / 20, Cap: c.lease / 6}.Start()
	for wait := c.lease / renewalsPerLease; ; {
		if retry.Sleep(ctx, wait) != nil {
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
			left := time.Until(*c.until.Load())
			if left <= 0 {
				return c.lostError(&ClaimLostError{Key: c.entry.Key, Err: err})
			}

			wait = min(backoff.Next(), left)
		}
	}
}

// lostError returns err, unless Handled was called. Then the transaction decides, and its commit
// must not be interrupted.
func (c *claim) lostError(err error) error {
	if c.handled.Load() {
		return nil
	}
	return err
}

// renewLease makes one attempt to renew the lease, which ends when the lease expires.
func (c *claim) renewLease(ctx context.Context) error {
	ctx, cancel := context.WithDeadline(ctx, *c.until.Load())
	defer cancel()

	asked := time.Now()
	set := bson.D{{Key: "until", Value: afterNow(c.lease)}}
	res, err := c.inbox.claims.UpdateOne(ctx, c.ownLeaseFilter(), bson.A{bson.D{{Key: "$set", Value: set}}})
	if err != nil {
		return fmt.Errorf("renewing the claim of %s: %w", c.entry.Key, err)
	}
	if res.MatchedCount == 0 {
		return &ClaimLostError{Key: c.entry.Key}
	}

	c.extendLease(asked)
	return nil
}

// Hold runs fn while it renews the lease: see Claim.Hold.
func (c *claim) Hold(ctx context.Context, fn func(ctx context.Context) error) error {
	lost, err := hold.RunWhile(ctx, c.Run, fn)
	switch {
	case lost == nil || errors.Is(err, ErrClaimLost):
		return err
	case err == nil && c.handled.Load():
		return nil
	}
	return errors.Join(lost, err)
}

// Release gives the claim up: see Claim.Release.
func (c *claim) Release(ctx context.Context) error {
	// A handled message is not claimed again, so its epoch is not needed any more.
	if c.handled.Load() {
		return c.deleteLease(ctx)
	}
	return c.Defer(ctx, 0)
}

// Defer gives the claim up: see Claim.Defer. It keeps the document of the lease, because it
// contains the epoch.
func (c *claim) Defer(ctx context.Context, d time.Duration) error {
	c.untrackClaim()

	set := bson.A{
		bson.D{{Key: "$set", Value: bson.D{{Key: "until", Value: afterNow(max(d, 0))}}}},
		bson.D{{Key: "$unset", Value: "o"}},
	}
	_, err := c.inbox.claims.UpdateOne(mongo.NewSessionContext(ctx, nil), c.ownLeaseFilter(), set)
	if err != nil {
		return fmt.Errorf("releasing the claim of %s: %w", c.entry.Key, err)
	}

	return nil
}

// deleteLease deletes the lease if this claim holds it.
func (c *claim) deleteLease(ctx context.Context) error {
	c.untrackClaim()

	if _, err := c.inbox.claims.DeleteOne(mongo.NewSessionContext(ctx, nil), c.ownLeaseFilter()); err != nil {
		return fmt.Errorf("removing the claim of %s: %w", c.entry.Key, err)
	}
	return nil
}

// untrackClaim removes the claim from the claims that Inbox.Release releases.
func (c *claim) untrackClaim() {
	c.inbox.mu.Lock()
	defer c.inbox.mu.Unlock()
	delete(c.inbox.heldClaims, c)
}

// Release releases all claims of a consumer that this Inbox holds for messages of a partition, and
// gives the partition back. Call it when the partition is assigned to another process and no
// transaction for it is open any more. It does not affect other consumers of the same Inbox. It
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
	errs = append(errs, x.removeFromTenure(ctx, partition{consumer, topic, part}))
	return errors.Join(errs...)
}
