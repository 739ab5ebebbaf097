package memory

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.opentelemetry.io/otel/propagation"

	"github.com/outrelay/outrelay/internal/tracecontext"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Outbox is an outbox in a DB. Its methods are those of *outbox.Box and answer the same errors, so a service that has
// them behind an interface of its own takes either. It is safe for concurrent use.
type Outbox struct {
	db         *DB
	rows       *rows
	collection string
	maxSize    int
	plain      bool
	propagator propagation.TextMapPropagator
	feed       *feed
}

// OutboxOption configures an Outbox.
type OutboxOption func(*Outbox)

// WithCollection names the outbox. Defaults to outbox.DefaultCollection; two of one name share their events.
func WithCollection(name string) OutboxOption { return func(b *Outbox) { b.collection = name } }

// WithMaxSize sets the largest envelope in bytes. Defaults to outbox.DefaultMaxSize; at most outbox.MaxSize.
func WithMaxSize(bytes int) OutboxOption { return func(b *Outbox) { b.maxSize = bytes } }

// WithoutTransaction lets Append write also where the context has no transaction.
func WithoutTransaction() OutboxOption { return func(b *Outbox) { b.plain = true } }

// WithPropagator sets what captures the trace context of the caller; nil captures nothing. Defaults to W3C trace context
// and baggage.
func WithPropagator(p propagation.TextMapPropagator) OutboxOption {
	return func(b *Outbox) { b.propagator = p }
}

// NewOutbox makes an outbox in db.
func NewOutbox(db *DB, opts ...OutboxOption) (*Outbox, error) {
	if db == nil {
		return nil, errors.New("outbox: the database is nil")
	}
	b := &Outbox{
		db: db, collection: outbox.DefaultCollection, maxSize: outbox.DefaultMaxSize,
		propagator: propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{}),
	}
	for _, o := range opts {
		o(b)
	}
	switch name := b.collection; {
	case name == "" || strings.ContainsAny(name, "$\x00") || strings.HasPrefix(name, "system."):
		return nil, fmt.Errorf("outbox: %q is not a legal collection name", name)
	case b.maxSize < 1 || b.maxSize > outbox.MaxSize:
		return nil, fmt.Errorf("outbox: a maximum size of %d bytes; 1 to %d is allowed", b.maxSize, outbox.MaxSize)
	}
	b.rows = db.table(b.collection)
	b.feed = feedOf(db, b.rows)
	return b, nil
}

// envelope is a stored one.
type envelope struct {
	doc   bson.Raw // as a server would have it, but for ts
	id    event.ID
	seq   uint64 // order of the inserts
	ev    scheduledFields
	claim bool // it is on its way
}

// scheduledFields are what queries ask for.
type scheduledFields struct {
	aggregateType, aggregateID, typ string
	dueAt, expiresAt                time.Time // zero if there is none
}

// Append writes the events in the transaction of ctx, in their order, or none of them.
func (b *Outbox) Append(ctx context.Context, events ...event.Event) error {
	return b.AppendMany(ctx, events)
}

// AppendMany is Append. There are no sessions here, so an option that names one is refused.
func (b *Outbox) AppendMany(ctx context.Context, events []event.Event, opts ...outbox.CallOption) error {
	if err := b.append(ctx, events, opts); err != nil {
		return fmt.Errorf("appending to %s: %w", b.collection, err)
	}
	return nil
}

func (b *Outbox) append(ctx context.Context, events []event.Event, opts []outbox.CallOption) error {
	if err := noSession(opts); err != nil || len(events) == 0 {
		return err
	}
	u := b.db.unitOf(ctx)
	if u == nil && !b.plain {
		return outbox.ErrNoTransaction
	}
	if err := u.err(); err != nil {
		return err
	}
	list, err := b.encode(ctx, events)
	if err != nil {
		return err
	}
	if u != nil {
		return b.db.do(ctx, func(t *tx) error { return b.insert(t, list) })
	}
	for _, e := range list { // as without a transaction on a server: of several, those before an error stay
		if err := b.db.do(ctx, func(t *tx) error { return b.insert(t, []*envelope{e}) }); err != nil {
			return err
		}
	}
	return nil
}

func (b *Outbox) insert(t *tx, list []*envelope) error {
	for _, e := range list {
		key, err := encodeKey(e.id)
		if err != nil {
			return err
		}
		if err := t.insert(b.rows, key, e); err != nil {
			return err
		}
	}
	return nil
}

// encode makes the envelopes, or says what is wrong with each event that cannot be one.
func (b *Outbox) encode(ctx context.Context, events []event.Event) ([]*envelope, error) {
	trace := tracecontext.Headers(ctx, b.propagator)
	list := make([]*envelope, 0, len(events))
	var errs []error
	for _, ev := range events {
		ev = tracecontext.Add(ev, trace)
		doc, err := ev.MarshalBSON()
		if err == nil && len(doc) > b.maxSize {
			err = &outbox.TooLargeError{ID: ev.ID(), Size: len(doc), Limit: b.maxSize}
		}
		var e *envelope
		if err == nil {
			e, err = parseEnvelope(doc, ev.ID())
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		e.seq = b.feed.next()
		list = append(list, e)
	}
	return list, errors.Join(errs...)
}

func parseEnvelope(doc bson.Raw, id event.ID) (*envelope, error) {
	var v event.View
	if err := event.Parse(doc, &v); err != nil {
		return nil, err
	}
	e := &envelope{doc: doc, id: id, ev: scheduledFields{aggregateType: string(v.AggregateType), aggregateID: string(v.AggregateID), typ: string(v.Type)}}
	if v.HasDueAt {
		e.ev.dueAt = time.UnixMilli(v.DueAt).UTC()
	}
	if v.HasExpiresAt {
		e.ev.expiresAt = time.UnixMilli(v.ExpiresAt).UTC()
	}
	return e, nil
}

func noSession(opts []outbox.CallOption) error {
	for _, o := range opts {
		if o != outbox.CallOption(outbox.WithSession(nil)) {
			return errors.New("an in-memory outbox has no sessions; use the context of DB.Transaction")
		}
	}
	return nil
}

// Envelopes are the committed ones as they are stored, in the order of their appending; ts is not stamped. What was
// delivered stays, as on a server within its retention; scheduled ones go when they are delivered.
func (b *Outbox) Envelopes() []bson.Raw {
	var list []*envelope
	_ = b.db.do(context.Background(), func(t *tx) error { // a read that nothing stands in the way of
		list = list[:0]
		t.scan(b.rows, func(_ string, v any) { list = append(list, v.(*envelope)) })
		return nil
	})
	sortBySeq(list)
	out := make([]bson.Raw, len(list))
	for i, e := range list {
		out[i] = e.doc
	}
	return out
}
