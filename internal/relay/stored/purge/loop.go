package purge

import (
	"cmp"
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
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
	state  state.Database
	keep   time.Duration
	marks  *positions // nil before the first read
	readAt time.Time
}

// NewCuts returns Cuts that keep envelopes younger than keep, which must be at least the margin ([mongodb.AskMargin]).
func NewCuts(state state.Database, keep time.Duration) *Cuts { return &Cuts{state: state, keep: keep} }

// unreadError is the error of a read of the positions, without which nothing of any collection may be purged (N25).
type unreadError struct{ error }

func (e *unreadError) Unwrap() error { return e.error }

// Of returns the current boundary of a collection. The error is an error of the server or a [*HeldError].
func (c *Cuts) Of(ctx context.Context, outbox outboxes.Outbox) (Cut, error) {
	if c.marks == nil || time.Since(c.readAt) > recheckEvery {
		marks, err := readPositions(ctx, c.state)
		if err != nil {
			return Cut{}, &unreadError{err}
		}
		c.marks, c.readAt = marks, time.Now()
	}
	cut, err := c.marks.Cut(outbox, c.keep)
	if err != nil {
		return cut, err
	}

	// The purge addresses the collection by name. If a rename has replaced it, the new collection is not read yet.
	holder, err := outbox.NameHolder(ctx, c.state.Client())
	if err == nil && holder != outbox.UUID && holder != [16]byte{} {
		err = &HeldError{NS: outbox.NS(), Hold: HoldReplaced}
	}
	return cut, err
}

// Loop removes the envelopes of one collection up to its cut, statement by statement.
type Loop struct {
	Coll       *mongo.Collection
	Candidates *Candidates                              // of the collection; kept for the next Loop
	Size       func() int                               // returns how many envelopes the next statement may remove
	Cut        func(ctx context.Context) (Cut, error)   // called before each statement; an error ends the loop
	Step       func(ctx context.Context, n int64) error // called after each statement with its removals; an error ends the loop

	// After is the stamp up to which the pass has removed the envelopes. It is kept for the next Loop of the pass. nil: none.
	After *bson.Timestamp
	// Yield is called after each statement that has brought the pass forward and has left envelopes. An error ends the loop. nil: the
	// loop continues.
	Yield func() error
}

// Run removes envelopes until none is left before the cut or an error occurs. It returns how many it removed. It
// leaves the candidates that the positions have not passed yet to the next Run.
func (l Loop) Run(ctx context.Context) (total int64, err error) {
	// Envelopes with stamps are removed in the order of the stamps, so after is where to continue.
	after := cmp.Or(l.After, new(bson.Timestamp))
	for more := true; more; {
		err := l.runStatement(ctx, func(ctx context.Context, cut Cut) (int64, error) {
			purged, err := PurgeBatch(ctx, l.Coll, *after, cut, l.Size())
			if more = purged.More; more {
				*after = purged.Upto
			}
			total += purged.Deleted
			return purged.Deleted, err
		})
		// Scheduled envelopes make a statement remove nothing.
		if err == nil && more {
			err = l.yield()
		}
		if err != nil {
			return total, err
		}
	}

	for remaining := -1; l.Candidates.Len() != remaining; {
		remaining = l.Candidates.Len()
		var deleted int64
		err := l.runStatement(ctx, func(ctx context.Context, cut Cut) (int64, error) {
			if remaining == 0 {
				return 0, l.Candidates.read(ctx, l.Coll, cut)
			}
			var err error
			deleted, err = l.Candidates.purge(ctx, l.Coll, cut, l.Size())
			total += deleted
			return deleted, err
		})
		if err == nil && deleted > 0 {
			err = l.yield()
		}
		if err != nil {
			return total, err
		}
	}
	return total, nil
}

// yield calls Yield.
func (l Loop) yield() error {
	if l.Yield == nil {
		return nil
	}
	return l.Yield()
}

// runStatement runs one statement with the present cut.
func (l Loop) runStatement(ctx context.Context, run func(context.Context, Cut) (deleted int64, err error)) error {
	cut, err := l.Cut(ctx)
	if err != nil {
		return err
	}

	call, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	deleted, err := run(call, cut)
	if err != nil {
		return err
	}
	return l.Step(ctx, deleted)
}

// Count is the number of envelopes that a purge would remove or stamp.
type Count struct {
	Stamped   int64 // to remove
	Unstamped int64 // to remove
	Timeless  int64 // to stamp, because nothing shows how old they are
}

// CountPurgeable counts the envelopes that a purge up to the cut would remove or stamp. It counts envelopes with a stamp by
// the index alone, and subtracts the others among them. It reads the ids of the others.
func CountPurgeable(ctx context.Context, coll *mongo.Collection, cut Cut) (counted Count, err error) {
	within := bson.E{Key: "ts", Value: bson.D{{Key: "$gt", Value: bson.Timestamp{}}, {Key: "$lt", Value: cut.Before}}}
	present := bson.D{{Key: "$exists", Value: true}, {Key: "$ne", Value: nil}}

	// After an error it does nothing, and err is the first error.
	count := func(filter bson.D) (n int64) {
		if err == nil {
			n, err = coll.CountDocuments(ctx, filter)
		}
		return n
	}
	counted.Stamped = count(bson.D{within})
	counted.Stamped -= count(bson.D{{Key: "dueAt", Value: present}, within})
	// A list that contains a stamp is among the envelopes without one.
	counted.Stamped -= count(outboxes.WithoutDueAt(within, outboxes.Unstamped()))
	counted.Stamped = max(counted.Stamped, 0)
	if err != nil {
		return Count{}, mongodb.DescribeError(err, "counting envelopes to purge of "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll))
	}

	for _, ids := range append(cut.expiredIDs(), cut.timelessIDs(time.Now())) {
		err := mongodb.FindEach(ctx, coll, "counting envelopes to purge of "+mongodb.Namespace(coll),
			outboxes.WithoutDueAt(ids, outboxes.Unstamped()),
			func(raw bson.Raw) error {
				if cut.isExpired(raw.Lookup("_id")) {
					counted.Unstamped++
				} else {
					counted.Timeless++
				}
				return nil
			}, options.Find().SetProjection(bson.D{{Key: "_id", Value: 1}}))
		if err != nil {
			return Count{}, err
		}
	}
	return counted, nil
}
