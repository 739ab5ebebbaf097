package outbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/mongodb/concern"
	"github.com/outrelay/outrelay/internal/mongodb/transaction"
	"github.com/outrelay/outrelay/internal/service/appending"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

// Box is the outbox of a service: one collection of one database. It is safe for concurrent use and
// need not be closed.
type Box struct {
	settings
	store    appending.Store
	coll     *mongo.Collection // nil in memory
	warnOnce sync.Once

	serverSeen atomic.Bool // it was read whether the server is a standalone
}

// New returns a Box over db. Pass the database handle that the service uses for its business
// writes: a transaction covers both only if they use the same client.
//
// New does no I/O, and the collection need not exist. The Box writes with majority write concern
// where no transaction applies, even if db is configured otherwise. The error reports a nil
// database, or joins the problems of the options.
func New(db *mongo.Database, opts ...Option) (*Box, error) {
	if db == nil {
		return nil, errors.New("outbox: the database is nil")
	}

	settings, err := newSettings(opts)
	if err != nil {
		return nil, err
	}

	// Without majority, a failover could roll back an event that the service believes to be stored.
	majority := options.Collection().
		SetWriteConcern(concern.Majority()).
		SetReadConcern(readconcern.Majority()).
		SetReadPreference(readpref.Primary())
	coll := db.Collection(settings.events.Collection, majority)
	return &Box{settings: settings, store: mongoStore{coll}, coll: coll}, nil
}

// NewOver returns a Box over the store that open returns for the name of a collection. It is for packages of this module: others
// cannot name the type of the store.
func NewOver(open func(collection string) appending.Store, opts ...Option) (*Box, error) {
	settings, err := newSettings(opts)
	if err != nil {
		return nil, err
	}
	return &Box{settings: settings, store: open(settings.events.Collection)}, nil
}

// Parts returns the parts of the box that packages of this module need. Others cannot name its argument.
func (b *Box) Parts(module.Key) appending.Parts {
	return appending.Parts{Store: b.store, Collection: b.coll, Log: b.log}
}

// Append stores the events in the transaction of ctx, in the given order: the transaction commits all of
// them or none. It sends one insert command for every 100,000 events or 48 MB, and none if there are no
// events.
//
// Without a transaction (see WithoutTransaction), the server inserts the events one after the other. After
// an error of the server, the events before the failed one stay stored. After an error of the connection or
// the end of ctx, any first part of the events may be stored.
//
// Append checks the call before it sends anything. It returns:
//   - ErrNoTransaction if no transaction is running, unless the Box has WithoutTransaction.
//   - ErrTransactionEnded or ErrRollbackOnly if the transaction can no longer commit.
//   - One *event.InvalidError or ErrTooLarge for each bad event, joined into one error.
//
// If an id is in the collection already, mongo.IsDuplicateKeyError reports true for the error.
// After any error of the server the transaction cannot commit. Return that error from the callback:
// the driver needs it to decide about a retry.
func (b *Box) Append(ctx context.Context, events ...event.Event) error {
	_, err := b.appendEvents(ctx, events)
	if err != nil {
		return fmt.Errorf("appending to %s: %w", b.events.Collection, err)
	}
	return nil
}

// appendEvents stores the events and returns the envelopes, which are other ones if the middleware has
// changed the events.
func (b *Box) appendEvents(ctx context.Context, events []event.Event) ([]appending.Envelope, error) {
	if len(events) == 0 {
		return nil, nil
	}
	// Without a transaction, an event could survive a change that was rolled back.
	if err := b.requireTransaction(ctx); err != nil {
		return nil, err
	}

	envelopes, err := b.events.Encode(ctx, events)
	// The middleware may have dropped all events.
	if err != nil || len(envelopes) == 0 {
		return nil, err
	}

	if err := b.store.Insert(ctx, envelopes); err != nil {
		// The server has aborted the transaction, even if the callback ignores the error.
		transaction.SetRollbackOnly(ctx, err)
		return nil, err
	}
	if b.plain && errors.Is(transaction.Check(ctx), ErrNoTransaction) {
		b.warnStandalone(ctx)
	}
	b.events.Telemetry.Measure(telemetry.Measurement{Metric: telemetry.Appended, N: int64(len(envelopes))})
	return envelopes, nil
}

// requireTransaction returns an error if ctx has no transaction, or one that can no longer commit.
// With WithoutTransaction it accepts a context without a transaction.
func (b *Box) requireTransaction(ctx context.Context) error {
	err := transaction.Check(ctx)
	isInMemory := mongo.SessionFromContext(ctx) == nil
	if err == nil && isInMemory != (b.coll == nil) {
		// The transaction belongs to another store.
		err = ErrNoTransaction
	}

	if b.plain && errors.Is(err, ErrNoTransaction) {
		return nil
	}

	if err == nil && !transaction.IsPinned(ctx) {
		b.warnWeakConcern(ctx, mongo.SessionFromContext(ctx))
	}
	return err
}

// warnStandalone logs a warning, once per Box, if the server is a standalone. A transaction is an error there, but an event without one
// is stored, and no relay can read it. If the server does not respond, the next call reads it
// again.
func (b *Box) warnStandalone(ctx context.Context) {
	if b.coll == nil || b.serverSeen.Load() {
		return
	}
	standalone, err := transaction.IsStandalone(ctx, b.coll.Database().Client())
	if err != nil || b.serverSeen.Swap(true) || !standalone {
		return
	}

	b.log.WarnContext(ctx, "no relay can read the events: the server is a standalone, which has no change streams",
		"collection", b.coll.Database().Name()+"."+b.coll.Name(),
		"fix", "restart mongod with --replSet and run rs.initiate()")
}

// warnWeakConcern logs a warning, once per Box, if the transaction of sess commits with a write
// concern below majority. Such a commit can be rolled back after it was acknowledged. On a replica
// set with a single member, the relay also sees it up to 100 ms late.
func (b *Box) warnWeakConcern(ctx context.Context, sess *mongo.Session) {
	concern, ok := commitConcern(sess)
	if !ok || concern == writeconcern.WCMajority {
		return
	}

	b.warnOnce.Do(func() {
		b.log.WarnContext(ctx, "transactions commit with a write concern below majority",
			"collection", b.coll.Database().Name()+"."+b.coll.Name(), "w", concern,
			"effect", "an acknowledged event can be rolled back, and a single-member set delivers it late",
			"fix", "use Box.Transaction, or set w=majority in the URI or in the options of the transaction")
	})
}
