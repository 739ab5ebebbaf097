package inbox

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// Claim is the exclusive right to handle one message. Its methods are safe for concurrent use.
type Claim interface {
	// Entry returns the message.
	Entry() Entry

	// Attempt returns 1 for the first claim of this identity, and one more for each later claim.
	Attempt() int

	// Run renews the lease until ctx ends, and then returns nil. If the claim is lost, it returns a
	// *ClaimLostError. If the lease cannot be renewed, it does so when the lease has expired by the
	// clock of this process. That time is counted from before the last renewal was sent.
	Run(ctx context.Context) error

	// Hold runs fn and renews the lease at the same time. If the claim is lost, the context of fn
	// is canceled with the *ClaimLostError as its cause, and Hold returns that error joined with
	// the error of fn.
	Hold(ctx context.Context, fn func(ctx context.Context) error) error

	// Handled marks the message as handled and moves the watermark, in the transaction of ctx. If
	// another holder has claimed the message, the error is a *ClaimLostError, and the transaction
	// cannot commit. Without a transaction it takes effect at once. If the process crashes before
	// that, the message is handled again.
	Handled(ctx context.Context) error

	// Release gives the claim up, so that the message can be claimed again at once. After Handled
	// was committed it only deletes the lease. It may be called at any time and more than once.
	Release(ctx context.Context) error

	// Defer gives the claim up. The message can be claimed again after the time d.
	Defer(ctx context.Context, d time.Duration) error
}

// claim is a Claim in MongoDB. A lease and a marker store it.
type claim struct {
	inbox      *Inbox
	entry      Entry
	id         bson.Raw // _id of the marker and of the lease
	generation int64
	owner      string
	epoch      int64
	attempt    int
	lease      time.Duration

	until   atomic.Pointer[time.Time] // monotonic time until which the lease is certainly valid
	handled atomic.Bool
}

// Claim claims the message before its handler begins. If lease is 0, the lease of the Inbox is
// used. When Claim returns, the claim is committed. Call Release in the end, whatever the result of
// the handler is.
//
// It returns a *DuplicateError if the message was handled, a *ClaimedError if another holder has
// claimed it, and ErrInTransaction if ctx has a running transaction. It costs two writes, and also
// a read if the entry has a place.
func (x *Inbox) Claim(ctx context.Context, e Entry, lease time.Duration) (Claim, error) {
	if lease == 0 {
		lease = x.lease
	}

	err := e.validateEntry()
	if lease < MinLease || lease > x.retention {
		err = errors.Join(err, fmt.Errorf("%w: invalid lease %s: it must be between %s and the retention", ErrInvalid, lease, MinLease))
	}

	// The claim must be committed before the handler begins.
	if inTransaction(ctx) {
		err = errors.Join(err, ErrInTransaction)
	}
	if err != nil {
		return nil, fmt.Errorf("claiming: %w", err)
	}

	c := &claim{inbox: x, entry: e, owner: uuid.NewString(), lease: lease}
	if err := c.acquireClaim(ctx); err != nil {
		return nil, fmt.Errorf("claiming: %w", err)
	}

	// Release gives up all claims of a partition.
	x.mu.Lock()
	x.heldClaims[c] = struct{}{}
	x.mu.Unlock()

	return c, nil
}

// acquireClaim acquires the lease first, which orders concurrent claims. Then it writes owner and
// epoch into the marker. From then on, no earlier holder can finish.
func (c *claim) acquireClaim(ctx context.Context) error {
	if err := c.locateMarker(ctx); err != nil {
		return err
	}
	if err := c.acquireLease(ctx); err != nil {
		return err
	}

	for {
		m, err := c.claimMarker(ctx)
		switch {
		case err != nil:
			return errors.Join(err, c.deleteLease(ctx))
		case m.State == stateHandled:
			return errors.Join(&DuplicateError{Keys: []Key{c.entry.Key}}, c.deleteLease(ctx))
		case m.Owner == c.owner:
			c.attempt = m.Attempts
			return nil
		}

		// The marker contains a later epoch than the lease: the lease was deleted, and the server's
		// clock has gone back since. Set a higher epoch, if the lease is still held.
		if err := c.raiseEpoch(ctx, m.Epoch+1); err != nil {
			return err
		}
	}
}

