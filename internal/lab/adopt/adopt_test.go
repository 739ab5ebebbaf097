package adopt

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/statetest"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/resume"
)

type fixture struct {
	t      *testing.T
	cfg    config.Config
	state  state.Database
	outbox *mongo.Collection
	a      *Adopter
}

func newFixture(t *testing.T, slots int) *fixture {
	t.Helper()
	client := stacktest.Client(t)
	f := &fixture{t: t, state: statetest.New(t, client), outbox: stacktest.Database(t, client).Collection("outbox")}
	f.cfg = config.Default()
	f.cfg.Watcher, f.cfg.Node, f.cfg.Slots = "orders", "n1", slots
	f.cfg.MongoDB.URI = config.NewURI(stacktest.MongoURI(t))
	f.cfg.State.Database = f.state.Name()
	f.cfg.Watch = []string{f.outbox.Database().Name() + ".outbox"}
	f.cfg.Kafka.Brokers = stacktest.Brokers(t)

	var disconnect func()
	var err error
	if f.a, disconnect, err = Connect(f.cfg, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(disconnect)
	return f
}

// insert inserts an envelope and returns the token of its event.
func (f *fixture) insert(coll *mongo.Collection) resume.Token {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), time.Minute)
	defer cancel()
	// Debezium opens its stream without expanded events.
	cs, err := coll.Watch(ctx, mongo.Pipeline{})
	if err != nil {
		f.t.Fatal(err)
	}
	defer func() { _ = cs.Close(ctx) }()
	if _, err := coll.InsertOne(ctx, bson.D{{Key: "type", Value: "OrderPlaced"}}); err != nil {
		f.t.Fatal(err)
	}
	if !cs.Next(ctx) {
		f.t.Fatal(cs.Err())
	}

	token := cs.Current.Lookup("_id").Document()
	return resume.Token(token).Clone()
}

func (f *fixture) plan(src Source) (Report, error) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), time.Minute)
	defer cancel()
	return f.a.Plan(ctx, src)
}

func (f *fixture) rejects(src Source, want ...string) {
	f.t.Helper()
	_, err := f.plan(src)
	if !errors.Is(err, ErrRejected) {
		f.t.Errorf("%+v is not rejected: %v", src, err)
		return
	}
	for _, w := range want {
		if !strings.Contains(err.Error(), w) {
			f.t.Errorf("%+v: no %q in %v", src, w, err)
		}
	}
}

func (f *fixture) documents() []lease.Document {
	f.t.Helper()
	cur, err := f.state.Collection("watchers").Find(f.t.Context(), bson.D{}, options.Find().SetSort(bson.D{{Key: "_id", Value: 1}}))
	if err != nil {
		f.t.Fatal(err)
	}
	var docs []lease.Document
	if err := cur.All(f.t.Context(), &docs); err != nil {
		f.t.Fatal(err)
	}
	return docs
}

// TestAdoptToken: a plan counts the events after the token and writes nothing. Write stores the position for every slot.
func TestAdoptToken(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 2)
	at := f.insert(f.outbox)
	for range 3 {
		f.insert(f.outbox)
	}

	r, err := f.plan(Source{Token: at.Data()})
	if err != nil || r.MaxRepeats != 3 || r.Checked != CheckedByEvent || !r.DryRun || r.OplogFrom.IsZero() {
		t.Fatalf("%+v, %v", r, err)
	}
	if docs := f.documents(); len(docs) != 0 {
		t.Fatalf("the plan wrote %+v", docs)
	}

	if r, err = f.a.Write(t.Context(), r, "ann"); err != nil || !r.Done {
		t.Fatal(r, err)
	}
	docs := f.documents()
	if len(docs) != 2 || docs[0].ID != "orders/0of2" {
		t.Fatalf("%+v", docs)
	}
	for _, d := range docs {
		if !d.Position().Token.Equal(at) || !d.Position().Sound() || d.PipelineHash != lease.AdoptedHash || d.Owner != "" {
			t.Errorf("%+v", d)
		}
	}
	n, err := f.state.Collection("audit").CountDocuments(t.Context(), bson.D{{Key: "kind", Value: "position_adopted"}})
	if err != nil || n != 1 {
		t.Errorf("%d entries in the audit log, %v", n, err)
	}

	f.rejects(Source{Token: at.Data()}, "has a position already", "--replace")
	if r, err = f.plan(Source{Token: at.Data(), Replace: true}); err != nil || r.Present.IsZero() {
		t.Errorf("%+v, %v", r, err)
	}
}

// TestAdoptOfAnOwnedWatcher: a node that owns the watcher would overwrite the position. So would a node that acquires it after the plan.
func TestAdoptOfAnOwnedWatcher(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 1)
	at := f.insert(f.outbox)
	before, err := f.plan(Source{Token: at.Data()})
	if err != nil {
		t.Fatal(err)
	}

	l := lease.New(lease.Config{Collection: f.state.Collection("watchers"), ID: "orders/0of1", Node: "n7", TTL: time.Minute})
	held, err := l.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	f.rejects(Source{Token: at.Data()}, "node n7 owns orders/0of1")
	if _, err := f.a.Write(t.Context(), before, "ann"); !errors.Is(err, lease.ErrNotHeld) {
		t.Errorf("a document that was created after the plan: %v", err)
	}

	if err := held.Release(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	after, err := f.plan(Source{Token: at.Data()})
	if err != nil {
		t.Fatal(err)
	}
	again, err := l.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = again.Release(context.WithoutCancel(t.Context()), nil) }()
	if _, err := f.a.Write(t.Context(), after, "ann"); !errors.Is(err, lease.ErrNotHeld) {
		t.Errorf("a lease that was acquired after the plan: %v", err)
	}
}

