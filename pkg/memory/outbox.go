package memory

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/appending"
	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Outbox is an outbox in a DB. Its methods are those of *outbox.Box and return the same errors. So
// a service that uses them through an interface works with both. It is safe for concurrent use.
type Outbox struct {
	db       *DB
	rows     *storedTable
	settings appending.Settings
	plain    bool // events may be appended without a transaction
	feed     *feed
}

// OutboxOption configures an Outbox. See NewOutbox.
type OutboxOption func(*Outbox)

// WithCollection sets the name of the outbox. Defaults to "outbox". Outboxes with the same name
// share their events.
func WithCollection(name string) OutboxOption {
	return func(b *Outbox) { b.settings.Collection = name }
}

// WithMaxSize sets the size limit of an envelope in bytes. See outbox.WithMaxSize.
func WithMaxSize(bytes int) OutboxOption { return func(b *Outbox) { b.settings.MaxSize = bytes } }

// WithoutTransaction allows Append in a context without a transaction.
func WithoutTransaction() OutboxOption { return func(b *Outbox) { b.plain = true } }

// WithMiddleware adds middleware. See outbox.WithMiddleware.
func WithMiddleware(ms ...outbox.Middleware) OutboxOption {
	return func(b *Outbox) {
		for _, m := range ms {
			b.settings.Middleware = append(b.settings.Middleware, appending.AsMiddleware(m))
		}
	}
}

// NewOutbox returns an outbox in db. The error reports a nil database, or joins the problems of the
// options.
func NewOutbox(db *DB, opts ...OutboxOption) (*Outbox, error) {
	if db == nil {
		return nil, errors.New("outbox: the database is nil")
	}

	b := &Outbox{db: db}
	for _, o := range opts {
		o(b)
	}
	if err := b.settings.Complete(); err != nil {
		return nil, fmt.Errorf("outbox: %w", err)
	}

	// Outboxes of one name share their events.
	b.rows = db.findOrAddTable(b.settings.Collection)
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
	_, err := b.appendEvents(ctx, events)
	if err != nil {
		return fmt.Errorf("appending to %s: %w", b.settings.Collection, err)
	}
	return nil
}

// appendEvents checks the call, stores the events, and returns the envelopes.
func (b *Outbox) appendEvents(ctx context.Context, events []event.Event) ([]*outboxEntry, error) {
	if len(events) == 0 {
		return nil, nil
	}

	u := b.db.unitFromContext(ctx)
	if u == nil && !b.plain {
		return nil, outbox.ErrNoTransaction
	}
	if err := u.state().Check(); err != nil {
		return nil, err
	}

	list, err := b.encodeEvents(ctx, events)
	if err != nil {
		return nil, err
	}
	if u != nil {
		return list, b.db.runOperation(ctx, func(t *tx) error { return b.insertEnvelopes(t, list) })
	}

	// On a server without a transaction, the events before an error stay stored.
	for _, e := range list {
		if err := b.db.runOperation(ctx, func(t *tx) error { return b.insertEnvelopes(t, []*outboxEntry{e}) }); err != nil {
			return nil, err
		}
	}

	return list, nil
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

// encodeEvents returns the envelopes of the events that the middleware passes on.
func (b *Outbox) encodeEvents(ctx context.Context, events []event.Event) ([]*outboxEntry, error) {
	encoded, err := b.settings.Encode(ctx, events)
	if err != nil {
		return nil, err
	}

	list := make([]*outboxEntry, len(encoded))
	for i, x := range encoded {
		if list[i], err = parseEnvelope(x.Doc, x.ID); err != nil {
			return nil, err
		}
		list[i].seq = b.feed.nextSequence()
	}

	return list, nil
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
