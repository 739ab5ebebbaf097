package reconcile

import (
	"cmp"
	"container/heap"
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/store"
)

// MinMargin is the least that a sweep begins before the stretch: a stamp is taken when a transaction inserts, the stream's
// order is that of commits, and a transaction may last for a minute unless the server is told otherwise.
const MinMargin = store.MinMargin

const (
	markEvery     = 256      // envelopes between two calls of Reached
	leastReply    = 16 << 10 // bytes that a reply may have, however many collections there are
	defaultMemory = 8 << 20
)

// Envelope is an undelivered document of an outbox, as it was inserted or as an update left it. Its slices are valid
// during the call that they are given to.
type Envelope struct {
	DB, Coll    []byte
	TS          bson.Timestamp // the server's stamp; zero if there is none
	Raw         bson.Raw
	Redelivered bool // it is sent a second time on purpose, and its records say so
}

// Publisher takes what a sweep finds.
type Publisher interface {
	// Deliver hands one envelope on, in the order of the calls. It may block. Its error ends the sweep.
	Deliver(ctx context.Context, e *Envelope) error
	// Reached says that every envelope with a stamp up to cursor, and every one without a stamp, was delivered.
	Reached(ctx context.Context, cursor bson.Timestamp) error
	// Trouble hears of a read that failed and is tried again.
	Trouble(err error)
}

// Sweep is one pass over a stretch whose change stream is lost. All fields but Cursor, Margin and Memory are needed.
type Sweep struct {
	Client      *mongo.Client
	Collections []store.Outbox
	// From is a cluster time up to which everything committed was delivered; zero means that nothing is known, and all
	// envelopes are swept. To is the time at which the stream goes on: later stamps are its to bring.
	From, To bson.Timestamp
	// ReadUpTo has, by name, the collections that were read up to another time than From, exactly: those that were renamed
	// into what is watched since From, and zero for one that nobody has read.
	ReadUpTo map[string]bson.Timestamp
	// Cursor is where an earlier pass over the same stretch broke off: up to it everything is delivered, and everything
	// without a stamp, too. Zero: there was none.
	Cursor bson.Timestamp
	// Margin is how long before From stamps may be of envelopes that were committed after it. Defaults to MinMargin.
	Margin time.Duration
	// Memory bounds the replies that are held at a time. Defaults to 8 MiB.
	Memory int64
	// Skip gets the ids that the stream may bring once more, and keeps out those that it has already from an earlier pass.
	Skip      *Skip
	Publisher Publisher

	reply time.Duration // how long to wait for a reply at first; defaults to replyTimeout
}

// Result counts what became of the envelopes that were found.
type Result struct {
	Swept   int64 // handed on
	Skipped int64 // known from an earlier pass
}

// ErrMoved says that a collection was renamed or dropped while it was swept, so that the rest of it was not read under its
// name. Another pass over the collections that are there then finds the rest.
var ErrMoved = errors.New("a collection was renamed or dropped while it was swept")

// Lower is the stamp behind which the sweep begins.
func (s *Sweep) Lower() bson.Timestamp {
	low := s.To
	for _, c := range s.Collections {
		if at := s.lower(c); at.Before(low) {
			low = at
		}
	}
	return low
}

// lower is the stamp behind which the sweep of one collection begins.
func (s *Sweep) lower(c store.Outbox) bson.Timestamp {
	low, known := s.ReadUpTo[c.NS()]
	if !known {
		low = before(s.From, cmp.Or(s.Margin, MinMargin))
	}
	if s.Cursor.After(low) {
		return s.Cursor
	}
	return low
}

// Count is how many envelopes a sweep that begins now would find in a collection, at this moment.
func (s *Sweep) Count(ctx context.Context, c store.Outbox) (int64, error) {
	coll := store.Majority(s.Client.Database(c.DB).Collection(c.Coll))
	total := int64(0)
	for _, filter := range []bson.D{unstamped(), stamped(s.lower(c), lastStamp)} {
		n, err := coll.CountDocuments(ctx, c.Part.And(filter))
		if err != nil {
			return 0, fmt.Errorf("counting envelopes of %s: %w", c.NS(), err)
		}
		total += n
	}
	return total, nil
}

// Run sweeps until the end of the stretch and returns nil, or until ctx ends or the publisher refuses; then it returns the
// cause of the one or the error of the other. It may be called once.
func (s *Sweep) Run(ctx context.Context) (Result, error) {
	r := &pass{Sweep: s}
	if s.Margin == 0 {
		s.Margin = MinMargin
	}
	if s.Memory == 0 {
		s.Memory = defaultMemory
	}
	s.Skip.to = s.To
	s.Skip.partial = s.Skip.partial || !s.Cursor.IsZero()
	err := r.run(ctx)
	if err == nil {
		err = s.Publisher.Reached(ctx, s.To)
	}
	if err == nil {
		s.Skip.until, err = r.now(ctx)
	}
	return r.Result, err
}

// pass is the state of one Run.
type pass struct {
	*Sweep
	Result
	heap merge
	done bson.Timestamp // everything up to here was handed on
	n    int
}

