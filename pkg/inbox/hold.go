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

// renewals in the time of a lease: two may fail.
const renewals = 3

// renewed notes that the lease is good for its length from the moment at which that was asked for.
func (c *claim) renewed(asked time.Time) {
	until := asked.Add(c.lease)
	c.until.Store(&until)
}

func (c *claim) Run(ctx context.Context) error {
	// The lease is renewed beside the handler's transaction, never in it.
	ctx = mongo.NewSessionContext(ctx, nil)
	again := retry.Policy{Base: c.lease / 20, Cap: c.lease / 6}.Start()
	for wait := c.lease / renewals; ; {
		if retry.Sleep(ctx, wait) != nil {
			return nil
		}
		err := c.renew(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			again.Reset()
			wait = c.lease / renewals
		case errors.Is(err, ErrClaimLost):
			return c.lost(err)
		default:
			left := time.Until(*c.until.Load())
			if left <= 0 {
				return c.lost(&ClaimLostError{Key: c.entry.Key, Err: err})
			}
			wait = min(again.Next(), left)
		}
	}
}

// lost is err, unless the claim was handled: by now in a transaction whose outcome decides, and whose commit is not to be cut off.
func (c *claim) lost(err error) error {
	if c.handled.Load() {
		return nil
	}
	return err
}

// renew makes one attempt, no longer than the lease is good.
func (c *claim) renew(ctx context.Context) error {
	ctx, cancel := context.WithDeadline(ctx, *c.until.Load())
	defer cancel()
	asked := time.Now()
	res, err := c.inbox.claims.UpdateOne(ctx, c.mine(), bson.A{bson.D{{Key: "$set", Value: bson.D{{Key: "until", Value: after(c.lease)}}}}})
	if err != nil {
		return fmt.Errorf("renewing the claim of %s: %w", c.entry.Key, err)
	}
	if res.MatchedCount == 0 {
		return &ClaimLostError{Key: c.entry.Key}
	}
	c.renewed(asked)
	return nil
}

func (c *claim) Hold(ctx context.Context, fn func(ctx context.Context) error) error {
	lost, err := hold.While(ctx, c.Run, fn)
	switch {
	case lost == nil || errors.Is(err, ErrClaimLost):
		return err
	case err == nil && c.handled.Load():
		return nil
	}
	return errors.Join(lost, err)
}

func (c *claim) Release(ctx context.Context) error {
	if c.handled.Load() {
		return c.drop(ctx) // nobody will ask for it again
	}
	return c.Defer(ctx, 0)
}

// Defer keeps the document, and with it the epoch.
func (c *claim) Defer(ctx context.Context, d time.Duration) error {
	c.forget()
	set := bson.A{
		bson.D{{Key: "$set", Value: bson.D{{Key: "until", Value: after(max(d, 0))}}}},
		bson.D{{Key: "$unset", Value: "o"}},
	}
	if _, err := c.inbox.claims.UpdateOne(mongo.NewSessionContext(ctx, nil), c.mine(), set); err != nil {
		return fmt.Errorf("releasing the claim of %s: %w", c.entry.Key, err)
	}
	return nil
}

// drop removes the lease if it is ours.
func (c *claim) drop(ctx context.Context) error {
	c.forget()
	if _, err := c.inbox.claims.DeleteOne(mongo.NewSessionContext(ctx, nil), c.mine()); err != nil {
		return fmt.Errorf("removing the claim of %s: %w", c.entry.Key, err)
	}
	return nil
}

func (c *claim) forget() {
	c.inbox.mu.Lock()
	defer c.inbox.mu.Unlock()
	delete(c.inbox.held, c)
}

// Release gives up what this Inbox holds for a consumer as claims of a partition, and the partition: for when it goes to
// another process and no transaction about it is open any more. Other consumers may use the same Inbox.
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
	return errors.Join(append(errs, x.letGo(ctx, partition{consumer, topic, part}))...)
}
