package waiting

import (
	"testing"
	"time"

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

// overdue is when a test fails because an expected event has not come. It only bounds a hang, so it is longer than a
// test may wait for the fail point of the server.
const overdue = 4 * time.Minute

// bundle has the databases of a test, and a client with a separate application name for sweeps.
type bundle struct {
	t      *testing.T
	app    string
	client *mongo.Client
	reader *mongo.Client
	db     *mongo.Database
}

func newBundle(t *testing.T, opts ...*options.ClientOptions) *bundle {
	t.Helper()
	b := &bundle{t: t, app: stacktest.Name(t), client: stacktest.Client(t)}
	b.db = stacktest.Database(t, b.client)
	b.reader = stacktest.Client(t, append(opts, options.Client().SetAppName(b.app))...)
	return b
}

func (b *bundle) newOutbox(name string) *mongo.Collection {
	b.t.Helper()
	c := mongodb.Majority(b.db.Collection(name))
	if err := outboxes.EnsureIndexes(b.t.Context(), c); err != nil {
		b.t.Fatal(err)
	}
	return c
}
