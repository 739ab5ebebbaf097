package sweep

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/base/crash"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

const markEvery = 256 // envelopes between two calls of Reached

// Publisher takes the envelopes of a sweep.
type Publisher interface {
	// Deliver delivers one envelope, in the order of the calls. It may block. Its error ends the sweep.
	Deliver(ctx context.Context, e *outboxes.Envelope) error
	// Reached is called when every envelope with a stamp up to cursor, and every envelope without a
	// stamp, was delivered.
	Reached(ctx context.Context, cursor bson.Timestamp) error
	// Trouble is called with the error of a read that failed and is retried.
	Trouble(err error)
}

// Sweep is one pass over a stretch whose change stream is lost. All fields except Cursor and Margin
// are required.
type Sweep struct {
	Client      *mongo.Client
	Collections []outboxes.Outbox
	// From is a cluster time up to which everything committed was delivered. If it is zero, nothing is
	// known, and all envelopes are swept. To is the time at which the stream continues: it brings the
	// envelopes with later stamps.
	From, To bson.Timestamp
	// ReadUpTo maps the names of collections to the exact time up to which they were read, if it is not
	// From. These are collections that were renamed to a watched name since From. The time is zero for a
	// collection that was never read.
	ReadUpTo map[string]bson.Timestamp
	// Claims contains the entries of the collections in the registry, by UUID.
	Claims map[[16]byte]outboxes.Registration
	// OldIDs includes the envelopes without a stamp whose ids contain a time long before the stretch. Most of them were
	// delivered, so this repeats them.
	OldIDs bool
	// Cursor is the place where an earlier pass over the same stretch stopped. Everything up to it is
	// delivered, and everything without a stamp. It is zero if there was no earlier pass.
	Cursor bson.Timestamp
	// Margin is the time by which stamps may precede From although their envelopes were committed after
	// From. Defaults to mongodb.MinMargin.
	Margin time.Duration
	// Memory bounds the responses that are held at a time, for any number of collections. A single one may be larger.
	Memory int64
	// Skip gets the ids that the stream may repeat. The sweep does not deliver ids that Skip already has
	// from an earlier pass.
	Skip      *Skip
	Publisher Publisher

	response time.Duration // first bound of the wait for a response; defaults to responseTimeout
}

// Result counts the envelopes that a sweep found.
type Result struct {
	Swept   int64 // delivered
	Skipped int64 // delivered by an earlier pass
}

// errMoved means that a collection was renamed during the sweep, so that the rest of it was
// not read under its name. Another pass over the collections that exist then finds the rest.
var errMoved = errors.New("a collection was renamed while it was swept")

// LowerBound returns the stamp after which the sweep begins.
func (s *Sweep) LowerBound() bson.Timestamp {
	low := s.To
	for _, c := range s.Collections {
		at := s.lowerBound(c)
		if at.Before(low) {
			low = at
		}
	}
	return low
}

// lowerBound returns the stamp after which the sweep of one collection begins.
func (s *Sweep) lowerBound(outbox outboxes.Outbox) bson.Timestamp {
	low, known := s.ReadUpTo[outbox.NS()]
	if !known {
		low = mongodb.Earlier(s.From, cmp.Or(s.Margin, mongodb.MinMargin))
	}
	if s.Cursor.After(low) {
		return s.Cursor
	}
	return low
}

// LeavesOut reports whether the sweep leaves out ids of a collection with envelopes that have no stamp.
func (s *Sweep) LeavesOut(ctx context.Context) (bool, error) {
	for _, c := range s.Collections {
		if s.leftOutIDs(c).isEmpty() {
			continue
		}
		coll := mongodb.Majority(mongodb.Database(s.Client, c.DB).Collection(c.Coll))
		if found, err := mongodb.Exists(ctx, coll, c.Slot.AddFilter(unstampedFilter(idRange{}))); err != nil || found {
			return found, err
		}
	}
	return false, nil
}

// Count returns the number of envelopes that a sweep starting now would find in a collection.
func (s *Sweep) Count(ctx context.Context, outbox outboxes.Outbox) (int64, error) {
	coll := mongodb.Majority(mongodb.Database(s.Client, outbox.DB).Collection(outbox.Coll))
	total := int64(0)
	count := func(filter bson.D) error {
		n, err := coll.CountDocuments(ctx, outbox.Slot.AddFilter(filter))
		total += n
		return err
	}

	leftOut := s.leftOutIDs(outbox)
	err := count(stampedFilter(s.lowerBound(outbox), lastStamp))
	if err == nil {
		err = count(unstampedFilter(leftOut))
	}
	if err != nil {
		return 0, fmt.Errorf("counting envelopes of %s: %w", outbox.NS(), err)
	}
	if leftOut.isEmpty() {
		return total, nil
	}

	// The filter does not leave out UUIDs.
	uuids := outboxes.IDsBetween(leftOut.from, leftOut.to)[1]
	early := streamFilter(outboxes.Unstamped(), uuids)
	err = mongodb.FindEach(ctx, coll, "counting envelopes of "+outbox.NS(), outbox.Slot.AddFilter(early), func(raw bson.Raw) error {
		id := raw.Lookup("_id")
		if _, hasTime := outboxes.IDTime(byte(id.Type), id.Value); hasTime {
			total--
		}
		return nil
	}, options.Find().SetProjection(bson.D{{Key: "_id", Value: 1}}))
	return total, err
}

