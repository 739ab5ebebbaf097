package admin_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/internal/state"
	"github.com/outrelay/outrelay/internal/state/statetest"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"
)

// stand is a watcher without a relay. The test sets its position.
type stand struct {
	t     *testing.T
	state state.Database
	shop  *mongo.Database
	box   *mongo.Collection
	op    admin.Operator
	r     admin.Replays
}

func newStand(t *testing.T, c *mongo.Client) *stand {
	t.Helper()
	s := &stand{t: t, state: statetest.New(t, c), shop: stacktest.Database(t, c)}
	s.box = s.shop.Collection("outbox", options.Collection().SetWriteConcern(writeconcern.Majority()))

	if err := outboxes.EnsureIndexes(t.Context(), s.box); err != nil {
		t.Fatal(err)
	}
	if _, err := s.state.Collection("watchers").InsertOne(t.Context(), bson.D{{Key: "_id", Value: "orders/0of1"}, {Key: "epoch", Value: int64(1)}}); err != nil {
		t.Fatal(err)
	}
	if _, err := outboxes.NewRegistry(s.state.Collection("collections")).Register(t.Context(), [16]byte{1}, s.ns(), "orders", bson.Timestamp{}); err != nil {
		t.Fatal(err)
	}

	router, err := routing.New(routing.Config{Rules: []routing.Rule{{AggregateType: "order", To: []string{"orders", "audit"}}}})
	if err != nil {
		t.Fatal(err)
	}
	s.op = admin.Operator{
		State: s.state, Watcher: "orders", Actor: "ann", Router: router,
		Compacted: func(context.Context, []string) ([]string, error) { return nil, nil },
	}

	s.r = s.op.Replays()
	return s
}

// orderReplay plans and orders a replay.
func orderReplay(t *testing.T, r admin.Replays, o admin.ReplayOrder) (admin.ReplayInfo, error) {
	t.Helper()
	p, err := r.Plan(t.Context(), o)
	if err != nil {
		return admin.ReplayInfo{}, err
	}
	return r.Order(t.Context(), p, o)
}

func (s *stand) ns() string { return mongodb.Namespace(s.box) }

// moveWatcher moves the position of the watcher to the current time of the cluster, and returns it.
func (s *stand) moveWatcher(ctx context.Context) bson.Timestamp {
	raw, err := s.state.Client().Database("admin").RunCommand(ctx, bson.D{{Key: "ping", Value: 1}}).Raw()
	if err != nil {
		if ctx.Err() == nil {
			s.t.Error(err)
		}
		return bson.Timestamp{}
	}

	var ts bson.Timestamp
	ts.T, ts.I = raw.Lookup("operationTime").Timestamp()
	if _, err := s.state.Collection("watchers").UpdateOne(ctx, bson.D{{Key: "_id", Value: "orders/0of1"}}, bson.D{{Key: "$set", Value: bson.D{{Key: "clusterTime", Value: ts}}}}); err != nil && ctx.Err() == nil {
		s.t.Error(err)
	}

	return ts
}

// startWatcher moves the watcher until the test ends. It calls relay between two steps, unless relay is nil.
func (s *stand) startWatcher(relay func(ctx context.Context)) {
	s.moveWatcher(s.t.Context())

	ctx, cancel := context.WithCancel(context.WithoutCancel(s.t.Context()))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(30 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				if s.moveWatcher(ctx); relay != nil {
					relay(ctx)
				}
			}
		}
	}()

	s.t.Cleanup(func() { cancel(); <-ended })
}

