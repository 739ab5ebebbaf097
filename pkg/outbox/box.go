package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"
	"go.opentelemetry.io/otel/propagation"

	"github.com/outrelay/outrelay/internal/tracecontext"
	"github.com/outrelay/outrelay/pkg/event"
)

// Box is a service's outbox: one collection of one database. It is safe for concurrent use.
type Box struct {
	settings
	coll *mongo.Collection
	warn sync.Once
}

// New makes a Box over db, which is the service's own handle: the events go through the same client as the business
// writes. It does no I/O; the collection need not exist. What a transaction does not cover is written by majority
// whatever the client says.
func New(db *mongo.Database, opts ...Option) (*Box, error) {
	if db == nil {
		return nil, errors.New("outbox: the database is nil")
	}
	s := settings{
		collection: DefaultCollection,
		maxSize:    DefaultMaxSize,
		log:        slog.Default(),
		propagator: propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{}),
	}
	for _, o := range opts {
		o(&s)
	}
	if err := s.validate(); err != nil {
		return nil, err
	}
	return &Box{settings: s, coll: db.Collection(s.collection, options.Collection().
		SetWriteConcern(writeconcern.Majority()).
		SetReadConcern(readconcern.Majority()).
		SetReadPreference(readpref.Primary()))}, nil
}

// Append writes the events in the transaction of ctx, in their order, or none of them. It is AppendMany for a few.
func (b *Box) Append(ctx context.Context, events ...event.Event) error {
	return b.AppendMany(ctx, events)
}

// AppendMany writes the events in the transaction of ctx, or of WithSession, in their order, with one insert command for
// each 100,000 events or 48 MB.
//
// Before anything is sent it returns ErrNoTransaction without a running transaction, and for bad events an error that
// joins one *event.InvalidError or *TooLargeError for each of them. An id that the collection has already is an error for
// which mongo.IsDuplicateKeyError is true. After an error of the server the transaction cannot commit: return the error
// from the callback, as the driver needs it to decide on a retry.
func (b *Box) AppendMany(ctx context.Context, events []event.Event, opts ...CallOption) error {
	ctx = call(ctx, opts)
	if len(events) == 0 {
		return nil
	}
	if err := b.requireTransaction(ctx); err != nil {
		return fmt.Errorf("appending to %s: %w", b.collection, err)
	}
	docs, err := b.encode(ctx, events)
	if err != nil {
		return fmt.Errorf("appending to %s: %w", b.collection, err)
	}
	if _, err := b.coll.InsertMany(ctx, docs); err != nil {
		unitOf(ctx).doom(err)
		return fmt.Errorf("appending to %s: %w", b.collection, err)
	}
	return nil
}

// encode makes the documents, or says what is wrong with each event that cannot be one.
func (b *Box) encode(ctx context.Context, events []event.Event) ([]any, error) {
	trace := tracecontext.Headers(ctx, b.propagator)
	docs := make([]any, 0, len(events))
	var errs []error
	for _, ev := range events {
		doc, err := tracecontext.Add(ev, trace).MarshalBSON()
		if err == nil && len(doc) > b.maxSize {
			err = &TooLargeError{ID: ev.ID(), Size: len(doc), Limit: b.maxSize}
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		docs = append(docs, bson.Raw(doc))
	}
	return docs, errors.Join(errs...)
}

// call puts an explicit session where the driver looks for it.
func call(ctx context.Context, opts []CallOption) context.Context {
	var s callSettings
	for _, o := range opts {
		o.call(&s)
	}
	if s.session == nil {
		return ctx
	}
	return mongo.NewSessionContext(ctx, s.session)
}

// requireTransaction refuses a context outside of a transaction, or inside of one that cannot commit any more.
func (b *Box) requireTransaction(ctx context.Context) error {
	u := unitOf(ctx)
	if err := u.err(); err != nil {
		return err
	}
	sess := mongo.SessionFromContext(ctx)
	switch running := sess != nil && sess.TransactionRunning(); {
	case running && u == nil:
		b.warnWeak(ctx, sess)
	case !running && u != nil:
		return ErrTransactionEnded // by the callback itself
	case !running && !b.plain:
		return ErrNoTransaction
	}
	return nil
}

// warnWeak says once that transactions of the service commit with less than a majority: such a commit can be rolled back
// after it was acknowledged, and on a replica set of one it is seen by the relay up to 100 ms late.
func (b *Box) warnWeak(ctx context.Context, sess *mongo.Session) {
	w, ok := commitConcern(sess)
	if !ok || w == writeconcern.WCMajority {
		return
	}
	b.warn.Do(func() {
		b.log.WarnContext(ctx, "outbox transactions commit with a write concern below majority: an acknowledged event can be rolled back, and is delivered late on a single-member set; use outbox.Transaction, or set w=majority in the URI or the transaction's options",
			"collection", b.coll.Database().Name()+"."+b.collection, "w", w)
	})
}
