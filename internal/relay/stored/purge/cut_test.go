package purge

import (
	"errors"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

func setPosition(t *testing.T, state state.Database, slot string, set bson.D) {
	t.Helper()
	if _, err := state.Collection("watchers").UpdateOne(t.Context(), bson.D{{Key: "_id", Value: slot}}, bson.D{{Key: "$set", Value: set}}, options.UpdateOne().SetUpsert(true)); err != nil {
		t.Fatal(err)
	}
}

func TestN25_AGapStopsAPurgeThatIsUnderWay(t *testing.T) {
	t.Parallel()
	state := state.Of(newDatabase(t))
	o := outboxes.Outbox{DB: "shop", Coll: "outbox", UUID: [16]byte{7}}
	if _, err := outboxes.NewRegistry(state.Collection("collections")).Register(t.Context(), o.UUID, o.NS(), "w", bson.Timestamp{}); err != nil {
		t.Fatal(err)
	}

	at := bson.Timestamp{T: 10_000, I: 5}
	setPosition(t, state, "w/0of1", bson.D{{Key: "clusterTime", Value: at}})
	cuts := NewCuts(state, 1500*time.Millisecond)
	if cut, err := cuts.Of(t.Context(), o); err != nil || cut != (Cut{UUID: o.UUID, Before: bson.Timestamp{T: 9998, I: 5}, Position: at, Slot: "w/0of1"}) {
		t.Fatalf("%+v, %v", cut, err)
	}

	setPosition(t, state, "w/0of1", bson.D{{Key: "gap", Value: bson.D{{Key: "reason", Value: "286"}}}})
	// The margin has passed, however long the test took.
	cuts.readAt = time.Now().Add(time.Hour)
	if _, err := cuts.Of(t.Context(), o); err != nil {
		t.Fatalf("a reading of a moment ago: %v", err)
	}

	cuts.readAt = time.Now().Add(-2 * recheckEvery)
	var held *HeldError
	if _, err := cuts.Of(t.Context(), o); !errors.As(err, &held) || held.Hold != HoldGap || held.Slot != "w/0of1" {
		t.Errorf("the gap was not seen: %v", err)
	}
}

func TestCutGoesNoFurtherThanItKeeps(t *testing.T) {
	t.Parallel()
	at := bson.Timestamp{T: 100, I: 7}
	for keep, want := range map[time.Duration]bson.Timestamp{
		0: at, -1: at, 1: {T: 99, I: 7}, time.Second: {T: 99, I: 7}, 1001 * time.Millisecond: {T: 98, I: 7}, 100 * time.Second: {}, time.Hour: {},
	} {
		if got := mongodb.Earlier(at, keep); got != want {
			t.Errorf("%v before %v is %v, want %v", keep, at, got, want)
		}
	}
}

func TestCountPurgeableAgreesWithThePurge(t *testing.T) {
	t.Parallel()
	coll := newDatabase(t).Collection("outbox")
	if err := outboxes.EnsureIndexes(t.Context(), coll); err != nil {
		t.Fatal(err)
	}

	var docs []any
	for i := range 20 {
		docs = append(docs, bson.D{{Key: "ts", Value: bson.Timestamp{T: uint32(100 + i), I: 1}}})
	}
	old := bson.Timestamp{T: 90, I: 1}
	docs = append(docs,
		bson.D{{Key: "ts", Value: old}, {Key: "state", Value: "retry"}},
		bson.D{{Key: "ts", Value: old}, {Key: "dueAt", Value: time.Now()}},
		bson.D{{Key: "ts", Value: old}, {Key: "dueAt", Value: time.Now()}, {Key: "state", Value: "retry"}},
		bson.D{{Key: "ts", Value: old}, {Key: "dueAt", Value: nil}, {Key: "state", Value: nil}},
		// A list is no time.
		bson.D{{Key: "_id", Value: "list"}, {Key: "ts", Value: bson.A{old, bson.Timestamp{T: 95}}}}, bson.D{{Key: "ts", Value: old}, {Key: "dueAt", Value: bson.A{time.Now()}}},
		bson.D{{Key: "_id", Value: outboxes.FirstObjectID(time.Unix(109, 0))}}, bson.D{{Key: "_id", Value: outboxes.FirstObjectID(time.Unix(110, 0))}},
		bson.D{{Key: "_id", Value: outboxes.FirstObjectID(time.Unix(108, 0))}, {Key: "state", Value: "retry"}}, bson.D{{Key: "_id", Value: "timeless"}},
	)
	if _, err := coll.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}

	cut := Cut{Before: bson.Timestamp{T: 110}}
	if n, err := CountPurgeable(t.Context(), coll, cut); err != nil || n != (Count{Stamped: 12, Unstamped: 2, Timeless: 2}) {
		t.Fatalf("%+v, %v", n, err)
	}

	irregular := cut
	irregular.IrregularIDs = true
	if n, err := CountPurgeable(t.Context(), coll, irregular); err != nil || n != (Count{Stamped: 12, Timeless: 5}) {
		t.Fatalf("with irregular ids: %+v, %v", n, err)
	}

	first, err := PurgeBatch(t.Context(), coll, bson.Timestamp{}, cut, 8)
	// Four of the eight envelopes are scheduled, or have a list of times.
	if err != nil || !first.More || first.Deleted != 4 {
		t.Fatalf("%+v, %v", first, err)
	}
	rest, err := PurgeBatch(t.Context(), coll, first.Upto, cut, 100)
	if err != nil || rest.More || rest.Deleted != 8 {
		t.Fatalf("%+v, %v", rest, err)
	}
}