// newRelayStep returns a function that finishes up to n queued envelopes, as the relay does.
func (s *stand) newRelayStep(n int64) func(ctx context.Context) {
	return func(ctx context.Context) {
		cur, err := s.box.Find(ctx, bson.D{{Key: "state", Value: "retry"}}, options.Find().SetSort(bson.D{{Key: "pos", Value: 1}}).SetLimit(n).SetProjection(bson.D{{Key: "_id", Value: 1}}))
		if err != nil {
			return
		}

		var docs []struct {
			ID any `bson:"_id"`
		}
		if cur.All(ctx, &docs) != nil {
			return
		}

		ids := make(bson.A, len(docs))
		for i, d := range docs {
			ids[i] = d.ID
		}
		if _, err := s.box.UpdateMany(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}, mongo.Pipeline{
			{{Key: "$set", Value: bson.D{{Key: "sentAt", Value: "$$NOW"}, {Key: "ts", Value: "$$CLUSTER_TIME"}}}},
			{{Key: "$unset", Value: bson.A{"state", "pos", "pending", "attempts", "nextAt", "origin"}}},
		}); err != nil && ctx.Err() == nil {
			s.t.Error(err)
		}
	}
}

func (s *stand) append(docs ...bson.D) {
	s.t.Helper()
	for len(docs) > 0 {
		n := min(len(docs), 1000)
		if _, err := s.box.InsertMany(s.t.Context(), docs[:n]); err != nil {
			s.t.Fatal(err)
		}
		docs = docs[n:]
	}
}

func newEnvelope(id any, and ...bson.E) bson.D {
	return append(bson.D{
		{Key: "_id", Value: id},
		{Key: "aggregatetype", Value: "order"},
		{Key: "aggregateid", Value: "7"},
		{Key: "type", Value: "Placed"},
		{Key: "payload", Value: bson.Binary{Data: []byte{0, 1, 2}}},
		{Key: "ts", Value: bson.Timestamp{}},
	}, and...)
}

func newEnvelopes(n int) []bson.D {
	docs := make([]bson.D, n)
	for i := range docs {
		docs[i] = newEnvelope(fmt.Sprintf("e%05d", i), bson.E{Key: "key", Value: fmt.Sprint(i % 7)})
	}
	return docs
}

var everything = admin.ReplayOrder{From: time.Unix(1, 0)}

func (s *stand) start(o admin.ReplayOrder) string {
	s.t.Helper()
	i, err := orderReplay(s.t, s.r, o)
	if err != nil {
		s.t.Fatal(err)
	}
	return i.ID
}

func (s *stand) findEnvelope(id any) bson.Raw {
	s.t.Helper()
	raw, err := s.box.FindOne(s.t.Context(), bson.D{{Key: "_id", Value: id}}).Raw()
	if err != nil {
		s.t.Fatal(err)
	}
	return raw
}

func (s *stand) listQueued() []string {
	s.t.Helper()
	cur, err := s.box.Find(s.t.Context(), bson.D{{Key: "origin", Value: "replay"}}, options.Find().SetSort(bson.D{{Key: "pos", Value: 1}}))
	if err != nil {
		s.t.Fatal(err)
	}

	var docs []struct {
		ID string `bson:"_id"`
	}
	if err := cur.All(s.t.Context(), &docs); err != nil {
		s.t.Fatal(err)
	}

	ids := []string{}
	for _, d := range docs {
		ids = append(ids, d.ID)
	}
	return ids
}

