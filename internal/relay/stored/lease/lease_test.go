package lease

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/resume"
)

func TestMain(m *testing.M) {
	stacktest.Wide(6)
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

const slotID = "orders/0of1"

// patient limits the waits for a slow server: the event happens soon, or never.
const patient = time.Minute

// newCollection returns a watchers collection for one test, and the appName of its client, which fail points
// can select.
func newCollection(t *testing.T, more ...*options.ClientOptions) (*mongo.Collection, string) {
	t.Helper()
	app := stacktest.Name(t)
	own := options.Client().SetAppName(app).SetRetryWrites(false).SetServerSelectionTimeout(patient)
	c := stacktest.Client(t, append(more, own)...)
	return stacktest.Database(t, c).Collection("watchers"), app
}

// secondClient returns the same collection through a client that the test's fail points do not affect.
func secondClient(t *testing.T, coll *mongo.Collection) *mongo.Collection {
	t.Helper()
	return stacktest.Client(t).Database(coll.Database().Name()).Collection(coll.Name())
}

// shortConfig returns a configuration with a short ttl, for tests in which a lease expires. A call may take longer
// than the ttl: if a call that times out was applied, the counts of a test would be wrong.
func shortConfig(coll *mongo.Collection, node string) Config {
	return Config{
		Collection: coll, ID: slotID, Node: node, TTL: time.Second, Renew: 200 * time.Millisecond, CallTimeout: patient / 4,
		CheckpointEvery: 20 * time.Millisecond, ReplicaSetID: "here", Log: slog.New(slog.DiscardHandler),
	}
}

// longConfig returns a configuration with a ttl that does not expire during the test.
func longConfig(coll *mongo.Collection, node string) Config {
	cfg := shortConfig(coll, node)
	cfg.TTL = 10 * patient
	return cfg
}

func newLease(t *testing.T, cfg Config) *Lease {
	t.Helper()
	return New(cfg)
}

func mustAcquire(t *testing.T, l *Lease) *Held {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	h, err := l.Acquire(ctx)
	if err != nil {
		t.Fatalf("acquiring: %v", err)
	}
	return h
}

// startRun renews until the test ends. The channel gets the error of Run.
func startRun(t *testing.T, h *Held) <-chan error {
	t.Helper()
	return startRunOf(t, h, nil)
}

// startRunOf is startRun with a source.
func startRunOf(t *testing.T, h *Held, source Source) <-chan error {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	out := make(chan error, 1)
	ended := make(chan struct{})
	go func() { defer close(ended); out <- h.Run(ctx, source) }()
	t.Cleanup(func() { cancel(); <-ended })
	return out
}

func readStored(t *testing.T, coll *mongo.Collection) Document {
	t.Helper()
	doc, _, err := Read(t.Context(), coll, slotID)
	if err != nil {
		t.Fatal(err)
	}
	return doc
}

func receiveWithin[T any](t *testing.T, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patient):
		t.Fatalf("waited %v for: %s", patient, what)
		panic("unreachable")
	}
}

// failCommand makes commands of the clients with the name app fail until off is called.
func failCommand(t *testing.T, app string, mode any, data bson.D) (off func()) {
	t.Helper()
	return stacktest.FailCommand(t, app, mode, data)
}

// newPosition returns an artificial position in the stream, at second n.
func newPosition(n uint32) resume.Position {
	data := "82" + hex32(1_700_000_000+n) + hex32(1) + "2B0229296E04"
	return resume.Position{Token: resume.TokenOf(data), ClusterTime: bson.Timestamp{T: 1_700_000_000 + n, I: 1}}
}

func hex32(n uint32) string {
	const digits = "0123456789ABCDEF"
	b := make([]byte, 8)
	for i := range b {
		b[7-i] = digits[n>>(4*i)&15]
	}
	return string(b)
}

func TestMergeOffsetsKeepsPartitionsMissingInTheSnapshot(t *testing.T) {
	t.Parallel()
	held := map[string][]int64{"a.b": {5, 6, 7}, "c": {1}}
	got := mergeOffsets(held, map[string][]int64{"a.b": {9, -1}, "d": {4}})
	want := map[string][]int64{"a.b": {9, 6, 7}, "c": {1}, "d": {4}}
	if len(got) != len(want) {
		t.Fatalf("got %v", got)
	}

	for topic, w := range want {
		for p, o := range w {
			if got[topic][p] != o {
				t.Errorf("%s[%d] = %d, want %d", topic, p, got[topic][p], o)
			}
		}
	}

	if held["a.b"][0] != 5 {
		t.Error("mergeOffsets changed its argument")
	}
}