// idMargin is how long before the stretch the time in an id may be. It is longer than the margin for clocks, because the
// purge records only from time to time up to where it has come. With the default retention, it has then removed every
// envelope with an earlier time, and a sweep leaves out none.
const idMargin = outboxes.ClockMargin + 2*time.Hour

// idRange is a range of times in ids, beginning with from and before to.
type idRange struct{ from, to time.Time }

func (r idRange) isEmpty() bool { return !r.from.Before(r.to) }

func (r idRange) contains(moment time.Time) bool {
	return !moment.Before(r.from) && moment.Before(r.to)
}

// leftOutIDs returns the times in ids of the envelopes without a stamp that the sweep of one collection leaves out.
//
// An envelope that is to be delivered was committed after the collection was read for the last time. So the time
// in its id is after that, unless the clock of its writer is wrong by more than the margin. If such an envelope
// was ever read, the ids of the collection are irregular. If an earlier time is from before the time up to which
// the collection was purged, the envelope was inserted since the purge, for example by $merge. A collection whose
// UUID is not known has no entry in the registry, so all of its envelopes are delivered.
func (s *Sweep) leftOutIDs(outbox outboxes.Outbox) idRange {
	from, known := s.ReadUpTo[outbox.NS()]
	if !known {
		from = s.From
	}
	claim := s.Claims[outbox.UUID]
	if s.OldIDs || from.IsZero() || !outbox.Identified() || claim.IrregularIDs {
		return idRange{}
	}

	left := idRange{to: time.Unix(int64(from.T), 0).Add(-idMargin)}
	if !claim.PurgedIDs.IsZero() {
		left.from = time.Unix(int64(claim.PurgedIDs.T), 0)
	}
	return left
}

// Run sweeps to the end of the stretch and returns nil. It returns early with the cause of ctx when ctx
// ends, or with the error of the publisher. It may be called once.
func (s *Sweep) Run(ctx context.Context) (Result, error) {
	run := &sweepRun{Sweep: s}
	if s.Margin == 0 {
		s.Margin = mongodb.MinMargin
	}
	s.Skip.to = s.To
	// The ids of an earlier pass are not in the set.
	s.Skip.partial = s.Skip.partial || !s.Cursor.IsZero()

	err := run.sweepAll(ctx)
	if err == nil {
		err = s.Publisher.Reached(ctx, s.To)
	}
	if err == nil {
		s.Skip.until, err = run.readClusterTime(ctx)
	}
	return run.Result, err
}

// sweepRun is the state of one Run.
type sweepRun struct {
	*Sweep
	Result
	sources       []*source // that have a next envelope, ordered by compareSources
	deliveredUpTo bson.Timestamp
	sinceReached  int   // envelopes since the last call of Reached
	heldBytes     int64 // of the responses of sources
}

// sweepAll delivers the envelopes without a stamp, and then merges the others of all collections in the
// order of their stamps.
func (r *sweepRun) sweepAll(ctx context.Context) error {
	defer func() {
		for _, s := range r.sources {
			s.closeCursor(ctx)
		}
	}()

	// An earlier pass has delivered all envelopes without a stamp before it had a cursor.
	if r.Cursor.IsZero() {
		for _, c := range r.Collections {
			if err := r.sweepUnstamped(ctx, c); err != nil {
				return err
			}
		}
	}

	for _, c := range r.Collections {
		source := r.newSource(c)
		source.last = r.lowerBound(c)
		if err := r.addSource(ctx, source); err != nil {
			return err
		}
	}

	r.deliveredUpTo = r.LowerBound()
	for len(r.sources) > 0 {
		source := r.sources[0]
		if source.raw == nil {
			if err := r.advanceFirst(ctx); err != nil {
				return err
			}
			continue
		}
		if err := r.reportReached(ctx, source.ts); err != nil {
			return err
		}

		// A transaction that was open at the end of the stretch has no lower stamp than this.
		again := repetition(source.ts.After(mongodb.Earlier(r.To, r.Margin)))
		if err := r.deliverCurrent(ctx, source, again); err != nil {
			return err
		}

		if err := r.advanceFirst(ctx); err != nil {
			return err
		}
	}
	return nil
}

// reportReached is called with the stamp of the next envelope. From time to time it calls Reached, but
// only between two different stamps.
func (r *sweepRun) reportReached(ctx context.Context, ts bson.Timestamp) error {
	r.sinceReached++
	if r.sinceReached < markEvery || ts == r.deliveredUpTo {
		r.deliveredUpTo = ts
		return nil
	}

	r.sinceReached = 0
	reached := r.deliveredUpTo
	r.deliveredUpTo = ts
	return r.Publisher.Reached(ctx, reached)
}

