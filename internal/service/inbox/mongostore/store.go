// Package mongostore stores the state of an inbox in several collections of one MongoDB database.
//
// Blocking: each method makes its calls to MongoDB in the transaction of its context, if there is one, and does not
// repeat them. Cost: a batch of messages needs as many statements as one message.
package mongostore

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/transaction"
	"github.com/outrelay/outrelay/internal/service/inbox"
)

// Store is an inbox.Store in MongoDB. It is safe for concurrent use.
type Store struct {
	client    *mongo.Client
	markers   *mongo.Collection
	offsets   *mongo.Collection // watermarks
	claims    *mongo.Collection // leases of claims
	tenures   *mongo.Collection
	retention time.Duration
	noTTL     bool

	mu       sync.Mutex
	tenure   *tenure             // nil without a partition
	previous map[string]struct{} // tenures of previous owners that were alive when this process took a partition
}

var _ inbox.Store = (*Store)(nil)

// Open returns an Inbox in the database db. Its client must be the one that runs the transactions of
// the handlers. Open does no I/O. The error joins the problems of all settings.
func Open(db *mongo.Database, settings inbox.Settings) (*inbox.Inbox, error) {
	return inbox.New(settings, func(settings inbox.Settings) (inbox.Store, error) {
		if db == nil {
			return nil, fmt.Errorf("inbox: %w: the database is nil", inbox.ErrInvalid)
		}
		return New(db, settings), nil
	})
}

// New returns the Store of an inbox in db, for complete settings. Outside of transactions it writes
// with majority write concern, even if the client is configured otherwise.
func New(db *mongo.Database, settings inbox.Settings) *Store {
	open := func(suffix string) *mongo.Collection {
		return mongodb.Majority(db.Collection(settings.Collection + suffix))
	}
	return &Store{
		client:    db.Client(),
		markers:   open(""),
		offsets:   open(inbox.OffsetsSuffix),
		claims:    open(inbox.ClaimsSuffix),
		tenures:   open(inbox.TenuresSuffix),
		retention: settings.Retention,
		noTTL:     settings.WithoutTTL,
		previous:  make(map[string]struct{}),
	}
}

// Transaction runs fn in the transaction of ctx, or in a new one: see outbox.Box.Transaction.
func (s *Store) Transaction(ctx context.Context, fn func(ctx context.Context) error) error {
	return transaction.Run(ctx, s.client, fn)
}

// CurrentTransaction returns the session of ctx if it has a running transaction.
func (s *Store) CurrentTransaction(ctx context.Context) any {
	sess := mongo.SessionFromContext(ctx)
	if sess == nil || !sess.TransactionRunning() {
		return nil
	}
	return sess
}

// Outside returns ctx without its session.
func (s *Store) Outside(ctx context.Context) context.Context {
	return mongo.NewSessionContext(ctx, nil)
}

// Now returns the time of this process.
func (s *Store) Now() time.Time { return time.Now() }

// Wait blocks for duration.
func (s *Store) Wait(ctx context.Context, duration time.Duration) error {
	return retry.Sleep(ctx, duration)
}

// serverTime returns the server's time of the last response in the transaction, with a precision of
// one second. On an idle replica set it may be ten seconds slow, because the set writes its own
// time in this interval.
func serverTime(ctx context.Context) (time.Time, error) {
	ts := mongo.SessionFromContext(ctx).OperationTime()
	if ts == nil {
		return time.Time{}, errors.New("the server's responses have no operation time; transactions need a replica set")
	}

	return time.Unix(int64(ts.T), 0), nil
}

// replaceIf returns an update that replaces the document if the condition holds.
func replaceIf(cond, replacement bson.D) bson.A {
	return bson.A{bson.D{{Key: "$replaceWith", Value: bson.D{{Key: "$cond", Value: bson.A{cond, replacement, "$$ROOT"}}}}}}
}

// upsertOptions returns options for an upsert that returns the new document.
func upsertOptions() *options.FindOneAndUpdateOptionsBuilder {
	return options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.After)
}
