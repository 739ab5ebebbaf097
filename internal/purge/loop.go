package purge

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
)

const (
	// recheckEvery is the longest time for which a purge relies on one reading of the positions.
	recheckEvery = time.Second
	// statementTimeout bounds one statement.
	statementTimeout = 30 * time.Second
)

// Cuts returns the boundaries of a purge that runs for a while. It reads the positions again every second. So a new gap
// stops the purge, and envelopes that are delivered during the purge are removed too. It is for one goroutine.
type Cuts struct {
	state  *mongo.Database
	keep   time.Duration
	marks  *Watermarks // nil before the first read
	readAt time.Time
}

// NewCuts returns Cuts that keep envelopes younger than keep, which must be at least the margin ([mongodb.AskMargin]).
func NewCuts(state *mongo.Database, keep time.Duration) *Cuts { return &Cuts{state: state, keep: keep} }

// Of returns the current boundary of a collection. The error is an error of the server or a [*HeldError].
func (c *Cuts) Of(ctx context.Context, o outboxes.Outbox) (Cut, error) {
	if c.marks == nil || time.Since(c.readAt) > recheckEvery {
		marks, err := ReadWatermarks(ctx, c.state)
		if err != nil {
			return Cut{}, err
		}
		c.marks, c.readAt = marks, time.Now()
	}
	cut, err := c.marks.Cut(o, c.keep)
	if err != nil {
		return cut, err
	}

	// The purge addresses the collection by name. If a rename has replaced it, the new collection is not read yet.
	holder, err := o.NameHolder(ctx, c.state.Client())
	if err == nil && holder != o.UUID && holder != [16]byte{} {
		err = &HeldError{NS: o.NS(), Hold: HoldReplaced}
	}
	return cut, err
}

// PurgeLoop removes the envelopes of one collection up to its cut, statement by statement.
type PurgeLoop struct {
	Coll *mongo.Collection
	Size func() int                               // returns how many envelopes the next statement may remove
	Cut  func(ctx context.Context) (Cut, error)   // called before each statement; an error ends the loop
	Step func(ctx context.Context, n int64) error // called after each statement with its removals; an error ends the loop
}

// Run removes envelopes until none is left before the cut or an error occurs. It returns how many it removed.
func (l PurgeLoop) Run(ctx context.Context) (total int64, err error) {
	// Envelopes with stamps come first. They are removed in the order of the stamps, so after is where to continue.
	var after bson.Timestamp
	for stamped := true; ; {
		cut, err := l.Cut(ctx)
		if err != nil {
			return total, err
		}
		purged, err := l.runStatement(ctx, stamped, after, cut)
		total += purged.Deleted
		if err != nil {
			return total, err
		}
		if err := l.Step(ctx, purged.Deleted); err != nil {
			return total, err
		}

		after = purged.Upto
		switch {
		case purged.More:
		case stamped:
			stamped = false
		default:
			return total, nil
		}
	}
}

func (l PurgeLoop) runStatement(ctx context.Context, stamped bool, after bson.Timestamp, cut Cut) (Purged, error) {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()

	if !stamped {
		return PurgeUnstamped(ctx, l.Coll, cut.SentBefore(), l.Size())
	}
	return PurgeBatch(ctx, l.Coll, after, cut.Before, l.Size())
}

// Purgeable returns how many envelopes with a stamp, and how many without one, a purge up to the cut would remove. It
// counts the envelopes with a stamp by the index alone, and subtracts the exceptions among them.
func Purgeable(ctx context.Context, coll *mongo.Collection, cut Cut) (stamped, unstamped int64, err error) {
	within := bson.E{Key: "ts", Value: bson.D{{Key: "$gt", Value: bson.Timestamp{}}, {Key: "$lt", Value: cut.Before}}}
	present := bson.D{{Key: "$exists", Value: true}, {Key: "$ne", Value: nil}}

	// After an error it does nothing, and err is the first error.
	count := func(filter bson.D) (n int64) {
		if err == nil {
			n, err = coll.CountDocuments(ctx, filter)
		}
		return n
	}
	stamped = count(bson.D{within})
	stamped -= count(bson.D{{Key: "state", Value: present}, within})
	stamped -= count(bson.D{{Key: "dueAt", Value: present}, {Key: "state", Value: nil}, within})
	unstamped = count(unstampedSent(cut.SentBefore()))
	if err != nil {
		return 0, 0, mongodb.Refusal(err, "counting envelopes to purge of "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll))
	}
	return max(stamped, 0), unstamped, nil
}
