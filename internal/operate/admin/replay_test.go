package admin_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/statetest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/admin/admintest"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"

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

	mu   sync.Mutex
	done []waiting.Document
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

// newRelayStep returns a function that sends up to n waiting envelopes, as the relay does.
func (s *stand) newRelayStep(n int64) func(ctx context.Context) {
	return func(ctx context.Context) {
		coll := s.state.Collection("waiting")
		cur, err := coll.Find(ctx, bson.D{}, options.Find().SetSort(bson.D{{Key: "pos", Value: 1}}).SetLimit(n))
		if err != nil {
			return
		}
		var docs []waiting.Document
		if cur.All(ctx, &docs) != nil {
			return
		}

		// The end of a replay is visible when its last document is gone, so the list is complete before sent can read it.
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, d := range docs {
			filter := bson.D{{Key: "id", Value: d.ID}, {Key: "delivery", Value: d.Delivery}}
			res, err := coll.DeleteOne(ctx, filter)
			if err != nil && ctx.Err() == nil {
				s.t.Error(err)
			}
			if err == nil && res.DeletedCount == 1 {
				s.done = append(s.done, d)
			}
		}
	}
}

// sent returns the documents that the steps of the relay have sent.
func (s *stand) sent() []waiting.Document {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.done)
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

// queued returns what waits in the order of the positions.
func (s *stand) queued() []waiting.Document {
	s.t.Helper()
	cur, err := s.state.Collection("waiting").Find(s.t.Context(), bson.D{{Key: "origin", Value: "replay"}}, options.Find().SetSort(bson.D{{Key: "pos", Value: 1}}))
	if err != nil {
		s.t.Fatal(err)
	}
	var list []waiting.Document
	if err := cur.All(s.t.Context(), &list); err != nil {
		s.t.Fatal(err)
	}
	return list
}

func (s *stand) listQueued() []string {
	s.t.Helper()
	ids := []string{}
	for _, d := range s.queued() {
		ids = append(ids, d.ID.StringValue())
	}
	return ids
}

// wait lets the relay store the envelope with this id as waiting.
func (s *stand) wait(id string) {
	s.t.Helper()
	e := waiting.Entry{Watcher: "orders", NS: s.ns(), Raw: s.findEnvelope(id), Key: "7", Pos: "82", Reason: waiting.Parked, Origin: waiting.OriginStream}
	admintest.StoreWaiting(s.t, s.state.Collection("waiting"), e)
}

func TestN18_AReplayIsANewDeliveryOfTheSameEnvelope(t *testing.T) {
	t.Parallel()
	s := newStand(t, stacktest.Client(t))
	s.append(
		newEnvelope("a", bson.E{Key: "sentAt", Value: time.Now()}, bson.E{Key: "sent", Value: bson.A{}}, bson.E{Key: "headers", Value: bson.D{{Key: "h", Value: "v"}}}),
		newEnvelope("b", bson.E{Key: "key", Value: int32(5)}, bson.E{Key: "slot", Value: int32(77)}),
		newEnvelope("waits"),
		newEnvelope("dead"),
		newEnvelope("half"),
		newEnvelope("again"),
		newEnvelope("later", bson.E{Key: "dueAt", Value: time.Now().Add(time.Hour)}),
		bson.D{{Key: "_id", Value: "malformed"}, {Key: "ts", Value: bson.Timestamp{}}},
		newEnvelope("expired", bson.E{Key: "expiresAt", Value: time.Now().Add(-time.Second)}),
	)
	s.wait("waits")
	// One topic has rejected half, and a requeue has delivered again.
	store := s.state.Collection("letters")
	letter := func(id, topic string) letters.Letter {
		l := admintest.Letter(t, s.ns(), "8265"+id, bson.D{})
		l.Raw, l.Topic = s.findEnvelope(id), topic
		return l
	}
	ids := admintest.Store(t, store, letter("dead", ""), letter("half", "orders"), letter("again", ""))
	replayed := bson.D{{Key: "$set", Value: bson.D{{Key: "requeued", Value: bson.D{{Key: "at", Value: time.Now()}}}}}}
	if _, err := store.UpdateOne(t.Context(), bson.D{{Key: "_id", Value: ids[2]}}, replayed); err != nil {
		t.Fatal(err)
	}

	before := s.findEnvelope("a")
	s.startWatcher(nil)
	plan, err := s.r.Plan(t.Context(), everything)
	if err != nil || plan.Found != 5 || plan.LeftOut != 3 || len(plan.Topics) != 2 || plan.Topics[1].Name != "orders" || plan.Topics[1].Found != 4 ||
		plan.Collections[0].Name != s.ns() {
		t.Errorf("plan %+v, %v", plan, err)
	}

	id := s.start(everything)
	i, err := s.r.Run(t.Context(), id, admin.ReplayRun{})
	if err != nil || i.State != admin.ReplayDone || i.Queued != 4 || i.Skipped != 4 || i.Actor != "ann" || i.FinishedAt == nil {
		t.Fatalf("%+v, %v", i, err)
	}

	var old bson.Timestamp
	old.T, old.I = before.Lookup("ts").Timestamp()
	list := s.queued()
	if got := s.listQueued(); !slices.Equal(got, []string{"a", "b", "half", "again"}) {
		t.Fatalf("in the order of their positions: %v", got)
	}
	a := list[0]
	if a.Reason != waiting.Queued || a.ReplayOf != id || a.Delivery < 1 || a.Key != "7" || a.NS != s.ns() || a.Pending != nil || a.Pos != outboxes.PosAt(old) ||
		time.Since(time.UnixMilli(a.NextAt)).Abs() > time.Minute || !bytes.Equal(a.Envelope, before) {
		t.Errorf("queued as %+v", a)
	}
	if b := list[1]; b.Key != "5" || b.Delivery != a.Delivery {
		t.Errorf("queued as %+v", b)
	}
	if half := list[2]; !slices.Equal(half.Pending, []string{"audit"}) {
		t.Errorf("queued as %+v", half)
	}
	if !bytes.Equal(s.findEnvelope("a"), before) {
		t.Error("the outbox has changed")
	}

	// Until the envelopes are sent, another replay leaves them out. Then it sends them with a higher number.
	if i, err := s.r.Run(t.Context(), s.start(everything), admin.ReplayRun{}); err != nil || i.Queued != 0 {
		t.Errorf("%+v, %v", i, err)
	}
	s.newRelayStep(100)(t.Context())
	if i, err := s.r.Run(t.Context(), s.start(everything), admin.ReplayRun{}); err != nil || i.Queued != 5 || s.queued()[0].Delivery <= a.Delivery {
		t.Errorf("%+v, %v", i, err)
	}

	log, err := nodes.NewAuditLog(s.state.Collection("audit"), "", "").Latest(t.Context(), 6)
	if err != nil || len(log) != 6 || log[5].Kind != "replay_ordered" || log[4].Kind != "replay_queued" || log[4].Fields.Lookup("actor").StringValue() != "ann" {
		t.Errorf("%+v, %v", log, err)
	}
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
	if _, err := orderReplay(t, nobody.Replays(), everything); !errors.Is(err, lease.ErrNotFound) {
		t.Errorf("%v", err)
	}

	o := everything
	o.Topics = []string{"audit", "special"}
	if i, err := s.r.Run(t.Context(), s.start(o), admin.ReplayRun{}); err != nil || i.Queued != 4 || i.Skipped != 1 {
		t.Errorf("%+v, %v", i, err)
	}
	for _, e := range s.queued() {
		switch e.ID.String() {
		case `"str"`:
			if !slices.Equal(e.Pending, []string{"audit"}) {
				t.Errorf("only one of two topics is pending: %+v", e)
			}
		case `"own"`:
			if e.Pending != nil {
				t.Errorf("all of its topics are wanted, and yet it lists them: %+v", e)
			}
		}
	}
}