func (r *pass) run(ctx context.Context) error {
	defer func() {
		for _, s := range r.heap {
			s.close(ctx)
		}
	}()
	if r.Cursor.IsZero() {
		for _, c := range r.Collections {
			if err := r.unstamped(ctx, c); err != nil {
				return err
			}
		}
	}
	for _, c := range r.Collections {
		s := r.source(c)
		s.last = r.lower(c)
		if err := r.push(ctx, s); err != nil {
			return err
		}
	}
	r.done = r.Lower()
	for len(r.heap) > 0 {
		s := r.heap[0]
		if err := r.passed(ctx, s.ts); err != nil {
			return err
		}
		// A stamp below this one is that of no open transaction at the end of the stretch.
		keep := s.ts.After(before(r.To, r.Margin))
		if err := r.deliver(ctx, s, keep); err != nil {
			return err
		}
		more, err := r.next(ctx, s)
		switch {
		case err != nil:
			return err
		case more:
			heap.Fix(&r.heap, 0)
		default:
			heap.Pop(&r.heap)
		}
	}
	return nil
}

// passed tells the publisher from time to time how far the sweep came: between two stamps, never among equal ones.
func (r *pass) passed(ctx context.Context, ts bson.Timestamp) error {
	if r.n++; r.n < markEvery || ts == r.done {
		r.done = ts
		return nil
	}
	r.n = 0
	reached := r.done
	r.done = ts
	return r.Publisher.Reached(ctx, reached)
}

func (r *pass) source(c store.Outbox) *source {
	return &source{
		of: c, coll: r.Client.Database(c.DB).Collection(c.Coll), db: []byte(c.DB), name: []byte(c.Coll), part: c.Part, to: r.To,
		at: map[string]struct{}{}, target: max(int(r.Memory)/max(len(r.Collections), 1), leastReply), wait: cmp.Or(r.reply, replyTimeout),
	}
}

// unstamped sweeps what only its presence tells of, in the order of insertion.
func (r *pass) unstamped(ctx context.Context, c store.Outbox) error {
	s := r.source(c)
	s.unstamped = true
	defer s.close(ctx)
	for {
		more, err := r.next(ctx, s)
		if err != nil || !more {
			return err
		}
		if err := r.deliver(ctx, s, true); err != nil {
			return err
		}
	}
}

func (r *pass) push(ctx context.Context, s *source) error {
	more, err := r.next(ctx, s)
	if more {
		heap.Push(&r.heap, s)
	}
	return err
}

// next waits out the faults of the server: what is lost in the stream is nowhere else.
func (r *pass) next(ctx context.Context, s *source) (more bool, err error) {
	read := func(ctx context.Context) (err error) {
		more, err = s.next(ctx)
		return err
	}
	if err = r.waitOut(ctx, read(ctx), read); err != nil || more {
		return more, err
	}
	// A collection that loses its name looks as if it ended.
	holder := s.of.UUID
	look := func(ctx context.Context) (err error) {
		holder, err = s.of.NameHolder(ctx, r.Client)
		return err
	}
	if err = r.waitOut(ctx, look(ctx), look); err == nil && holder != s.of.UUID {
		err = fmt.Errorf("%s: %w", s.of.NS(), ErrMoved)
	}
	return false, err
}

func (r *pass) waitOut(ctx context.Context, err error, op func(context.Context) error) error {
	back := retry.Reopen.Start()
	for err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		r.Publisher.Trouble(err)
		if back.Wait(ctx) != nil {
			return context.Cause(ctx)
		}
		err = op(ctx)
	}
	return nil
}

func (r *pass) deliver(ctx context.Context, s *source, keep bool) error {
	if keep && r.Skip.has(s.db, s.name, byte(s.id.Type), s.id.Value) {
		r.Skipped++
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	crash.At("mid-sweep")
	e := Envelope{DB: s.db, Coll: s.name, TS: s.ts, Raw: s.cur.Current}
	if err := r.Publisher.Deliver(ctx, &e); err != nil {
		return err
	}
	r.Swept++
	if keep {
		r.Skip.add(s.db, s.name, byte(s.id.Type), s.id.Value)
	}
	return nil
}

// now is the cluster's time after the last read: what is committed later was not seen.
func (r *pass) now(ctx context.Context) (at bson.Timestamp, err error) {
	ask := func(ctx context.Context) (err error) {
		at, err = store.ClusterTime(ctx, r.Client)
		return err
	}
	err = r.waitOut(ctx, ask(ctx), ask)
	return at, err
}

// merge orders sources by the stamp of their next envelope; equal stamps, by name, so that a repetition is the same.
type merge []*source

func (m merge) Len() int { return len(m) }
func (m merge) Less(i, j int) bool {
	if c := m[i].ts.Compare(m[j].ts); c != 0 {
		return c < 0
	}
	if a, b := string(m[i].db), string(m[j].db); a != b {
		return a < b
	}
	return string(m[i].name) < string(m[j].name)
}
func (m merge) Swap(i, j int) { m[i], m[j] = m[j], m[i] }
func (m *merge) Push(x any)   { *m = append(*m, x.(*source)) }
func (m *merge) Pop() any {
	old := *m
	s := old[len(old)-1]
	old[len(old)-1] = nil
	*m = old[:len(old)-1]
	return s
}