func TestAReleasedLeaseIsTakenAtOnce(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	cfg := shortConfig(coll, "a")

	// The lease does not expire during the test.
	cfg.TTL, cfg.Renew = 4*patient, time.Second
	a := newLease(t, cfg)
	cfg.Node = "b"
	standby := newLease(t, cfg)
	h := mustAcquire(t, a)
	var took []time.Duration

	for n := uint32(1); n <= 6; n++ {
		startRun(t, h)
		got := make(chan *Held, 1)
		go func() { b, _ := standby.Acquire(t.Context()); got <- b }()

		stacktest.Eventually(t, "the standby sees the owner",
			func() bool { return *standby.reason.Load() == "owned by "+h.Document().Node })
		start := time.Now()
		if err := h.Release(t.Context(), func() Checkpoint { return Checkpoint{Position: newPosition(n)} }); err != nil {
			t.Fatal(err)
		}

		b := receiveWithin(t, got, "takeover")
		took = append(took, time.Since(start))
		if b == nil || b.Document().Position().Compare(newPosition(n)) != 0 {
			t.Fatal("the next owner did not get the final checkpoint")
		}
		if b.Document().Epoch != int64(n)+1 {
			t.Fatalf("epoch %d after %d acquisitions", b.Document().Epoch, n+1)
		}

		h, a, standby = b, standby, a
	}

	_ = h.Release(t.Context(), nil)
	t.Logf("release to takeover: %v", took)
}

func TestExpiryIsTakenByTheTimer(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	// The lease is never renewed, as after kill -9.
	h := mustAcquire(t, newLease(t, shortConfig(coll, "a")))

	start := time.Now()
	b := mustAcquire(t, newLease(t, shortConfig(coll, "b")))
	t.Logf("acquired by kill -9's standby after %v with ttl %v", time.Since(start), h.lease.cfg.TTL)

	if early := h.Document().ExpiresAt.Sub(b.Document().AcquiredAt); early > 0 {
		t.Errorf("the lease was acquired %v before it expired", early)
	}
	if h.Valid() {
		t.Error("two valid leases")
	}

	if err := b.Release(t.Context(), nil); err != nil {
		t.Error(err)
	}
}

// N5: whether Kafka should still have the transactional id depends on the last renewal of an earlier owner. The acquisition itself
// is a renewal, and would hide it.
func TestN05_AnAcquisitionKeepsTheTimeOfTheRenewalBefore(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	first := mustAcquire(t, newLease(t, longConfig(coll, "a")))
	if at := first.RenewedBefore(); !at.IsZero() {
		t.Errorf("the first owner has an owner before it, at %v", at)
	}
	if err := first.Release(t.Context(), nil); err != nil {
		t.Fatal(err)
	}

	longAgo := time.Now().Add(-8 * 24 * time.Hour).Truncate(time.Millisecond)
	set := bson.D{{Key: "$set", Value: bson.D{{Key: "renewedAt", Value: longAgo}}}}
	if _, err := coll.UpdateByID(t.Context(), slotID, set); err != nil {
		t.Fatal(err)
	}
	second := mustAcquire(t, newLease(t, longConfig(coll, "b")))
	if at := second.RenewedBefore(); !at.Equal(longAgo) || !second.Document().RenewedAt.After(longAgo) {
		t.Errorf("renewed before at %v, now at %v; want %v before", at, second.Document().RenewedAt, longAgo)
	}
}