func TestN18_AReplayIsANewDeliveryOfTheSameEnvelope(t *testing.T) {
	t.Parallel()
	s := newStand(t, stacktest.Client(t))
	s.append(
		newEnvelope("a", bson.E{Key: "sentAt", Value: time.Now()}, bson.E{Key: "sent", Value: bson.A{}}, bson.E{Key: "headers", Value: bson.D{{Key: "h", Value: "v"}}}),
		newEnvelope("b", bson.E{Key: "key", Value: int32(5)}, bson.E{Key: "delivery", Value: int32(2)}),
		newEnvelope("waits", bson.E{Key: "state", Value: "parked"}, bson.E{Key: "pos", Value: "82"}),
		newEnvelope("later", bson.E{Key: "dueAt", Value: time.Now().Add(time.Hour)}),
		bson.D{{Key: "_id", Value: "malformed"}, {Key: "ts", Value: bson.Timestamp{}}},
		newEnvelope("expired", bson.E{Key: "expiresAt", Value: time.Now().Add(-time.Second)}),
	)

	before := s.findEnvelope("a")
	s.startWatcher(nil)
	plan, err := s.r.Plan(t.Context(), everything)
	if err != nil || plan.Found != 3 || plan.LeftOut != 1 || len(plan.Topics) != 2 || plan.Topics[1].Name != "orders" || plan.Collections[0].Name != s.ns() {
		t.Errorf("plan %+v, %v", plan, err)
	}

	id := s.start(everything)
	i, err := s.r.Run(t.Context(), id, admin.ReplayRun{})
	if err != nil || i.State != admin.ReplayDone || i.Queued != 2 || i.Skipped != 2 || i.Actor != "ann" || i.FinishedAt == nil {
		t.Fatalf("%+v, %v", i, err)
	}

	a := s.findEnvelope("a")
	var x struct {
		State, Origin, ReplayOf, Pos, Key string
		NextAt                            time.Time
		Attempts, Delivery                int32
		TS                                bson.Timestamp
	}
	if err := bson.Unmarshal(lowerFields(t, a), &x); err != nil {
		t.Fatal(err)
	}

	var old bson.Timestamp
	old.T, old.I = before.Lookup("ts").Timestamp()
	if x.State != "retry" || x.Origin != "replay" || x.ReplayOf != id || x.Delivery != 1 || x.Key != "7" || !x.TS.After(old) ||
		x.Pos != fmt.Sprintf("82%08X%08X", old.T, old.I) || time.Since(x.NextAt).Abs() > time.Minute {
		t.Errorf("queued as %v", a)
	}

	for _, gone := range []string{"sentAt", "sent", "pending"} {
		if _, err := a.LookupErr(gone); err == nil {
			t.Errorf("%s is left", gone)
		}
	}
	for _, kept := range []string{"payload", "headers", "aggregateid", "type"} {
		if !a.Lookup(kept).Equal(before.Lookup(kept)) {
			t.Errorf("%s was changed", kept)
		}
	}

	if b := s.findEnvelope("b"); b.Lookup("delivery").AsInt64() != 3 || b.Lookup("key").AsInt64() != 5 {
		t.Errorf("queued as %v", b)
	}
	if got := s.listQueued(); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("in the order of their positions: %v", got)
	}

	var w struct {
		Dirty []string
		Fence int64
	}
	if err := s.state.Collection("watchers").FindOne(t.Context(), bson.D{}).Decode(&w); err != nil || !slices.Equal(w.Dirty, []string{s.ns()}) || w.Fence == 0 {
		t.Errorf("N3: the watcher has %+v, %v", w, err)
	}
	// The same replay finds nothing: the queued envelopes are exceptions, and their stamps are new.
	if i, err := s.r.Run(t.Context(), s.start(everything), admin.ReplayRun{}); err != nil || i.Queued != 0 {
		t.Errorf("%+v, %v", i, err)
	}

	log, err := nodes.NewEvents(s.state.Collection("events"), "", "").Latest(t.Context(), 4)
	if err != nil || len(log) != 4 || log[3].Kind != "replay_ordered" || log[2].Kind != "replay_queued" || log[2].Fields.Lookup("actor").StringValue() != "ann" {
		t.Errorf("%+v, %v", log, err)
	}
}

