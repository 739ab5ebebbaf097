package admin_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/mongodb"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

func (f *office) insertFailed(coll *mongo.Collection, id, state string, attempts int32, at time.Time) {
	f.t.Helper()
	doc := append(letterOf(id, planted),
		bson.E{Key: "key", Value: "7"}, bson.E{Key: "state", Value: state}, bson.E{Key: "attempts", Value: attempts}, bson.E{Key: "nextAt", Value: at.Add(time.Hour)},
		bson.E{Key: "lastError", Value: bson.D{{Key: "class", Value: "record_refused"}, {Key: "reason", Value: "87"}, {Key: "topic", Value: "orders"}, {Key: "at", Value: at}}})
	if _, err := coll.InsertOne(f.t.Context(), doc); err != nil {
		f.t.Fatal(err)
	}
}

func TestFailedAreListedAndReset(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	now := time.Now()
	for i := range 105 {
		f.insertFailed([]*mongo.Collection{f.a, f.b}[i%2], fmt.Sprintf("id%03d", i), "retry", 3, now.Add(time.Duration(i)*time.Second))
	}

	f.insertFailed(f.a, "blocked", "blocked", 0, now)
	f.insertFailed(f.a, "new", "retry", 0, now)
	list, err := f.op.Waiting().Failed(t.Context(), "", 0)
	if err != nil || len(list) != 100 || list[0].ID != "id104" || list[99].ID != "id005" || list[0].Class != "record_refused" || list[0].Attempts != 3 || list[0].Key != "7" {
		t.Fatalf("%d, %v", len(list), err)
	}
	if list, err := f.op.Waiting().Failed(t.Context(), mongodb.Namespace(f.b), 2); err != nil || len(list) != 2 || list[1].ID != "id101" {
		t.Errorf("%+v, %v", list, err)
	}
	if _, err := f.op.Waiting().Reset(t.Context(), "", nil, false); err == nil {
		t.Error("a reset of nothing was taken")
	}

	ids := []string{"id000", "id001", "blocked", "new", "nobody"}
	if got, err := f.op.Waiting().Reset(t.Context(), "", ids, true); err != nil || got.Failed != 2 || got.Done != 0 || got.Given != 5 {
		t.Errorf("dry run: %+v, %v", got, err)
	}
	if got, err := f.op.Waiting().Reset(t.Context(), "", ids, false); err != nil || got.Done != 2 {
		t.Errorf("%+v, %v", got, err)
	}

	for id, attempts := range map[string]int64{"id000": 0, "id002": 3} {
		raw, err := f.a.FindOne(t.Context(), bson.D{{Key: "_id", Value: id}}).Raw()
		if err != nil {
			t.Fatal(err)
		}
		_, errLast := raw.LookupErr("lastError")
		due := !raw.Lookup("nextAt").Time().After(time.Now())
		if raw.Lookup("attempts").AsInt64() != attempts || (errLast == nil) != (attempts > 0) || due != (attempts == 0) || raw.Lookup("state").StringValue() != "retry" {
			t.Errorf("%s", raw)
		}
	}
	if raw, err := f.a.FindOne(t.Context(), bson.D{{Key: "_id", Value: "blocked"}}).Raw(); err != nil || raw.Lookup("state").StringValue() != "blocked" {
		t.Errorf("%s, %v", raw, err)
	}
	if got, err := f.op.Waiting().Reset(t.Context(), "", ids, false); err != nil || got.Failed != 0 || got.Done != 0 {
		t.Errorf("again: %+v, %v", got, err)
	}

	// One batch now: their attempts count on.
	if got, err := f.op.Waiting().Retry(t.Context(), "", nil, false); err != nil || got.Done != 100 {
		t.Errorf("%+v, %v", got, err)
	}

	n, err := f.b.CountDocuments(t.Context(), bson.D{{Key: "attempts", Value: 3}, {Key: "nextAt", Value: bson.D{{Key: "$lte", Value: time.Now()}}}})
	if err != nil || n < 49 {
		t.Errorf("%d are due now, %v", n, err)
	}
	if log := f.readLog(); len(log) != 2 || log[1].Kind != "failed_reset" || log[1].Fields.Lookup("count").AsInt64() != 2 || log[0].Kind != "failed_retried" {
		t.Errorf("%+v", log)
	}
}