// TestAdoptRejectsCopiedState: a position does not make a copy the valid state. The original may run with the same transactional ids.
func TestAdoptRejectsCopiedState(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 1)
	at := f.insert(f.outbox)
	r, err := f.plan(Source{Token: at.Data()})
	if err == nil {
		_, err = f.a.Write(t.Context(), r, "ann")
	}
	if err != nil {
		t.Fatal(err)
	}

	copied := bson.D{{Key: "$set", Value: bson.D{{Key: "replicaSetId", Value: "there"}}}}
	if _, err := f.state.Collection("watchers").UpdateMany(t.Context(), bson.D{}, copied); err != nil {
		t.Fatal(err)
	}
	f.rejects(Source{Token: at.Data(), Replace: true}, "orders/0of1", "written on there", "outrelay recover --accept-copy")
}

// TestAdoptRejectsForeignPositions: the server would accept these tokens, and stay silent or fail much later.
func TestAdoptRejectsForeignPositions(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 1)
	own := f.insert(f.outbox)

	// Only the identity of the event differs.
	other := []byte(own.Data())
	other[60] ^= 3
	f.rejects(Source{Token: string(other)}, "found none", "another cluster")

	f.rejects(Source{At: time.Now().Add(time.Hour)}, "the time of the cluster is")
	f.rejects(Source{At: time.Unix(1_000_000_000, 0)}, "2001-09-09T01:46:40Z", "the oplog begins at", "outrelay recover --from")
	f.rejects(Source{Token: "8265"}, "expected a resume token")
	f.rejects(Source{File: "testdata/connect.offsets"}, "orders, users", "--connector")
	f.rejects(Source{File: "testdata/connect.offsets", Connector: "users"}, "connector users reads shop.users", f.cfg.Watch[0])
	f.rejects(Source{File: "testdata/connect.offsets", Connector: "orders"}, "2023-11-14T22:13:20Z", "the oplog begins at")
	if docs := f.documents(); len(docs) != 0 {
		t.Errorf("a rejected position was written: %+v", docs)
	}
}

// TestAdoptTokenOfAnotherCollection: Debezium stores the token of the last event that it read, from any collection.
func TestAdoptTokenOfAnotherCollection(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 1)
	at := f.insert(f.outbox.Database().Collection("orders"))
	f.insert(f.outbox)
	r, err := f.plan(Source{Token: at.Data()})
	if err != nil || r.Checked != CheckedByEvent || r.MaxRepeats != 1 {
		t.Errorf("%+v, %v", r, err)
	}
}

// TestRepeatsEndAtTheStop: the other publisher cannot have sent events that were inserted after it stopped.
func TestRepeatsEndAtTheStop(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 1)
	at := f.insert(f.outbox)
	f.insert(f.outbox)
	last, _ := f.insert(f.outbox).ClusterTime()

	stopped := asTime(last)
	for now := stopped; !now.After(stopped); {
		f.insert(f.outbox.Database().Collection("other"))
		token := f.insert(f.outbox.Database().Collection("other"))
		ts, _ := token.ClusterTime()
		now = asTime(ts)
	}
	f.insert(f.outbox)
	r, err := f.plan(Source{Token: at.Data(), StoppedAt: stopped})
	if err != nil || r.MaxRepeats != 2 || r.Later != 1 {
		t.Errorf("%+v, %v", r, err)
	}

	r, err = f.plan(Source{At: asTime(last)})
	if err != nil || r.Checked != checkedByTime || r.MaxRepeats < 2 {
		t.Errorf("by time: %+v, %v", r, err)
	}
}

// TestOffsetTopic: the last value of a key counts, and a tombstone removes a key.
func TestOffsetTopic(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 1)
	at := f.insert(f.outbox)
	first := f.insert(f.outbox)

	topic := stacktest.Topic(t, 3)
	wire, err := kafkawire.NewClient(kafkawire.Config{Brokers: stacktest.Brokers(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer wire.Close()
	publish := func(partition int32, key, value string) {
		t.Helper()
		r := record.Record{Key: []byte(key), Value: []byte(value)}
		if value == "" {
			r.Value = nil
		}
		tp := record.TopicPartition{Topic: topic, Partition: partition}
		layout, err := wire.Metadata(t.Context(), []string{topic})
		if err == nil {
			err = wire.Publish(t.Context(), layout.LeaderAddr(tp), tp, []record.Record{r}, 10*time.Second)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	value := func(token resume.Token) string { return fmt.Sprintf(`{"_id":"{\"_data\": \"%s\"}"}`, token.Data()) }
	key := fmt.Sprintf(`["orders",{"ns":"mongodb://m1:27017/%s"}]`, f.cfg.Watch[0])
	publish(1, key, value(at))
	publish(2, `["pg",{"server":"pg"}]`, `{"lsn":1}`)
	publish(0, `["gone",{"server_id":"x"}]`, `{"sec":1}`)
	publish(1, key, value(first))
	publish(0, `["gone",{"server_id":"x"}]`, "")

	r, err := f.plan(Source{Topic: topic})
	if err != nil || r.Connector != "orders" || r.Kind != mongoKafka || r.Token != first.Data() || r.MaxRepeats != 0 {
		t.Errorf("%+v, %v", r, err)
	}
	f.rejects(Source{Topic: topic, Connector: "pg"}, `"pg"`, `{"server":"pg"}`)
	f.rejects(Source{Topic: topic + "x"}, "offset.storage.topic")
}