// lowerFields changes the names of the fields to the names in a struct without tags.
func lowerFields(t *testing.T, raw bson.Raw) bson.Raw {
	t.Helper()
	elems, err := raw.Elements()
	if err != nil {
		t.Fatal(err)
	}

	var d bson.D
	for _, e := range elems {
		d = append(d, bson.E{Key: strings.ToLower(e.Key()), Value: e.Value()})
	}

	out, err := bson.Marshal(d)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestAReplayIsNarrowed(t *testing.T) {
	t.Parallel()
	s := newStand(t, stacktest.Client(t))

	oid := bson.NewObjectID()
	s.append(
		newEnvelope("str"),
		newEnvelope(oid, bson.E{Key: "key", Value: int64(42)}),
		newEnvelope("id", bson.E{Key: "key", Value: oid}),
		newEnvelope("own", bson.E{Key: "topic", Value: "special"}),
		bson.D{{Key: "_id", Value: "user"}, {Key: "aggregatetype", Value: "user"}, {Key: "aggregateid", Value: int32(42)}, {Key: "type", Value: "Made"}, {Key: "payload", Value: nil}, {Key: "ts", Value: bson.Timestamp{}}},
	)

	s.startWatcher(nil)
	for name, c := range map[string]struct {
		narrow func(*admin.ReplayOrder)
		found  int64
	}{
		"all":            {func(*admin.ReplayOrder) {}, 5},
		"id":             {func(o *admin.ReplayOrder) { o.IDs = []string{oid.Hex(), "str", "nobody"}; o.From = time.Time{} }, 2},
		"number as key":  {func(o *admin.ReplayOrder) { o.Keys = []string{"42"} }, 2},
		"id as key":      {func(o *admin.ReplayOrder) { o.Keys = []string{oid.Hex()} }, 1},
		"type":           {func(o *admin.ReplayOrder) { o.Types = []string{"Made"} }, 1},
		"aggregate type": {func(o *admin.ReplayOrder) { o.AggregateTypes = []string{"order", "x"} }, 4},
		"topic":          {func(o *admin.ReplayOrder) { o.Topics = []string{"audit"} }, 3},
		"named topic":    {func(o *admin.ReplayOrder) { o.Topics = []string{"special"} }, 1},
		"both topics":    {func(o *admin.ReplayOrder) { o.Topics = []string{"audit", "orders"}; o.Types = []string{"Placed"} }, 3},
		"future":         {func(o *admin.ReplayOrder) { o.From = time.Now().Add(time.Hour) }, 0},
		"past":           {func(o *admin.ReplayOrder) { o.To = time.Now().Add(-time.Hour) }, 0},
		"collection":     {func(o *admin.ReplayOrder) { o.Collections = []string{s.ns()} }, 5},
	} {
		o := everything
		c.narrow(&o)
		if p, err := s.r.Plan(t.Context(), o); err != nil || p.Found != c.found {
			t.Errorf("%s: %+v, %v; want %d", name, p, err, c.found)
		}
	}

	for name, o := range map[string]admin.ReplayOrder{
		"no bound":           {Types: []string{"Made"}},
		"unknown collection": {From: time.Unix(1, 0), Collections: []string{"a.b"}},
	} {
		if _, err := orderReplay(t, s.r, o); err == nil {
			t.Errorf("%s: no error", name)
		}
	}

	nobody := s.op
	nobody.Watcher = "nobody"
	if _, err := orderReplay(t, nobody.Replays(), everything); !errors.Is(err, mongodb.ErrNoWatcher) {
		t.Errorf("%v", err)
	}

	o := everything
	o.Topics = []string{"audit", "special"}
	if i, err := s.r.Run(t.Context(), s.start(o), admin.ReplayRun{}); err != nil || i.Queued != 4 || i.Skipped != 1 {
		t.Errorf("%+v, %v", i, err)
	}
	if got := s.findEnvelope("str").Lookup("pending").String(); got != `["audit"]` {
		t.Errorf("only one of two topics is pending: %s", got)
	}
	if _, err := s.findEnvelope("own").LookupErr("pending"); err == nil {
		t.Error("all of its topics are wanted, and yet it lists them")
	}
}

func TestN10_AReplayIntoACompactedTopicNeedsForce(t *testing.T) {
	t.Parallel()
	s := newStand(t, stacktest.Client(t))

	s.append(newEnvelope("a"))
	s.startWatcher(nil)
	var checked []string
	s.op.Compacted = func(_ context.Context, topics []string) ([]string, error) { checked = topics; return topics[:1], nil }
	s.r = s.op.Replays()

	_, err := orderReplay(t, s.r, everything)
	if !errors.Is(err, admin.ErrCompacted) || !strings.Contains(err.Error(), "(audit)") || !slices.Equal(checked, []string{"audit", "orders"}) {
		t.Fatalf("%v, checked the topics %v", err, checked)
	}

	o := everything
	o.Topics = []string{"orders"}
	s.op.Compacted = func(context.Context, []string) ([]string, error) { return []string{"audit"}, nil }
	s.r = s.op.Replays()
	if _, err := orderReplay(t, s.r, o); err != nil {
		t.Errorf("the compacted topic is not meant: %v", err)
	}

	s.op.Compacted = func(context.Context, []string) ([]string, error) { return nil, errors.New("no broker") }
	s.r = s.op.Replays()
	if _, err := orderReplay(t, s.r, everything); err == nil {
		t.Error("the replay continued although its state is unknown")
	}

	o.Force = true
	if _, err := orderReplay(t, s.r, o); err != nil {
		t.Error(err)
	}
}

func TestAnEnvelopeThatIsNotDeliveredIsNotReplayed(t *testing.T) {
	t.Parallel()
	c := stacktest.Client(t)
	s := newStand(t, c)
	s.append(newEnvelope("sent"))
	// Stamped before the watcher's place, committed behind it.
	sess, err := c.StartSession(options.Session().SetDefaultTransactionOptions(options.Transaction().SetReadConcern(readconcern.Majority()).SetWriteConcern(writeconcern.Majority())))
	if err != nil {
		t.Fatal(err)
	}
	defer sess.EndSession(context.WithoutCancel(t.Context()))
	if err := sess.StartTransaction(); err != nil {
		t.Fatal(err)
	}

	tx := mongo.NewSessionContext(t.Context(), sess)
	for _, id := range []string{"open", "fails"} {
		if _, err := s.shop.Collection("outbox").InsertOne(tx, newEnvelope(id)); err != nil {
			t.Fatal(err)
		}
	}

	// Append another event, so that the position is after the stamps.
	s.append(newEnvelope("other"))
	s.moveWatcher(t.Context())
	if err := sess.CommitTransaction(t.Context()); err != nil {
		t.Fatal(err)
	}

	id := s.start(everything)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var waited atomic.Bool
	if _, err := s.r.Run(ctx, id, admin.ReplayRun{Progress: func(admin.ReplayInfo) { waited.Store(true); cancel() }}); !errors.Is(err, context.Canceled) || !waited.Load() {
		t.Fatalf("it did not wait for the watcher: %v", err)
	}

	if _, err := s.r.Run(t.Context(), id, admin.ReplayRun{Patience: 300 * time.Millisecond}); !errors.Is(err, admin.ErrReplayStalled) {
		t.Errorf("a watcher that stands still: %v", err)
	}
	if got := s.listQueued(); len(got) != 0 {
		t.Errorf("replayed although the delivered events are unknown: %v", got)
	}
	// The watcher delivers one envelope. The other becomes an exception before the position passes
	// it.
	if _, err := s.box.UpdateOne(t.Context(), bson.D{{Key: "_id", Value: "fails"}}, bson.D{{Key: "$set", Value: bson.D{{Key: "state", Value: "blocked"}, {Key: "origin", Value: "stream"}}}}); err != nil {
		t.Fatal(err)
	}

	s.startWatcher(nil)
	if i, err := s.r.Run(t.Context(), id, admin.ReplayRun{}); err != nil || i.Queued != 3 {
		t.Errorf("%+v, %v", i, err)
	}
	if got := s.listQueued(); !slices.Equal(got, []string{"sent", "open", "other"}) {
		t.Errorf("replayed %v", got)
	}
}
