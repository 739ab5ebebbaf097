package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/state/statetest"
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
	if err := r.Start(t.Context(), storedReplay{ID: "r1", Watcher: "orders", Query: replayQuery{Collections: []string{mongodb.Namespace(coll)}}}); err != nil {
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

	b := replayBatch{Name: "b1", NS: ns, To: replayCursor{TS: bson.Timestamp{T: 10, I: 1}}, Skipped: 1}
	for _, d := range docs {
		b.Envelopes = append(b.Envelopes, requeue{ID: d.Lookup("_id"), TS: parseStamp(d)})
	}

	// If the outcome is unknown, the whole transaction is repeated.
	for range 3 {
		if n, _, err := r.Queue(t.Context(), "r1", "orders", b); err != nil || n != 2 {
			t.Fatalf("%d, %v", n, err)
		}
	}

	p, err := r.Get(t.Context(), "r1")
	if err != nil || p.Queued != 2 || p.Skipped != 1 || p.Cursor != b.To || p.State != ReplayRunning || p.StartedAt.IsZero() {
		t.Errorf("%+v, %v", p, err)
	}

	// Another process has read the same state.
	b.Name = "b2"
	if _, _, err := r.Queue(t.Context(), "r1", "orders", b); !errors.Is(err, ErrReplayMoved) {
		t.Errorf("%v", err)
	}
	if n, err := coll.CountDocuments(t.Context(), bson.D{{Key: "delivery", Value: 1}, {Key: "state", Value: "retry"}}); err != nil || n != 2 {
		t.Errorf("%d were queued once, %v", n, err)
	}

	for _, indexed := range []bool{false, true} {
		if indexed {
			if err := outboxes.EnsureIndexes(t.Context(), coll); err != nil {
				t.Fatal(err)
			}
		}
		if n, err := r.Outstanding(t.Context(), "r1", ns, 10); err != nil || n != 2 {
			t.Errorf("outstanding: %d, %v (with its index: %v)", n, err, indexed)
		}
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
	r, coll, ns := replayStand(t, 6)
	docs, _, err := readEnvelopes(t.Context(), coll, replayQuery{Until: bson.Timestamp{T: 100}}, bson.Timestamp{}, 10)
	if err != nil || len(docs) != 6 {
		t.Fatalf("%d, %v", len(docs), err)
	}

	for id, set := range map[string]bson.E{
		"e0": {Key: "state", Value: "blocked"}, "e1": {Key: "dueAt", Value: time.Now()}, "e2": {Key: "ts", Value: bson.Timestamp{T: 99}},
	} {
		if _, err := coll.UpdateOne(t.Context(), bson.D{{Key: "_id", Value: id}}, bson.D{{Key: "$set", Value: bson.D{set}}}); err != nil {
			t.Fatal(err)
		}
	}

	b := replayBatch{Name: "b", NS: ns, To: replayCursor{At: 1}}
	for _, d := range docs {
		b.Envelopes = append(b.Envelopes, requeue{ID: d.Lookup("_id"), TS: parseStamp(d)})
	}
	if n, _, err := r.Queue(t.Context(), "r1", "orders", b); err != nil || n != 3 {
		t.Errorf("%d, %v", n, err)
	}
	if _, _, err := r.Queue(t.Context(), "r1", "nobody", replayBatch{Name: "c", NS: ns, From: b.To, To: b.To}); !errors.Is(err, mongodb.ErrNoWatcher) {
		t.Errorf("N3: without a fence: %v", err)
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

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := readEnvelopes(ctx, coll, replayQuery{}, after, 1); err == nil {
		t.Error("read on after the end")
	}
}