// An empty list comes from a program that has found nothing.
func TestAReplayOfAnEmptyListIsRejected(t *testing.T) {
	t.Parallel()
	s := newStand(t, stacktest.Client(t))
	from, none := time.Now().Add(-time.Hour), []string{}
	for name, order := range map[string]admin.ReplayOrder{
		"ids": {From: from, IDs: none}, "keys": {From: from, Keys: none}, "types": {From: from, Types: none},
		"aggregate_types": {From: from, AggregateTypes: none}, "topics": {From: from, Topics: none}, "collections": {From: from, Collections: none},
	} {
		if _, err := s.r.Plan(t.Context(), order); err == nil || !strings.HasPrefix(err.Error(), name+" is an empty list") {
			t.Errorf("%s: %v", name, err)
		}
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
	// Stamped before the watcher's place, committed after it.
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
	// The watcher delivers one envelope. The other waits before the position passes it.
	s.wait("fails")

	s.startWatcher(nil)
	if i, err := s.r.Run(t.Context(), id, admin.ReplayRun{}); err != nil || i.Queued != 3 {
		t.Errorf("%+v, %v", i, err)
	}
	if got := s.listQueued(); !slices.Equal(got, []string{"sent", "open", "other"}) {
		t.Errorf("replayed %v", got)
	}
}

// With `recording: mark`, an envelope that is claimed stays in its outbox before it is sent.
func TestAClaimedEnvelopeIsNotReplayed(t *testing.T) {
	t.Parallel()
	s := newStand(t, stacktest.Client(t))
	s.append(newEnvelope("sent"), newEnvelope("claimed"), newEnvelope("done"))
	claim := &waiting.Claim{ID: waiting.NewClaimID("orders/0of1"), Done: []int32{1}}
	for _, id := range []string{"claimed", "done"} {
		claim.Envelopes = append(claim.Envelopes, waiting.Claimed{NS: s.ns(), Key: "7", Pos: "82", Raw: s.findEnvelope(id)})
	}
	claims := s.state.Collection(waiting.ClaimsName)
	if _, err := claims.InsertOne(t.Context(), claim); err != nil {
		t.Fatal(err)
	}

	s.startWatcher(nil)
	if i, err := s.r.Run(t.Context(), s.start(everything), admin.ReplayRun{}); err != nil || i.Queued != 2 {
		t.Errorf("got %+v, %v, want 2 queued", i, err)
	}
	if got := s.listQueued(); !slices.Equal(got, []string{"sent", "done"}) {
		t.Errorf("replayed %v, want all except the claimed one", got)
	}
}