func TestSaveAndRenewalsAreOneDocument(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	h := mustAcquire(t, newLease(t, shortConfig(coll, "a")))
	source := func() Checkpoint {
		return Checkpoint{
			Position: newPosition(7), Offsets: map[string][]int64{"outbox.event.order": {3, -1}},
			Stats: bson.D{{Key: "rate", Value: 12}},
		}
	}

	startRunOf(t, h, source)
	stacktest.Eventually(t, "the position is written",
		func() bool { return readStored(t, coll).Position().Compare(newPosition(7)) == 0 })
	hash := "abc"
	senders := sampleSenders()
	if err := h.Save(t.Context(), Update{
		Senders:      &senders,
		Offsets:      map[string][]int64{"outbox.event.order": {3, 40, 50}, "x": {1}},
		PipelineHash: &hash,
		Gap:          &Gap{Reason: "286"},
		Collections:  &[]Collection{{NS: "shop.outbox", UUID: bson.Binary{Subtype: 4, Data: make([]byte, 16)}}},
	}); err != nil {
		t.Fatal(err)
	}
	if err := h.Save(t.Context(), Update{Offsets: map[string][]int64{"x": nil}, ClearGap: true}); err != nil {
		t.Fatal(err)
	}

	after := readStored(t, coll).Seq
	stacktest.Eventually(t, "a renewal after the save", func() bool { return readStored(t, coll).Seq > after })
	d := readStored(t, coll)
	if o := d.OffsetMap(); len(o) != 1 || len(o["outbox.event.order"]) != 3 || o["outbox.event.order"][1] != 40 {
		t.Errorf("offsets after a renewal: %v, want the saved ones", o)
	}
	if got := d.Senders(); len(got) != 1 || got[0].ID != senders[0].ID || got[0].Generation != 1 || got[0].Open[0] != senders[0].Open[0] ||
		got[0].EndOffsets["t.u"][1] != 9 {
		t.Errorf("senders: %+v", got)
	}
	if d.PipelineHash != "abc" || len(d.Collections) != 1 || d.Gap != nil {
		t.Errorf("document: %+v", d)
	}
	if v, ok := d.Stats.Lookup("rate").AsInt64OK(); !ok || v != 12 {
		t.Error("stats are missing")
	}
	if err := h.Release(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if err := h.Save(t.Context(), Update{}); !errors.Is(err, ErrReleased) {
		t.Errorf("Save after the release returned %v", err)
	}
}

// Many drops leave the lost history in the document, and a repeated write adds an incident once.
func TestIncidentsAreBoundedByKind(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	h := mustAcquire(t, newLease(t, shortConfig(coll, "a")))
	save := func(incident Incident) {
		t.Helper()
		if err := h.Save(t.Context(), Update{Incident: &incident}); err != nil {
			t.Fatal(err)
		}
	}

	lost := Incident{ID: bson.NewObjectID(), Lost: &LostHistory{Reason: "286"}}
	save(lost)
	for n := range int64(mostIncidents + 5) {
		dropped := Incident{ID: bson.NewObjectID(), Discarded: &Discarded{NS: "shop.outbox", Events: n}}
		save(dropped)
		save(dropped)
	}

	got := readStored(t, coll).Incidents
	if len(got) != mostIncidents+1 || got[0].ID != lost.ID || got[1].Discarded.Events != 5 || got[mostIncidents].Discarded.Events != mostIncidents+4 {
		t.Errorf("incidents: got %+v, want the lost history and the newest %d drops", got, mostIncidents)
	}
	lost.Lost.Swept = 9
	save(lost)
	if got := readStored(t, coll).Incidents; len(got) != mostIncidents+1 || got[0].Lost.Swept != 0 {
		t.Errorf("incidents after a later write of the same: %+v", got)
	}
}

// TestN22_AnOrderOutlivesTheSweepUnderWay checks that the owner's writes about its own sweep do not replace a
// sweep that an operator ordered during it, and that both ranges are swept.
func TestN22_AnOrderOutlivesTheSweepUnderWay(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	h := mustAcquire(t, newLease(t, shortConfig(coll, "a")))
	own := Gap{Reason: "286", From: bson.Timestamp{T: 50}, To: bson.Timestamp{T: 90}, Since: time.Now().Add(-time.Minute)}
	save := func(u Update) {
		t.Helper()
		if err := h.Save(t.Context(), u); err != nil {
			t.Fatal(err)
		}
	}

	ordered := func(from uint32) {
		t.Helper()
		if g := readStored(t, coll).Gap; g == nil || g.Reason != GapRequested || g.From.T != from || !g.To.IsZero() {
			t.Fatalf("the document has the gap %+v, want the order, from %d on", g, from)
		}
	}

	save(Update{Gap: &own})
	if err := RequestSweep(t.Context(), coll, "orders/0of1", bson.Timestamp{T: 70}, time.Second); err != nil {
		t.Fatal(err)
	}

	ordered(50)
	own.Cursor = bson.Timestamp{T: 80}
	save(Update{Gap: &own, GapSince: own.Since})
	ordered(50)
	save(Update{ClearGap: true, GapSince: own.Since})
	ordered(50)
	earlier := Gap{Reason: "280", To: bson.Timestamp{T: 95}, Since: time.Now()}
	// The owner finds a gap before it reads the order.
	save(Update{Gap: &earlier})
	ordered(0)
	order := readStored(t, coll).Gap
	// The owner executes the order.
	save(Update{Gap: &own, GapSince: order.Since})
	save(Update{ClearGap: true, GapSince: own.Since})
	if g := readStored(t, coll).Gap; g != nil {
		t.Errorf("gap %+v, want none", g)
	}
}
