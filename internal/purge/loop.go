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
	recheck   = time.Second      // the longest that a purge goes by one reading of the positions
	purgeCall = 30 * time.Second // of one statement
)

// Cuts are the boundaries of a purge that lasts: the positions are read anew every second, so that a gap stops it, and
// what is delivered meanwhile goes too.
type Cuts struct {
	state *mongo.Database
	keep  time.Duration
	w     *Watermarks
	read  time.Time
}

// NewCuts is for a purge that keeps what is younger than keep, which must not be less than the margin ([mongodb.AskMargin]).
func NewCuts(state *mongo.Database, keep time.Duration) *Cuts { return &Cuts{state: state, keep: keep} }

// Of is the boundary of a collection now. Its errors are those of the server and [*HeldError].
func (c *Cuts) Of(ctx context.Context, o outboxes.Outbox) (Cut, error) {
	if c.w == nil || time.Since(c.read) > recheck {
		w, err := ReadWatermarks(ctx, c.state)
		if err != nil {
			return Cut{}, err
		}
		c.w, c.read = w, time.Now()
	}
	cut, err := c.w.Cut(o, c.keep)
	if err != nil {
		return cut, err
	}
	// The purge goes by name, and a collection that was renamed in place of this one is not read yet.
	holder, err := o.NameHolder(ctx, c.state.Client())
	if err == nil && holder != o.UUID && holder != [16]byte{} {
		err = &HeldError{NS: o.NS(), Hold: HoldReplaced}
	}
	return cut, err
}

// PurgeLoop removes from one collection what is in front of its cut, statement by statement.
type PurgeLoop struct {
	Coll *mongo.Collection
	Size func() int                               // how many envelopes the next statement may remove
	Cut  func(ctx context.Context) (Cut, error)   // asked before each statement; an error ends the loop
	Step func(ctx context.Context, n int64) error // called after each, with what it removed; an error ends the loop
}

// Run returns how many were removed when there is no more, or with the error that ended it.
func (l PurgeLoop) Run(ctx context.Context) (total int64, err error) {
	var after bson.Timestamp
	for stamped := true; ; {
		cut, err := l.Cut(ctx)
		if err != nil {
			return total, err
		}
		step, err := l.statement(ctx, stamped, after, cut)
		total += step.Deleted
		if err != nil {
			return total, err
		}
		if err := l.Step(ctx, step.Deleted); err != nil {
			return total, err
		}
		after = step.Upto
		switch {
		case step.More:
		case stamped:
			stamped = false
		default:
			return total, nil
		}
	}
}

func (l PurgeLoop) statement(ctx context.Context, stamped bool, after bson.Timestamp, cut Cut) (Purged, error) {
	ctx, cancel := context.WithTimeout(ctx, purgeCall)
	defer cancel()
	if !stamped {
		return PurgeUnstamped(ctx, l.Coll, cut.SentBefore(), l.Size())
	}
	return PurgeBatch(ctx, l.Coll, after, cut.Before, l.Size())
}

// Purgeable counts what a purge up to the cut would remove, in two numbers: with a stamp, and without one. The first comes
// from the index alone, less what it holds of exceptions.
func Purgeable(ctx context.Context, coll *mongo.Collection, cut Cut) (stamped, unstamped int64, err error) {
	within := bson.E{Key: "ts", Value: bson.D{{Key: "$gt", Value: bson.Timestamp{}}, {Key: "$lt", Value: cut.Before}}}
	present := bson.D{{Key: "$exists", Value: true}, {Key: "$ne", Value: nil}}
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
		return 0, 0, mongodb.DescribeRefusal(err, "counting what to purge of "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll), "")
	}
	return max(stamped, 0), unstamped, nil
}
