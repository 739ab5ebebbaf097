package memory

import (
	"cmp"
	"context"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/service/appending"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// outboxStore is the store of an outbox.Box in a DB. Stores with the same name share their events.
type outboxStore struct {
	db   *DB
	rows *storedTable
	feed *feed
}

var _ appending.Store = (*outboxStore)(nil)

// NewOutbox returns an outbox in db, with the options of package outbox. The error joins the problems of the options.
func NewOutbox(db *DB, opts ...outbox.Option) (*outbox.Box, error) {
	open := func(collection string) appending.Store {
		rows := db.findOrAddTable(collection)
		return &outboxStore{db: db, rows: rows, feed: findOrAddFeed(db, rows)}
	}
	return outbox.NewOver(open, opts...)
}

// storeOf returns the store of a box of NewOutbox, or nil.
func storeOf(box *outbox.Box) *outboxStore {
	if box == nil {
		return nil
	}
	store, _ := box.Parts(module.Key{}).Store.(*outboxStore)
	return store
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

// Name returns the name of the collection.
func (s *outboxStore) Name() string { return s.rows.name }

// Transaction runs fn in a transaction of the DB, whose reads always see one snapshot.
func (s *outboxStore) Transaction(ctx context.Context, _ bool, fn func(ctx context.Context) error) error {
	return s.db.Transaction(ctx, fn)
}

// Insert stores the envelopes. The error of an existing id is a duplicate key.
func (s *outboxStore) Insert(ctx context.Context, envelopes []appending.Envelope) error {
	insert := func(list ...appending.Envelope) error {
		return s.db.runOperation(ctx, func(tx *tx) error { return s.insertEnvelopes(tx, list) })
	}
	if s.db.InTransaction(ctx) {
		return insert(envelopes...)
	}

	// On a server without a transaction, the events before an error stay stored.
	for _, e := range envelopes {
		if err := insert(e); err != nil {
			return err
		}
	}
	return nil
}

func (s *outboxStore) insertEnvelopes(tx *tx, list []appending.Envelope) error {
	for _, x := range list {
		entry, err := parseEnvelope(x.Doc, x.ID)
		if err != nil {
			return err
		}

		if err := s.db.injectedError(Op{Kind: "append", Name: entry.fields.typ}); err != nil {
			return err
		}
		entry.seq = s.feed.nextSequence()
		if err := tx.insertRow(s.rows, mustKey(entry.id), entry); err != nil {
			return err
		}
	}
	return nil
}

// parseEnvelope returns the envelope for a document.
func parseEnvelope(doc bson.Raw, id event.ID) (*outboxEntry, error) {
	var view envelope.View
	if err := envelope.Parse(doc, &view); err != nil {
		return nil, err
	}

	entry := &outboxEntry{
		doc: doc,
		id:  id,
		fields: scheduledFields{
			aggregateType: string(view.AggregateType),
			aggregateID:   string(view.AggregateID),
			typ:           string(view.Type),
		},
	}
	if view.HasDueAt {
		entry.fields.dueAt = time.UnixMilli(view.DueAt).UTC()
	}
	if view.HasExpiresAt {
		entry.fields.expiresAt = time.UnixMilli(view.ExpiresAt).UTC()
	}

	return entry, nil
}

// Stored returns the envelopes in the order of their inserts, without a timestamp in ts. Delivered envelopes stay, as on
// a server within the retention. A scheduled envelope is removed when a relay claims it.
func (s *outboxStore) Stored(ctx context.Context) (docs []bson.Raw, err error) {
	list, err := readSnapshot(ctx, s.db, func(tx *tx) (list []*outboxEntry) {
		for _, e := range rowsOf[*outboxEntry](tx, s.rows) {
			if !e.claimed {
				list = append(list, e)
			}
		}
		return list
	})

	slices.SortFunc(list, func(a, b *outboxEntry) int { return cmp.Compare(a.seq, b.seq) })
	for _, e := range list {
		docs = append(docs, e.doc)
	}
	return docs, err
}
