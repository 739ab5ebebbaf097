package admin

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/statetest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

func replayStand(t *testing.T, n int) (*replayStore, *mongo.Collection, string) {
	t.Helper()
	client := stacktest.Client(t)
	state, shop := statetest.New(t, client), stacktest.Database(t, client)
	if _, err := state.Collection("watchers").InsertOne(t.Context(), bson.D{{Key: "_id", Value: "orders/0of1"}}); err != nil {
		t.Fatal(err)
	}

	coll := shop.Collection("outbox")
	for i := range n {
		if _, err := coll.InsertOne(t.Context(), bson.D{
			{Key: "_id", Value: fmt.Sprint("e", i)},
			{Key: "aggregatetype", Value: "a"},
			{Key: "aggregateid", Value: "1"},
			{Key: "type", Value: "T"},
			{Key: "payload", Value: "large"},
			{Key: "ts", Value: bson.Timestamp{T: uint32(10 + i/2), I: 1}}, // two share each stamp
		}); err != nil {
			t.Fatal(err)
		}
	}

	r := newReplayStore(state)
	if _, err := r.Start(t.Context(), storedReplay{ID: "r1", Watcher: "orders", Query: replayQuery{Collections: []string{mongodb.Namespace(coll)}}}); err != nil {
		t.Fatal(err)
	}

	return r, coll, mongodb.Namespace(coll)
}

func TestN18_AQueuedBatchIsWrittenOnce(t *testing.T) {
	t.Parallel()
	r, coll, ns := replayStand(t, 4)
	docs, seen, err := readEnvelopes(t.Context(), coll, replayQuery{Until: bson.Timestamp{T: 100}}, bson.Timestamp{}, 3)
	// The third envelope has the same stamp as the fourth, so it is not on this page.
	if err != nil || len(docs) != 2 || seen.IsZero() {
		t.Fatalf("%d, %v, %v", len(docs), seen, err)
	}

	if docs[0].Lookup("payload").Type != bson.TypeNull {
		t.Error("the payload is read")
	}

	b := replayBatch{Name: "b1", To: replayCursor{TS: bson.Timestamp{T: 10, I: 1}}, Skipped: 1}
	for i, d := range docs {
		b.Entries = append(b.Entries, waiting.Entry{Watcher: "orders", NS: ns, Raw: d, Pos: fmt.Sprint(i), Delivery: 3, ReplayOf: "r1", Reason: waiting.Queued})
	}

	// If the outcome is unknown, the whole transaction is repeated.
	for range 3 {
		if err := r.Queue(t.Context(), "r1", b); err != nil {
			t.Fatal(err)
		}
	}

	p, err := r.Get(t.Context(), "r1")
	if err != nil || p.Queued != 2 || p.Skipped != 1 || p.Cursor != b.To || p.State != ReplayRunning || p.StartedAt.IsZero() {
		t.Errorf("%+v, %v", p, err)
	}

	// Another process has read the same state.
	b.Name = "b2"
	if err := r.Queue(t.Context(), "r1", b); !errors.Is(err, ErrReplayMoved) {
		t.Errorf("%v", err)
	}
	if n, err := r.Outstanding(t.Context(), "r1", 10); err != nil || n != 2 {
		t.Errorf("outstanding: %d, %v", n, err)
	}
	if err := r.End(t.Context(), "r1", ReplayDone, 5); err != nil {
		t.Fatal(err)
	}
	if p, err := r.Get(t.Context(), "r1"); err != nil || p.Skipped != 6 || p.FinishedAt == nil || time.Since(*p.FinishedAt).Abs() > time.Minute {
		t.Errorf("%+v, %v", p, err)
	}
	if _, err := r.Get(t.Context(), "nobody"); !errors.Is(err, mongodb.ErrNotFound) {
		t.Error(err)
	}
}

func TestAnEnvelopeThatChangedMeanwhileIsLeftAlone(t *testing.T) {
	t.Parallel()
	r, coll, ns := replayStand(t, 4)
	router, err := routing.New(routing.Config{Template: "{aggregatetype}"})
	if err != nil {
		t.Fatal(err)
	}
	u := &replayRun{replays: Replays{op: Operator{State: r.state, Watcher: "orders", Router: router}, stored: r}, doc: storedReplay{ID: "r1", Delivery: 1}}
	q := u.replays.completeQuery(replayQuery{Until: bson.Timestamp{T: 100}})
	docs, _, err := readEnvelopes(t.Context(), coll, q, bson.Timestamp{}, 10)
	if err != nil || len(docs) != 4 {
		t.Fatalf("%d, %v", len(docs), err)
	}
	items, err := u.selectItems(t.Context(), ns, docs, q)
	if err != nil || len(items) != 4 || items[0].size < 50 {
		t.Fatalf("%+v, %v", items, err)
	}

	if _, err := coll.UpdateOne(t.Context(), bson.D{{Key: "_id", Value: "e2"}}, bson.D{{Key: "$set", Value: bson.D{{Key: "ts", Value: bson.Timestamp{T: 99}}}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := coll.DeleteOne(t.Context(), bson.D{{Key: "_id", Value: "e0"}}); err != nil {
		t.Fatal(err)
	}
	entries, err := u.newEntries(t.Context(), coll, items)
	var ids []string
	for _, e := range entries {
		ids = append(ids, e.Raw.Lookup("_id").StringValue()+" "+e.Raw.Lookup("payload").StringValue())
	}
	slices.Sort(ids)
	if err != nil || !slices.Equal(ids, []string{"e1 large", "e3 large"}) {
		t.Errorf("%v, %v", ids, err)
	}
}

func TestAReplayReadsEveryStampWhole(t *testing.T) {
	t.Parallel()
	_, coll, _ := replayStand(t, 10)
	var all []string
	after := bson.Timestamp{}
	for {
		docs, _, err := readEnvelopes(t.Context(), coll, replayQuery{From: bson.Timestamp{T: 11}, Until: bson.Timestamp{T: 13, I: 1}}, after, 1)
		if err != nil {
			t.Fatal(err)
		}
		if len(docs) == 0 {
			break
		}
		for _, d := range docs {
			all = append(all, d.Lookup("_id").StringValue())
		}
		after = parseStamp(docs[len(docs)-1])
	}

	slices.Sort(all)
	if !slices.Equal(all, []string{"e2", "e3", "e4", "e5", "e6", "e7"}) {
		t.Errorf("read %v", all)
	}
}