// locateMarker checks the watermark, and sets the generation and the _id of the marker.
func (c *claim) locateMarker(ctx context.Context) (err error) {
	if c.entry.Place.Topic != "" {
		l := entryLane(c.entry)
		m, err := c.inbox.readMarks(ctx, map[lane]struct{}{l: {}})
		if err != nil {
			return err
		}

		c.generation = m.currentGeneration(l.partition, l.lane)
		if err := c.inbox.checkAttached(l.partition, c.generation); err != nil {
			return err
		}
		if c.entry.Place.Offset < m.nextOffset(l, c.generation) {
			return &DuplicateError{Keys: []Key{c.entry.Key}}
		}
	}

	c.id, err = c.inbox.markerID(c.entry, c.generation)
	return err
}

// acquireLease acquires the lease if it has expired by the server's clock. The epoch is the time in
// milliseconds, or one more than the last epoch. So it increases even if the document was deleted
// in between.
func (c *claim) acquireLease(ctx context.Context) error {
	until := bson.D{{Key: "$ifNull", Value: bson.A{"$until", bson.DateTime(0)}}}
	free := bson.D{{Key: "$lte", Value: bson.A{until, "$$NOW"}}}
	nextEpoch := bson.D{{Key: "$add", Value: bson.A{bson.D{{Key: "$ifNull", Value: bson.A{"$e", int64(0)}}}, int64(1)}}}
	taken := bson.D{
		{Key: "_id", Value: "$_id"},
		{Key: "o", Value: c.owner},
		{Key: "e", Value: bson.D{{Key: "$max", Value: bson.A{nextEpoch, bson.D{{Key: "$toLong", Value: "$$NOW"}}}}}},
		{Key: "until", Value: afterNow(c.lease)},
	}

	// The lease is counted from before the request, so this process never considers it valid for
	// too long.
	asked := time.Now()
	var d leaseDoc
	err := c.inbox.claims.FindOneAndUpdate(ctx, c.idFilter(), replaceIf(free, taken), upsertOptions()).Decode(&d)
	if err != nil {
		return fmt.Errorf("taking the lease of %s: %w", c.entry.Key, err)
	}
	if d.Owner != c.owner {
		return c.leaseHeldError(ctx, d.Until)
	}

	c.epoch = d.Epoch
	c.extendLease(asked)
	return nil
}

// leaseHeldError returns the error for a lease that another holder has. That holder may have
// handled the message without deleting its lease.
func (c *claim) leaseHeldError(ctx context.Context, until time.Time) error {
	var m marker
	err := c.inbox.markers.FindOne(ctx, c.idFilter()).Decode(&m)
	switch {
	case err != nil && !errors.Is(err, mongo.ErrNoDocuments):
		return fmt.Errorf("reading the marker of %s: %w", c.entry.Key, err)
	case m.State == stateHandled:
		return &DuplicateError{Keys: []Key{c.entry.Key}}
	}

	return &ClaimedError{Key: c.entry.Key, Until: until}
}

