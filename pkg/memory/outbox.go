package memory

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.opentelemetry.io/otel/propagation"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/tracecontext"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Outbox is an outbox in a DB. Its methods are those of *outbox.Box and return the same errors. So
// a service that uses them through an interface works with both. It is safe for concurrent use.
type Outbox struct {
	db         *DB
	rows       *storedTable
	collection string
	maxSize    int
	plain      bool // events may be appended without a transaction
	propagator propagation.TextMapPropagator
	feed       *feed
}

// OutboxOption configures an Outbox. See NewOutbox.
type OutboxOption func(*Outbox)

// WithCollection sets the name of the outbox. Defaults to outbox.DefaultCollection. Outboxes with
// the same name share their events.
func WithCollection(name string) OutboxOption { return func(b *Outbox) { b.collection = name } }

// WithMaxSize sets the size limit of an envelope in bytes. Defaults to outbox.DefaultMaxSize. The
// limit must be between 1 and outbox.MaxSize.
func WithMaxSize(bytes int) OutboxOption { return func(b *Outbox) { b.maxSize = bytes } }

// WithoutTransaction allows Append in a context without a transaction.
func WithoutTransaction() OutboxOption { return func(b *Outbox) { b.plain = true } }

// WithPropagator sets the propagator that copies the trace context of the caller into the headers
// of the event. If p is nil, no trace context is copied. Defaults to W3C trace context and baggage.
func WithPropagator(p propagation.TextMapPropagator) OutboxOption {
	return func(b *Outbox) { b.propagator = p }
}

// NewOutbox returns an outbox in db. The error reports a nil database or an invalid option.
func NewOutbox(db *DB, opts ...OutboxOption) (*Outbox, error) {
	if db == nil {
		return nil, errors.New("outbox: the database is nil")
	}

	b := &Outbox{
		db:         db,
		collection: outbox.DefaultCollection,
		maxSize:    outbox.DefaultMaxSize,
		propagator: propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{}),
	}
	for _, o := range opts {
		o(b)
	}

	name := b.collection
	switch {
	case name == "" || strings.ContainsAny(name, "$\x00") || strings.HasPrefix(name, "system."):
		return nil, fmt.Errorf("outbox: invalid collection name %q", name)
	case b.maxSize < 1 || b.maxSize > outbox.MaxSize:
		return nil, fmt.Errorf("outbox: invalid maximum size of %d bytes: it must be between 1 and %d", b.maxSize, outbox.MaxSize)
	}

	b.rows = db.findOrAddTable(b.collection)

	// Outboxes of one name share their events.
	b.feed = findOrAddFeed(db, b.rows)
	return b, nil
}

// outboxEntry is a stored envelope. It is never changed: a change stores a new one.
type outboxEntry struct {
	doc     bson.Raw // the document as on a server, but without a timestamp in ts
	id      event.ID
	seq     uint64 // order of the inserts
	fields  scheduledFields
	claimed bool // a relay is sending it
}

// scheduledFields contains the fields that queries for scheduled events use.
type scheduledFields struct {
	aggregateType, aggregateID, typ string
	dueAt, expiresAt                time.Time // zero if there is none
}

// Append stores the events in the transaction of ctx, in the given order. It stores all of them or
// none. See outbox.Box.Append.
func (b *Outbox) Append(ctx context.Context, events ...event.Event) error {
	if err := b.appendEvents(ctx, events); err != nil {
		return fmt.Errorf("appending to %s: %w", b.collection, err)
	}
	return nil
}

// appendEvents checks the call and stores the events.
func (b *Outbox) appendEvents(ctx context.Context, events []event.Event) error {
	if len(events) == 0 {
		return nil
	}

	u := b.db.unitFromContext(ctx)
	if u == nil && !b.plain {
		return outbox.ErrNoTransaction
	}
	if err := u.state().Check(); err != nil {
		return err
	}

	list, err := b.encodeEvents(ctx, events)
	if err != nil {
		return err
	}
	if u != nil {
		return b.db.runOperation(ctx, func(t *tx) error { return b.insertEnvelopes(t, list) })
	}

	// On a server without a transaction, the events before an error stay stored.
	for _, e := range list {
		if err := b.db.runOperation(ctx, func(t *tx) error { return b.insertEnvelopes(t, []*outboxEntry{e}) }); err != nil {
			return err
		}
	}

	return nil
}

// insertEnvelopes inserts the envelopes. The error of an existing id is a duplicate key.
func (b *Outbox) insertEnvelopes(t *tx, list []*outboxEntry) error {
	for _, e := range list {
		key, err := encodeKey(e.id)
		if err != nil {
			return err
		}
		if err := t.insertRow(b.rows, key, e); err != nil {
			return err
		}
	}

	return nil
}

// encodeEvents returns the envelopes of the events. The error joins the errors of all events that
// cannot be stored.
func (b *Outbox) encodeEvents(ctx context.Context, events []event.Event) ([]*outboxEntry, error) {
	trace := tracecontext.Headers(ctx, b.propagator)
	list := make([]*outboxEntry, 0, len(events))
	var errs []error

	for _, ev := range events {
		ev = tracecontext.Add(ev, trace)
		doc, err := ev.MarshalBSON()
		if err == nil && len(doc) > b.maxSize {
			err = &outbox.TooLargeError{ID: ev.ID(), Size: len(doc), Limit: b.maxSize}
		}

		var e *outboxEntry
		if err == nil {
			e, err = parseEnvelope(doc, ev.ID())
		}

		if err != nil {
			errs = append(errs, err)
			continue
		}

		e.seq = b.feed.nextSequence()
		list = append(list, e)
	}

	return list, errors.Join(errs...)
}

// parseEnvelope returns the envelope for a document.
func parseEnvelope(doc bson.Raw, id event.ID) (*outboxEntry, error) {
	var v envelope.View
	if err := envelope.Parse(doc, &v); err != nil {
		return nil, err
	}

	e := &outboxEntry{
		doc: doc,
		id:  id,
		fields: scheduledFields{
			aggregateType: string(v.AggregateType),
			aggregateID:   string(v.AggregateID),
			typ:           string(v.Type),
		},
	}
	if v.HasDueAt {
		e.fields.dueAt = time.UnixMilli(v.DueAt).UTC()
	}
	if v.HasExpiresAt {
		e.fields.expiresAt = time.UnixMilli(v.ExpiresAt).UTC()
	}

	return e, nil
}

// Envelopes returns the committed envelopes as they are stored, in the order of their appends and
// without a timestamp in ts. Delivered envelopes stay, as on a server within the retention.
// Scheduled envelopes are removed when they are delivered.
func (b *Outbox) Envelopes() []bson.Raw {
	var list []*outboxEntry
	// This cannot fail: a read has no conflicts.
	_ = b.db.runOperation(context.Background(), func(t *tx) error {
		list = list[:0]
		t.scanRows(b.rows, func(_ string, v any) { list = append(list, v.(*outboxEntry)) })
		return nil
	})

	sortBySeq(list)
	out := make([]bson.Raw, len(list))
	for i, e := range list {
		out[i] = e.doc
	}

	return out
}
