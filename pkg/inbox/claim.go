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

// Claim is the right to handle one message, held by one at a time. Its methods are safe for concurrent use.
type Claim interface {
	// Entry is the message.
	Entry() Entry
	// Attempt is 1 for the first claim of this identity, 2 for the one after it was released or ran out, and so on.
	Attempt() int
	// Run renews the lease until ctx ends, which is no error, or until the claim is lost: then it returns a
	// *ClaimLostError, at the latest when the lease would be over by this process's own clock, counted from before the
	// last renewal was sent.
	Run(ctx context.Context) error
	// Hold runs fn while it renews the lease. If the claim is lost, the context of fn ends with the *ClaimLostError as its
	// cause, which Hold then returns beside the error of fn.
	Hold(ctx context.Context, fn func(ctx context.Context) error) error
	// Handled turns the claim into the marker of a handled message and moves the watermark, in the transaction of ctx. If
	// somebody else has taken the claim meanwhile it is a *ClaimLostError, and the transaction cannot commit. Without a
	// transaction it takes effect at once; a crash before it means that the message is handled again.
	Handled(ctx context.Context) error
	// Release gives the claim up, so that it can be had again at once. After Handled was committed it only tidies up; it
	// may be called always and more than once.
	Release(ctx context.Context) error
	// Defer gives the claim up; nobody can have it for that time.
	Defer(ctx context.Context, d time.Duration) error
}

// claim is a Claim in MongoDB.
type claim struct {
	inbox      *Inbox
	entry      Entry
	id         bson.Raw // of the marker and of the lease
	generation int64
	owner      string
	epoch      int64
	attempt    int
	lease      time.Duration

	until   atomic.Pointer[time.Time] // monotonic; the lease is good at least until then
	handled atomic.Bool
}

// Claim takes the message before its handler begins, for that lease or, if 0, that of the Inbox. It is committed when it
// returns. A message that was handled is a *DuplicateError, one that somebody else holds a *ClaimedError, a context with a
// running transaction ErrInTransaction. It costs two writes, and a read before them for an entry with a place.
//
// Release has to be called in the end, whatever came of it.
func (x *Inbox) Claim(ctx context.Context, e Entry, lease time.Duration) (Claim, error) {
	if lease == 0 {
		lease = x.lease
	}
	err := e.validate()
	if lease < MinLease || lease > x.retention {
		err = errors.Join(err, fmt.Errorf("%w: a lease of %s; it must be at least %s and at most the retention", ErrInvalid, lease, MinLease))
	}
	if inTransaction(ctx) {
		err = errors.Join(err, ErrInTransaction)
	}
	if err != nil {
		return nil, fmt.Errorf("claiming: %w", err)
	}
	c := &claim{inbox: x, entry: e, owner: uuid.NewString(), lease: lease}
	if err := c.take(ctx); err != nil {
		return nil, fmt.Errorf("claiming: %w", err)
	}
	x.mu.Lock()
	x.held[c] = struct{}{}
	x.mu.Unlock()
	return c, nil
}

// take gets the lease first, which orders those who want the message, and then writes owner and epoch into the marker,
// from which moment on no holder before can finish.
func (c *claim) take(ctx context.Context) error {
	if err := c.locate(ctx); err != nil {
		return err
	}
	if err := c.takeLease(ctx); err != nil {
		return err
	}
	for {
		m, err := c.takeMarker(ctx)
		switch {
		case err != nil:
			return errors.Join(err, c.drop(ctx))
		case m.State == stateHandled:
			return errors.Join(&DuplicateError{Keys: []Key{c.entry.Key}}, c.drop(ctx))
		case m.Owner == c.owner:
			c.attempt = m.Attempts
			return nil
		}
		// The marker knows a later epoch than the lease: the lease was removed, and the server's clock has gone back
		// since. Go above it, if the lease is still ours.
		if err := c.raise(ctx, m.Epoch+1); err != nil {
			return err
		}
	}
}

// locate asks the watermark, and finds the marker's _id.
func (c *claim) locate(ctx context.Context) (err error) {
	if c.entry.Place.Topic != "" {
		l := laneOf(c.entry)
		m, err := c.inbox.readMarks(ctx, map[lane]struct{}{l: {}})
		if err != nil {
			return err
		}
		c.generation = m.generation(l.partition, l.lane)
		if err := c.inbox.checkAttached(l.partition, c.generation); err != nil {
			return err
		}
		if c.entry.Place.Offset < m.next(l, c.generation) {
			return &DuplicateError{Keys: []Key{c.entry.Key}}
		}
	}
	c.id, err = c.inbox.identity(c.entry, c.generation)
	return err
}

