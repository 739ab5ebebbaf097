package sweep

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

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

// insert writes an envelope that the server stamps, and more fields.
func (b *bundle) insert(ctx context.Context, coll *mongo.Collection, id string, more ...bson.E) {
	b.t.Helper()
	doc := append(bson.D{{Key: "_id", Value: id}, {Key: "ts", Value: bson.Timestamp{}}}, more...)
	if _, err := coll.InsertOne(ctx, doc); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bundle) clusterTime() bson.Timestamp {
	b.t.Helper()
	raw, err := b.client.Database("admin").RunCommand(b.t.Context(), bson.D{{Key: "ping", Value: 1}}).Raw()
	if err != nil {
		b.t.Fatal(err)
	}
	t, i := raw.Lookup("operationTime").Timestamp()
	return bson.Timestamp{T: t, I: i}
}

func (b *bundle) newSweep(to bson.Timestamp, p *publisher, colls ...string) *Sweep {
	s := &Sweep{Client: b.reader, To: to, Memory: 8 << 20, Skip: NewSkip(1 << 20), Publisher: p}
	for _, c := range colls {
		s.Collections = append(s.Collections, outboxes.Outbox{DB: b.db.Name(), Coll: c})
	}
	return s
}

// run sweeps to the end.
func (b *bundle) run(s *Sweep) Result {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), overdue)
	defer cancel()
	res, err := s.Run(ctx)
	if err != nil {
		b.t.Fatal(err)
	}
	return res
}

// publisher records the envelopes that it gets.
type publisher struct {
	mu      sync.Mutex
	ids     []string
	stamps  []bson.Timestamp
	marks   []bson.Timestamp
	at      []int // how many envelopes were there at each mark
	trouble int
	deliver func(e *outboxes.Envelope) error
}

func (p *publisher) Deliver(_ context.Context, e *outboxes.Envelope) error {
	p.mu.Lock()
	defer p.mu.Unlock()

	id, ok := e.Raw.Lookup("_id").StringValueOK()
	if !ok {
		// The id may have any type, so use the type of the event.
		id = e.Raw.Lookup("type").StringValue()
	}

	p.ids = append(p.ids, strings.Clone(id))
	p.stamps = append(p.stamps, e.TS)

	if p.deliver != nil {
		return p.deliver(e)
	}
	return nil
}

func (p *publisher) Reached(_ context.Context, cursor bson.Timestamp) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.marks, p.at = append(p.marks, cursor), append(p.at, len(p.ids))
	return nil
}

func (p *publisher) Trouble(error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.trouble++
}

func (p *publisher) checkSent(t *testing.T, ids ...string) {
	t.Helper()
	if !slices.Equal(p.ids, ids) {
		t.Fatalf("swept %q, want %q", p.ids, ids)
	}
}

// readStream reads the inserts of a collection from a time on, until the insert with this id, as the stream after a sweep does.
func (b *bundle) readStream(coll *mongo.Collection, at bson.Timestamp, until string, take func(id bson.RawValue, doc bson.Raw)) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), overdue)
	defer cancel()
	cs, err := coll.Watch(ctx, mongo.Pipeline{{{Key: "$match", Value: bson.D{{Key: "operationType", Value: "insert"}}}}},
		options.ChangeStream().SetStartAtOperationTime(&at))
	if err != nil {
		b.t.Fatal(err)
	}
	defer func() { _ = cs.Close(context.WithoutCancel(ctx)) }()
	for cs.Next(ctx) {
		id := cs.Current.Lookup("documentKey", "_id")
		if id.StringValue() == until {
			return
		}
		take(id, cs.Current.Lookup("fullDocument").Document())
	}

	b.t.Fatalf("the stream never brought %s: %v", until, cs.Err())
}

// checkSkip returns the result of the set for an event.
func (b *bundle) checkSkip(s *Skip, coll string, id bson.RawValue, doc bson.Raw) (known, doubtful bool) {
	return s.WasSwept([]byte(b.db.Name()), []byte(coll), byte(id.Type), id.Value, doc)
}