func (r *sweepRun) newSource(outbox outboxes.Outbox) *source {
	return &source{
		outbox:    outbox,
		coll:      mongodb.Database(r.Client, outbox.DB).Collection(outbox.Coll),
		db:        []byte(outbox.DB),
		name:      []byte(outbox.Coll),
		slot:      outbox.Slot,
		to:        r.To,
		idsAtLast: map[string]struct{}{},
		// The merge holds one response of each collection.
		responseBytes: int(r.Memory) / max(len(r.Collections), 1),
		docs:          1,
		docBytes:      guessedSize,
		timeout:       cmp.Or(r.response, responseTimeout),
	}
}

// sweepUnstamped delivers the envelopes of outbox without a stamp, in the order of insertion. The ids of some show that
// they are too old.
func (r *sweepRun) sweepUnstamped(ctx context.Context, outbox outboxes.Outbox) error {
	source := r.newSource(outbox)
	source.unstamped, source.leftOut = true, r.leftOutIDs(outbox)
	defer source.closeCursor(ctx)

	for {
		more, err := r.nextDocument(ctx, source)
		if err != nil || !more {
			return err
		}
		if err := r.deliverCurrent(ctx, source, mayRepeat); err != nil {
			return err
		}
	}
}

// advanceFirst moves the first source to its next document.
func (r *sweepRun) advanceFirst(ctx context.Context) error {
	source := r.sources[0]
	r.sources = slices.Delete(r.sources, 0, 1)
	return r.addSource(ctx, source)
}

// addSource moves source to its next document and adds it to the sources, unless it has ended. If the responses exceed the memory,
// it releases the responses of the sources whose turn comes last.
func (r *sweepRun) addSource(ctx context.Context, source *source) error {
	r.heldBytes -= source.heldBytes
	more, err := r.nextDocument(ctx, source)
	r.heldBytes += source.heldBytes
	if more {
		i, _ := slices.BinarySearchFunc(r.sources, source, compareSources)
		r.sources = slices.Insert(r.sources, i, source)
	}

	for i := len(r.sources) - 1; i > 0 && r.heldBytes > r.Memory; i-- {
		r.heldBytes -= r.sources[i].heldBytes
		r.sources[i].release(ctx)
		r.heldBytes += r.sources[i].heldBytes
	}
	return err
}

// nextDocument moves source to its next document and returns false at the end. It retries failed reads until
// they succeed, because the envelopes of a lost stream cannot be read anywhere else.
func (r *sweepRun) nextDocument(ctx context.Context, source *source) (more bool, err error) {
	err = r.retryReads(ctx, func(ctx context.Context) (err error) {
		more, err = source.nextWithTimeout(ctx)
		return err
	})
	if err != nil || more {
		return more, err
	}

	// A collection that was renamed looks as if it had ended. One that was dropped has ended: its envelopes are gone.
	name := source.outbox.Coll
	err = r.retryReads(ctx, func(ctx context.Context) (err error) {
		name, err = source.outbox.CurrentName(ctx, r.Client)
		return err
	})
	if err == nil && name != "" && name != source.outbox.Coll {
		err = fmt.Errorf("%s: %w", source.outbox.NS(), errMoved)
	}
	return false, err
}

// retryReads calls op until it succeeds, and returns nil, or the cause of ctx when ctx ends.
func (r *sweepRun) retryReads(ctx context.Context, op func(context.Context) error) error {
	err := retry.Do(ctx, retry.Reopen, op, func(err error, _ time.Duration) { r.Publisher.Trouble(err) })
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// repetition is whether the stream may repeat an envelope of the sweep.
type repetition bool

const mayRepeat repetition = true

// deliverCurrent delivers the current envelope of source. If the stream may repeat it, it is added to Skip, and left out if it
// is there already.
func (r *sweepRun) deliverCurrent(ctx context.Context, source *source, again repetition) error {
	if again == mayRepeat && r.Skip.contains(source.db, source.name, byte(source.id.Type), source.id.Value) {
		r.Skipped++
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}

	crash.At("mid-sweep")
	envelope := outboxes.Envelope{DB: source.db, Coll: source.name, TS: source.ts, Raw: source.raw}
	if err := r.Publisher.Deliver(ctx, &envelope); err != nil {
		return err
	}

	r.Swept++
	if again == mayRepeat {
		r.Skip.addID(source.db, source.name, byte(source.id.Type), source.id.Value)
	}
	return nil
}

// readClusterTime returns the time of the cluster after the last read. The sweep has not seen any later
// commit.
func (r *sweepRun) readClusterTime(ctx context.Context) (clusterTime bson.Timestamp, err error) {
	err = r.retryReads(ctx, func(ctx context.Context) (err error) {
		clusterTime, err = mongodb.ClusterTime(ctx, r.Client)
		return err
	})
	return clusterTime, err
}

// compareSources orders sources by the stamp of their next envelope, and equal stamps by name, so that
// a repeated sweep has the same order.
func compareSources(a, b *source) int {
	return cmp.Or(a.ts.Compare(b.ts), bytes.Compare(a.db, b.db), bytes.Compare(a.name, b.name))
}
