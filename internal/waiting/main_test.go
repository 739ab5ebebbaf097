package waiting

import (
	"context"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
)

func TestMain(m *testing.M) {
	stacktest.Wide(4)
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

// overdue is when a test gives up on what has to come. Being slow is no fault: it only bounds what hangs, and is longer than a test may
// wait for the fail point of the server.
const overdue = 4 * time.Minute

// bundle is a test's own databases, and a client with an application name of its own to sweep with.
type bundle struct {
	t      *testing.T
	app    string
	client *mongo.Client
	reader *mongo.Client
	db     *mongo.Database
}

func setup(t *testing.T, opts ...*options.ClientOptions) *bundle {
	t.Helper()
	b := &bundle{t: t, app: stacktest.Name(t), client: stacktest.Client(t)}
	b.db = stacktest.Database(t, b.client)
	b.reader = stacktest.Client(t, append(opts, options.Client().SetAppName(b.app))...)
	return b
}

func (b *bundle) outbox(name string) *mongo.Collection {
	b.t.Helper()
	c := mongodb.Majority(b.db.Collection(name))
	if err := outboxes.EnsureIndexes(b.t.Context(), c); err != nil {
		b.t.Fatal(err)
	}
	return c
}

// insert writes an envelope that the server stamps, and more fields.
func (b *bundle) insert(ctx context.Context, coll *mongo.Collection, id string, more ...bson.E) {
	b.t.Helper()
	doc := append(bson.D{{Key: "_id", Value: id}, {Key: "ts", Value: bson.Timestamp{}}}, more...)
	if _, err := coll.InsertOne(ctx, doc); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bundle) now() bson.Timestamp {
	b.t.Helper()
	raw, err := b.client.Database("admin").RunCommand(b.t.Context(), bson.D{{Key: "ping", Value: 1}}).Raw()
	if err != nil {
		b.t.Fatal(err)
	}
	t, i := raw.Lookup("operationTime").Timestamp()
	return bson.Timestamp{T: t, I: i}
}