// claimMarker writes the claim into the marker, unless the message was handled or the marker has a
// later epoch. It returns the resulting marker.
func (c *claim) claimMarker(ctx context.Context) (marker, error) {
	epoch := bson.D{{Key: "$ifNull", Value: bson.A{"$e", int64(-1)}}}
	unavailable := bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: "$eq", Value: bson.A{"$s", stateHandled}}},
		bson.D{{Key: "$gte", Value: bson.A{epoch, c.epoch}}},
	}}}

	attempts := bson.D{{Key: "$ifNull", Value: bson.A{"$a", 0}}}
	fields := append(bson.D{
		{Key: "s", Value: stateClaimed},
		{Key: "o", Value: c.owner},
		{Key: "e", Value: c.epoch},
		{Key: "a", Value: bson.D{{Key: "$add", Value: bson.A{attempts, 1}}}},
	}, c.inbox.expiryFields()...)
	claimed := bson.D{{Key: "$mergeObjects", Value: bson.A{
		"$$ROOT", append(fields, placeFields(c.entry.Place)...),
	}}}

	var m marker
	update := replaceIf(bson.D{{Key: "$not", Value: unavailable}}, claimed)
	err := c.inbox.markers.FindOneAndUpdate(ctx, c.idFilter(), update, upsertOptions()).Decode(&m)
	if err != nil {
		return m, fmt.Errorf("writing the claim of %s: %w", c.entry.Key, err)
	}

	return m, nil
}

// raiseEpoch sets a higher epoch if the lease is still held.
func (c *claim) raiseEpoch(ctx context.Context, epoch int64) error {
	set := bson.A{bson.D{{Key: "$set", Value: bson.D{{Key: "e", Value: epoch}}}}}
	res, err := c.inbox.claims.UpdateOne(ctx, c.ownLeaseFilter(), set)
	if err != nil {
		return fmt.Errorf("raising the epoch of %s: %w", c.entry.Key, err)
	}
	if res.MatchedCount == 0 {
		return &ClaimedError{Key: c.entry.Key, Until: time.Now()}
	}

	c.epoch = epoch
	return nil
}

// idFilter returns a filter for the marker or the lease.
func (c *claim) idFilter() bson.D { return bson.D{{Key: "_id", Value: c.id}} }

// ownLeaseFilter returns a filter for the lease while this claim holds it.
func (c *claim) ownLeaseFilter() bson.D {
	return bson.D{{Key: "_id", Value: c.id}, {Key: "o", Value: c.owner}}
}

// replaceIf returns an update that replaces the document if the condition holds.
func replaceIf(cond, with bson.D) bson.A {
	return bson.A{bson.D{{Key: "$replaceWith", Value: bson.D{{Key: "$cond", Value: bson.A{cond, with, "$$ROOT"}}}}}}
}

// upsertOptions returns options for an upsert that returns the new document.
func upsertOptions() *options.FindOneAndUpdateOptionsBuilder {
	return options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.After)
}

func (c *claim) Entry() Entry { return c.entry }

func (c *claim) Attempt() int { return c.attempt }

// Handled marks the message as handled and moves the watermark: see Claim.Handled.
func (c *claim) Handled(ctx context.Context) error {
	// If this process is killed, the next owner of the partition can end the transaction.
	c.inbox.recordSession(ctx)
	err := c.inbox.joinTransaction(ctx, func(ctx context.Context) error {
		// The filter does not contain the state, so marking the message again changes nothing.
		filter := bson.D{{Key: "_id", Value: c.id}, {Key: "o", Value: c.owner}, {Key: "e", Value: c.epoch}}
		res, err := c.inbox.markers.UpdateOne(ctx, filter, c.inbox.handledUpdate())
		if err != nil {
			return fmt.Errorf("marking %s as handled: %w", c.entry.Key, err)
		}
		if res.MatchedCount == 0 {
			return &ClaimLostError{Key: c.entry.Key}
		}

		c.handled.Store(true)
		if c.entry.Place.Topic == "" {
			return nil
		}

		p := c.entry.Place
		watermark := mark{Generation: c.generation, Next: p.Offset + 1, Epoch: p.LeaderEpoch}
		return c.inbox.advanceWatermarks(ctx, []move{{entryLane(c.entry), watermark}})
	})
	if err != nil {
		return err
	}

	memoFromContext(ctx).storeAnswers([]Entry{c.entry}, []bool{true})
	return nil
}