func TestMarginOfThisServer(t *testing.T) {
	t.Parallel()
	if m, err := mongodb.AskMargin(t.Context(), newDatabase(t).Client()); err != nil || m < mongodb.MinMargin {
		t.Errorf("%v, %v", m, err)
	}

	away, err := mongo.Connect(options.Client().ApplyURI("mongodb://127.0.0.1:1").SetServerSelectionTimeout(50 * time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	defer away.Disconnect(t.Context())

	if m, err := mongodb.AskMargin(t.Context(), away); err == nil {
		t.Errorf("a server that is away returned %v", m)
	}
	if mongodb.Margin(t.Context(), away) != mongodb.MinMargin {
		t.Error("no margin of a server that is away")
	}
}

// TestN25_APositionInTheFutureStopsThePurge: after a restored backup, or with a damaged document, it is that of another history.
func TestN25_APositionInTheFutureStopsThePurge(t *testing.T) {
	t.Parallel()
	state := state.Of(newDatabase(t))
	o := outboxes.Outbox{DB: "shop", Coll: "outbox", UUID: [16]byte{8}}
	if _, err := outboxes.NewRegistry(state.Collection("collections")).Register(t.Context(), o.UUID, o.NS(), "w", bson.Timestamp{}); err != nil {
		t.Fatal(err)
	}

	now := uint32(time.Now().Unix())
	for _, c := range []struct {
		at   uint32
		hold bool
	}{{now, false}, {now + 60, false}, {now + 1_000_000, true}} {
		setPosition(t, state, "w/0of1", bson.D{{Key: "clusterTime", Value: bson.Timestamp{T: c.at, I: 1}}})

		w, err := readPositions(t.Context(), state)
		if err != nil {
			t.Fatal(err)
		}

		_, err = w.Cut(o, time.Hour)
		var held *HeldError
		if errors.As(err, &held) && held.Hold == HoldAhead != c.hold || (err != nil) != c.hold {
			t.Errorf("a position %d s from now: %v", int64(c.at)-int64(now), err)
		}
	}
}

// TestN25_SlotsWithDifferentConfigurationsPurgeNothing: during a rolling change of `watch`, one of them may not read the collection yet.
func TestN25_SlotsWithDifferentConfigurationsPurgeNothing(t *testing.T) {
	t.Parallel()
	state := state.Of(newDatabase(t))
	o := outboxes.Outbox{DB: "shop", Coll: "outbox", UUID: [16]byte{8}}
	if _, err := outboxes.NewRegistry(state.Collection("collections")).Register(t.Context(), o.UUID, o.NS(), "w", bson.Timestamp{}); err != nil {
		t.Fatal(err)
	}
	position := func(slot, hash string) {
		t.Helper()
		setPosition(t, state, slot, bson.D{{Key: "clusterTime", Value: bson.Timestamp{T: 100, I: 1}}, {Key: "pipelineHash", Value: hash}})
	}

	position("w/0of2", "new")
	position("w/1of2", "old")
	var held *HeldError
	if _, err := NewCuts(state, time.Second).Of(t.Context(), o); !errors.As(err, &held) || held.Hold != HoldDivided {
		t.Errorf("the slots have different configurations: %v", err)
	}
	position("w/1of2", "new")
	if _, err := NewCuts(state, time.Second).Of(t.Context(), o); err != nil {
		t.Error(err)
	}
}

// TestN25_ACollectionThatGetsTheNameDuringAPurgeStays: its envelopes may be unread, and a rename may come at any moment.
func TestN25_ACollectionThatGetsTheNameDuringAPurgeStays(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	coll := db.Collection("outbox")
	old := bson.NewObjectIDFromTimestamp(time.Unix(10, 0))
	for _, name := range []string{"outbox", "other"} {
		if _, err := db.Collection(name).InsertMany(t.Context(), []any{
			bson.D{{Key: "_id", Value: "stamped"}, {Key: "ts", Value: bson.Timestamp{T: 10, I: 1}}}, bson.D{{Key: "_id", Value: old}},
		}); err != nil {
			t.Fatal(err)
		}
	}
	list, err := outboxes.ListOutboxes(t.Context(), db.Client(), func(_, coll []byte) bool { return string(coll) == "outbox" }, db.Name())
	if err != nil || len(list) != 1 {
		t.Fatalf("%+v, %v", list, err)
	}
	now := bson.Timestamp{T: uint32(time.Now().Add(time.Hour).Unix())}
	cut := Cut{UUID: list[0].UUID, Before: bson.Timestamp{T: 100}, Position: now}
	candidates := &Candidates{}
	if err := candidates.read(t.Context(), coll, cut); err != nil || candidates.Len() == 0 {
		t.Fatalf("%d candidates, %v", candidates.Len(), err)
	}

	if err := db.Client().Database("admin").RunCommand(t.Context(), bson.D{
		{Key: "renameCollection", Value: db.Name() + ".other"}, {Key: "to", Value: db.Name() + ".outbox"}, {Key: "dropTarget", Value: true},
	}).Err(); err != nil {
		t.Fatal(err)
	}
	var held *HeldError
	if _, err := PurgeBatch(t.Context(), coll, bson.Timestamp{}, cut, 10); !errors.As(err, &held) || held.Hold != HoldReplaced {
		t.Errorf("the purge of stamped envelopes: %v", err)
	}
	held = nil
	if _, err := candidates.purge(t.Context(), coll, cut, 10); !errors.As(err, &held) || held.Hold != HoldReplaced {
		t.Errorf("the purge of others: %v", err)
	}
	if n, err := coll.CountDocuments(t.Context(), bson.D{}); err != nil || n != 2 {
		t.Errorf("%d envelopes are left, %v", n, err)
	}
}

// TestN25_UnreadEnvelopesAreNotPurged: a collection may get its watched name by a rename, long after its envelopes were
// stamped. They are not delivered before the watcher has come to the rename.
func TestN25_UnreadEnvelopesAreNotPurged(t *testing.T) {
	t.Parallel()
	state := state.Of(newDatabase(t))
	if err := state.Mongo().CreateCollection(t.Context(), "outbox"); err != nil {
		t.Fatal(err)
	}
	list, err := outboxes.ListOutboxes(t.Context(), state.Client(), func(_, coll []byte) bool { return string(coll) == "outbox" }, state.Name())
	if err != nil || len(list) != 1 {
		t.Fatalf("%+v, %v", list, err)
	}

	o, r := list[0], outboxes.NewRegistry(state.Collection("collections"))
	holds := func(want Block) {
		t.Helper()
		var held *HeldError
		_, err := NewCuts(state, time.Second).Of(t.Context(), o)
		if errors.As(err, &held) != (want != "") || held != nil && held.Hold != want {
			t.Errorf("the purge is held with %v, want %q", err, want)
		}
	}

	renamed := bson.Timestamp{T: 10_000, I: 5}
	if _, err := r.Register(t.Context(), o.UUID, o.NS(), "w", renamed); err != nil {
		t.Fatal(err)
	}
	setPosition(t, state, "w/0of1", bson.D{{Key: "clusterTime", Value: bson.Timestamp{T: 9_999, I: 1}}})
	holds(HoldUnread)
	setPosition(t, state, "w/0of1", bson.D{{Key: "clusterTime", Value: renamed}})
	holds("")

	if err := r.Leave(t.Context(), o.UUID, "w", bson.Timestamp{T: 11_000, I: 1}); err != nil {
		t.Fatal(err)
	}
	setPosition(t, state, "w/0of1", bson.D{{Key: "clusterTime", Value: bson.Timestamp{T: 12_000, I: 1}}})
	holds(HoldUnread)
	if before, err := r.Register(t.Context(), o.UUID, o.NS(), "w", bson.Timestamp{T: 11_500, I: 1}); err != nil || before.Left.T != 11_000 {
		t.Fatalf("%+v, %v", before, err)
	}
	holds("")

	// A new collection takes the name of the registered collection.
	if err := state.Mongo().Collection("outbox").Drop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := state.Mongo().CreateCollection(t.Context(), "outbox"); err != nil {
		t.Fatal(err)
	}
	holds(HoldReplaced)
}

func TestN27_TheRegistryStoresHowFarACollectionWasRead(t *testing.T) {
	t.Parallel()
	at := func(s uint32) bson.Timestamp { return bson.Timestamp{T: s} }
	for _, c := range []struct {
		name     string
		claim    outboxes.Registration
		position uint32
		upTo     uint32
		appeared bool
	}{
		{"known before the position", outboxes.Registration{Seen: at(5)}, 10, 0, false},
		{"new after the position", outboxes.Registration{Seen: at(15)}, 10, 0, true},
		{"back after the position", outboxes.Registration{Seen: at(15), Left: at(7)}, 10, 7, true},
		{"left and back after the position, according to another slot", outboxes.Registration{Seen: at(15), Left: at(12)}, 10, 0, true},
		{"no position: everything is read anyway", outboxes.Registration{Seen: at(15)}, 0, 0, false},
	} {
		if upTo, appeared := c.claim.ReadUpTo(at(c.position)); upTo != at(c.upTo) || appeared != c.appeared {
			t.Errorf("%s: up to %v, appeared %v, want %v and %v", c.name, upTo, appeared, at(c.upTo), c.appeared)
		}
	}
}

// A read that fails in the middle has not learned at which position its candidates may go. The next pass must not purge
// them.
func TestN25_AFailedReadOfCandidatesPurgesNothing(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	client := stacktest.Client(t, options.Client().SetAppName(app))
	coll := stacktest.Database(t, client).Collection("outbox")
	if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: outboxes.FirstObjectID(time.Unix(100, 0))}}); err != nil {
		t.Fatal(err)
	}

	// The reads of the ids with times succeed, and the search for ids without one fails.
	stacktest.FailCommand(t, app, bson.D{{Key: "skip", Value: 2}}, bson.D{
		{Key: "failCommands", Value: bson.A{"aggregate"}}, {Key: "errorCode", Value: int32(50)},
	})
	c := &Candidates{}
	cut := Cut{Before: bson.Timestamp{T: 200}, Position: bson.Timestamp{T: 150}}
	if err := c.read(t.Context(), coll, cut); err == nil {
		t.Fatal("the read did not fail")
	}
	if c.Len() != 0 || !c.complete.IsZero() {
		t.Errorf("%d candidates are left, complete %v", c.Len(), c.complete)
	}
	// The search is not repeated in each pass.
	if !c.searchAfter.After(time.Now()) {
		t.Error("the next pass searches again")
	}
}
