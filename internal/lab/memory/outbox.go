package memory

import (
	"cmp"
	"context"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/service/appending"
	"github.com/outrelay/outrelay/internal/service/boxparts"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// outboxStore is the store of an outbox.Box in a DB. Stores with the same name share their events.
type outboxStore struct {
	db   *DB
	rows *storedTable
	feed *feed
}

var _ boxparts.Store = (*outboxStore)(nil)

// NewOutbox returns an outbox in db, with the options of package outbox. The error joins the problems of the options.
func NewOutbox(db *DB, opts ...outbox.Option) (*outbox.Box, error) {
	open := func(collection string) boxparts.Store {
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
	s, _ := box.Parts(boxparts.Key{}).Store.(*outboxStore)
	return s
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
		return s.db.runOperation(ctx, func(t *tx) error { return s.insertEnvelopes(t, list) })
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

func (s *outboxStore) insertEnvelopes(t *tx, list []appending.Envelope) error {
	for _, x := range list {
		e, err := parseEnvelope(x.Doc, x.ID)
		if err != nil {
			return err
		}

		if err := s.db.injectedError(Op{Kind: "append", Name: e.fields.typ}); err != nil {
			return err
		}
		e.seq = s.feed.nextSequence()
		if err := t.insertRow(s.rows, mustKey(e.id), e); err != nil {
			return err
		}
	}
	return nil
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

// Stored returns the envelopes in the order of their inserts, without a timestamp in ts. Delivered envelopes stay, as on
// a server within the retention. A scheduled envelope is removed when a relay claims it.
func (s *outboxStore) Stored(ctx context.Context) (docs []bson.Raw, err error) {
	list, err := readSnapshot(ctx, s.db, func(t *tx) (list []*outboxEntry) {
		for _, e := range rowsOf[*outboxEntry](t, s.rows) {
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