// takeLease takes the lease if it is free by the server's clock. The epoch is that clock's milliseconds, or one more than
// the last, so that it rises although the documents do not stay.
func (c *claim) takeLease(ctx context.Context) error {
	free := bson.D{{Key: "$lte", Value: bson.A{bson.D{{Key: "$ifNull", Value: bson.A{"$until", bson.DateTime(0)}}}, "$$NOW"}}}
	above := bson.D{{Key: "$add", Value: bson.A{bson.D{{Key: "$ifNull", Value: bson.A{"$e", int64(0)}}}, int64(1)}}}
	taken := bson.D{
		{Key: "_id", Value: "$_id"},
		{Key: "o", Value: c.owner},
		{Key: "e", Value: bson.D{{Key: "$max", Value: bson.A{above, bson.D{{Key: "$toLong", Value: "$$NOW"}}}}}},
		{Key: "until", Value: after(c.lease)},
	}
	asked := time.Now()
	var d leaseDoc
	err := c.inbox.claims.FindOneAndUpdate(ctx, c.key(), replaceIf(free, taken), upsertAfter()).Decode(&d)
	if err != nil {
		return fmt.Errorf("taking the lease of %s: %w", c.entry.Key, err)
	}
	if d.Owner != c.owner {
		return c.refused(ctx, d.Until)
	}
	c.epoch = d.Epoch
	c.renewed(asked)
	return nil
}

// refused says why somebody else has the lease: it may be done, and have gone without tidying up.
func (c *claim) refused(ctx context.Context, until time.Time) error {
	var m marker
	err := c.inbox.markers.FindOne(ctx, c.key()).Decode(&m)
	switch {
	case err != nil && !errors.Is(err, mongo.ErrNoDocuments):
		return fmt.Errorf("reading the marker of %s: %w", c.entry.Key, err)
	case m.State == stateHandled:
		return &DuplicateError{Keys: []Key{c.entry.Key}}
	}
	return &ClaimedError{Key: c.entry.Key, Until: until}
}

// takeMarker writes the claim into the marker, unless that is handled or of a later epoch, and returns what is there then.
func (c *claim) takeMarker(ctx context.Context) (marker, error) {
	theirs := bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: "$eq", Value: bson.A{"$s", stateHandled}}},
		bson.D{{Key: "$gte", Value: bson.A{bson.D{{Key: "$ifNull", Value: bson.A{"$e", int64(-1)}}}, c.epoch}}},
	}}}
	fields := append(bson.D{
		{Key: "s", Value: stateClaimed},
		{Key: "o", Value: c.owner},
		{Key: "e", Value: c.epoch},
		{Key: "a", Value: bson.D{{Key: "$add", Value: bson.A{bson.D{{Key: "$ifNull", Value: bson.A{"$a", 0}}}, 1}}}},
	}, c.inbox.expiry()...)
	ours := bson.D{{Key: "$mergeObjects", Value: bson.A{"$$ROOT", append(fields, placeFields(c.entry.Place)...)}}}
	var m marker
	err := c.inbox.markers.FindOneAndUpdate(ctx, c.key(), replaceIf(bson.D{{Key: "$not", Value: theirs}}, ours), upsertAfter()).Decode(&m)
	if err != nil {
		return m, fmt.Errorf("writing the claim of %s: %w", c.entry.Key, err)
	}
	return m, nil
}

func (c *claim) raise(ctx context.Context, epoch int64) error {
	set := bson.A{bson.D{{Key: "$set", Value: bson.D{{Key: "e", Value: epoch}}}}}
	res, err := c.inbox.claims.UpdateOne(ctx, c.mine(), set)
	if err != nil {
		return fmt.Errorf("raising the epoch of %s: %w", c.entry.Key, err)
	}
	if res.MatchedCount == 0 {
		return &ClaimedError{Key: c.entry.Key, Until: time.Now()}
	}
	c.epoch = epoch
	return nil
}

func (c *claim) key() bson.D { return bson.D{{Key: "_id", Value: c.id}} }

// mine matches the lease as long as nobody else has taken it.
func (c *claim) mine() bson.D {
	return bson.D{{Key: "_id", Value: c.id}, {Key: "o", Value: c.owner}}
}

func replaceIf(cond, with bson.D) bson.A {
	return bson.A{bson.D{{Key: "$replaceWith", Value: bson.D{{Key: "$cond", Value: bson.A{cond, with, "$$ROOT"}}}}}}
}

func upsertAfter() *options.FindOneAndUpdateOptionsBuilder {
	return options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.After)
}

func (c *claim) Entry() Entry { return c.entry }

func (c *claim) Attempt() int { return c.attempt }

func (c *claim) Handled(ctx context.Context) error {
	c.inbox.note(ctx)
	err := c.inbox.join(ctx, func(ctx context.Context) error {
		// The state is not asked for: to mark what this claim has marked changes nothing.
		filter := bson.D{{Key: "_id", Value: c.id}, {Key: "o", Value: c.owner}, {Key: "e", Value: c.epoch}}
		res, err := c.inbox.markers.UpdateOne(ctx, filter, c.inbox.toHandled())
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
		return c.inbox.advance(ctx, []move{{laneOf(c.entry), mark{Generation: c.generation, Next: p.Offset + 1, Epoch: p.LeaderEpoch}}})
	})
	if err != nil {
		return err
	}
	memoOf(ctx).keep([]Entry{c.entry}, []bool{true})
	return nil
}
