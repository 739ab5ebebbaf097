package outboxes_test

import (
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// TestFiguresAreBounded: envelopes after a position and due envelopes are counted up to the limit, by
// indexes.
func TestFiguresAreBounded(t *testing.T) {
	t.Parallel()
	coll := database(t).Collection("outbox")
	after := bson.Timestamp{T: 1000, I: 5}
	if n, oldest, err := outboxes.CountAfter(t.Context(), coll, after, 10); n != 0 || !oldest.IsZero() || err != nil {
		t.Fatalf("a collection that is not there: %d %v %v", n, oldest, err)
	}
	if err := outboxes.EnsureIndexes(t.Context(), coll); err != nil {
		t.Fatal(err)
	}

	due := time.UnixMilli(1_900_000_000_000)
	var docs []any
	for i := range uint32(20) {
		docs = append(docs, bson.D{{Key: "_id", Value: i}, {Key: "ts", Value: bson.Timestamp{T: 1000, I: i + 1}}})
		docs = append(docs, bson.D{{Key: "_id", Value: 100 + i}, {Key: "ts", Value: bson.Timestamp{T: 1, I: i + 1}}, {Key: "dueAt", Value: due.Add(time.Duration(i) * time.Hour)}})
	}

	docs = append(docs, bson.D{{Key: "_id", Value: "claimed"}, {Key: "ts", Value: bson.Timestamp{T: 1, I: 99}}, {Key: "scheduledFor", Value: due.Add(-time.Hour)}})
	if _, err := coll.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}

	for limit, want := range map[int64]int64{100: 15, 7: 7} {
		if n, oldest, err := outboxes.CountAfter(t.Context(), coll, after, limit); n != want || oldest != (bson.Timestamp{T: 1000, I: 6}) || err != nil {
			t.Errorf("behind, at most %d: %d, the oldest %v, %v", limit, n, oldest, err)
		}
	}

	for limit, want := range map[int64]int64{100: 20, 7: 7} {
		if n, first, err := outboxes.CountDue(t.Context(), coll, slot.Range{}, limit); n != want || !first.Equal(due) || err != nil {
			t.Errorf("scheduled, at most %d: %d, the first %v, %v", limit, n, first, err)
		}
	}

	for name, q := range map[string]struct{ filter, sort bson.D }{
		"behind": {bson.D{envelope.Stamped(bson.E{Key: "$gt", Value: after})}, bson.D{{Key: "ts", Value: 1}}},
		"due":    {bson.D{envelope.Scheduled()}, bson.D{{Key: "dueAt", Value: 1}}},
	} {
		var plan bson.Raw
		if err := coll.Database().RunCommand(t.Context(), bson.D{{Key: "explain", Value: bson.D{
			{Key: "find", Value: "outbox"}, {Key: "filter", Value: q.filter}, {Key: "sort", Value: q.sort}, {Key: "limit", Value: 1},
		}}}).Decode(&plan); err != nil {
			t.Fatal(err)
		}
		if text := plan.Lookup("queryPlanner", "winningPlan").String(); strings.Contains(text, "COLLSCAN") || strings.Contains(text, `"SORT"`) || !strings.Contains(text, "IXSCAN") {
			t.Errorf("%s is no walk of an index: %s", name, text)
		}
	}
}

// TestAListOfTimesIsNoTime: a comparison matches a list by its elements.
func TestAListOfTimesIsNoTime(t *testing.T) {
	t.Parallel()
	coll := database(t).Collection("outbox")
	if err := outboxes.EnsureIndexes(t.Context(), coll); err != nil {
		t.Fatal(err)
	}
	insert := func(ts, dueAt any) {
		t.Helper()
		if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "ts", Value: ts}, {Key: "dueAt", Value: dueAt}}); err != nil {
			t.Fatal(err)
		}
	}
	check := func(want bson.Timestamp, n int64, due time.Time) {
		t.Helper()
		if oldest, found, err := outboxes.OldestTS(t.Context(), coll); oldest != want || found != (n > 0) || err != nil {
			t.Errorf("the oldest is %v, %v, %v, want %v", oldest, found, err, want)
		}
		if pending, oldest, err := outboxes.CountAfter(t.Context(), coll, bson.Timestamp{T: 1}, 100); oldest != want || (pending > 0) != (n > 0) || err != nil {
			t.Errorf("%d are pending, the oldest %v, %v, want %d, %v", pending, oldest, err, n, want)
		}
		if scheduled, first, err := outboxes.CountDue(t.Context(), coll, slot.Range{}, 100); (scheduled > 0) != (n > 0) || !first.Equal(due) || err != nil {
			t.Errorf("%d are scheduled, the first %v, %v, want %d, %v", scheduled, first, err, n, due)
		}
		if has, err := outboxes.HasScheduled(t.Context(), coll, slot.Range{}); has != (n > 0) || err != nil {
			t.Errorf("has scheduled envelopes: %v, %v", has, err)
		}
	}

	early, due := bson.Timestamp{T: 10, I: 1}, time.UnixMilli(1_900_000_000_000).UTC()
	insert(bson.A{early, bson.Timestamp{T: 20}}, bson.A{due.Add(-time.Hour), due})
	insert("text", "text")
	check(bson.Timestamp{}, 0, time.Time{})
	insert(bson.Timestamp{T: 15, I: 1}, due)
	check(bson.Timestamp{T: 15, I: 1}, 1, due)
}

// The count of the scheduled envelopes, which an owner repeats every few seconds, reads the index alone.
func TestACountOfScheduledReadsNoEnvelope(t *testing.T) {
	t.Parallel()
	coll := database(t).Collection("outbox")
	if err := outboxes.EnsureIndexes(t.Context(), coll); err != nil {
		t.Fatal(err)
	}
	var docs []any
	for i := range 50 {
		docs = append(docs, bson.D{{Key: "dueAt", Value: time.UnixMilli(int64(i - 10))}})
	}
	if _, err := coll.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}

	if err := coll.Database().RunCommand(t.Context(), bson.D{{Key: "profile", Value: 2}}).Err(); err != nil {
		t.Fatal(err)
	}
	if n, first, err := outboxes.CountDue(t.Context(), coll, slot.Range{}, 100); n != 50 || first.UnixMilli() != -10 || err != nil {
		t.Errorf("%d are scheduled, the first %v, %v", n, first, err)
	}
	var count struct {
		Keys int64 `bson:"keysExamined"`
		Docs int64 `bson:"docsExamined"`
	}
	err := coll.Database().Collection("system.profile").FindOne(t.Context(), bson.D{{Key: "op", Value: "command"}, {Key: "command.aggregate", Value: coll.Name()}}).Decode(&count)
	if err != nil || count.Keys < 50 || count.Docs > 0 {
		t.Errorf("the count has read %d entries and %d envelopes, %v", count.Keys, count.Docs, err)
	}
}
