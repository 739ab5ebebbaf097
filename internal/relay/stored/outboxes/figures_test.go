package outboxes_test

import (
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

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
		"behind": {bson.D{{Key: "ts", Value: bson.D{{Key: "$gt", Value: after}}}}, bson.D{{Key: "ts", Value: 1}}},
		"due":    {bson.D{{Key: "dueAt", Value: bson.D{{Key: "$type", Value: "date"}}}}, bson.D{{Key: "dueAt", Value: 1}}},
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
