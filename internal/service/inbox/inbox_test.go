package inbox_test

import (
	"context"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/inboxtest"
	"github.com/outrelay/outrelay/internal/mongodb/transaction"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/inbox/mongostore"
)

func TestMain(m *testing.M) {
	stacktest.Wide(4)
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

// bundle contains the client, the database and the inbox of one test.
type bundle struct {
	client *mongo.Client
	db     *mongo.Database
	inbox  *inbox.Inbox
}

func setup(tb testing.TB, opts ...*options.ClientOptions) bundle {
	tb.Helper()
	c := stacktest.Client(tb, opts...)
	db := stacktest.Database(tb, c)
	b := bundle{client: c, db: db}
	b.inbox = b.newInbox(tb)
	if err := b.inbox.EnsureIndexes(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	return b
}

// newInbox returns an inbox of another process.
func (b bundle) newInbox(tb testing.TB) *inbox.Inbox {
	tb.Helper()
	return b.newWith(tb, inbox.Settings{})
}

// newWith returns an inbox of another process with the settings.
func (b bundle) newWith(tb testing.TB, s inbox.Settings) *inbox.Inbox {
	tb.Helper()
	x, err := mongostore.Open(b.db, s)
	if err != nil {
		tb.Fatal(err)
	}
	return x
}

// store returns the store of the inboxes.
func (b bundle) store() *mongostore.Store {
	return mongostore.New(b.db, inbox.Settings{Collection: inbox.DefaultCollection})
}

func (b bundle) transaction(ctx context.Context, fn func(context.Context) error) error {
	return transaction.Run(ctx, b.client, fn)
}

func (b bundle) admit(tb testing.TB, x *inbox.Inbox, list ...inbox.Entry) []bool {
	tb.Helper()
	var fresh []bool
	if err := b.transaction(tb.Context(), func(ctx context.Context) (err error) {
		fresh, err = x.Admit(ctx, list)
		return err
	}); err != nil {
		tb.Fatal(err)
	}
	return fresh
}

// tryAdmit admits the entries in a transaction and returns its error.
func (b bundle) tryAdmit(ctx context.Context, list []inbox.Entry) error {
	return b.transaction(ctx, func(ctx context.Context) error {
		_, err := b.inbox.Admit(ctx, list)
		return err
	})
}

// setPast sets a date of every document to a time long ago.
func (b bundle) setPast(ctx context.Context, coll, field string) error {
	_, err := b.db.Collection(coll).UpdateMany(ctx, bson.D{}, bson.D{{Key: "$set", Value: bson.D{{Key: field, Value: time.Unix(1, 0)}}}})
	return err
}

// dropTTL drops a TTL index. Otherwise the server could delete documents whose dates a test has set
// to the past.
func (b bundle) dropTTL(tb testing.TB, coll, index string) {
	tb.Helper()
	if err := b.db.Collection(coll).Indexes().DropOne(tb.Context(), index); err != nil {
		tb.Fatal(err)
	}
}

func (b bundle) countDocuments(tb testing.TB, coll string, filter bson.D) int {
	tb.Helper()
	n, err := b.db.Collection(coll).CountDocuments(tb.Context(), filter)
	if err != nil {
		tb.Fatal(err)
	}
	return int(n)
}

func TestConformance(t *testing.T) {
	t.Parallel()
	inboxtest.Run(t, func(t *testing.T) inboxtest.Setup {
		b := setup(t)
		return inboxtest.Setup{
			Inbox: b.inbox, Other: b.newInbox(t), Halting: b.newWith(t, inbox.Settings{HaltOnRecreated: true}),
			Transaction: b.transaction,
			Expire: func(ctx context.Context) error {
				if err := b.setPast(ctx, "inbox", "k"); err != nil {
					return err
				}

				_, err := b.inbox.Sweep(ctx, 0)
				return err
			},
			Lapse: func(ctx context.Context) error { return b.setPast(ctx, "inbox_claims", "until") },
		}
	})
}
