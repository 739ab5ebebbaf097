package purge

import (
	"errors"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/eventid"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// fill inserts n stamped envelopes of ten keys, marks the first ones as delivered, and returns their ids in the order of their
// stamps.
func fill(t *testing.T, coll *mongo.Collection, n, marked int) (ids []bson.ObjectID) {
	t.Helper()
	docs := make([]any, n)
	for i := range docs {
		docs[i] = bson.D{{Key: "_id", Value: bson.NewObjectID()}, {Key: "aggregatetype", Value: "order"}, {Key: "aggregateid", Value: int32(i % 10)}, {Key: "type", Value: "Placed"}, {Key: "ts", Value: bson.Timestamp{}}}
	}
	if _, err := coll.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}
	cur, err := coll.Find(t.Context(), bson.D{}, options.Find().SetSort(bson.D{{Key: "ts", Value: 1}}))
	if err != nil {
		t.Fatal(err)
	}
	var found []struct {
		ID bson.ObjectID `bson:"_id"`
	}
	if err := cur.All(t.Context(), &found); err != nil {
		t.Fatal(err)
	}

	var marks []mongo.WriteModel
	for i, f := range found {
		ids = append(ids, f.ID)
		if i < marked {
			marks = append(marks, mongo.NewUpdateOneModel().SetFilter(bson.D{{Key: "_id", Value: f.ID}}).SetUpdate(bson.D{{Key: "$set", Value: bson.D{
				{Key: "sentAt", Value: time.Now()},
				{Key: "sent", Value: []outboxes.Place{{Topic: "orders", Partition: int32(i % 3), Offset: int64(i)}}},
			}}}))
		}
	}
	if _, err := coll.BulkWrite(t.Context(), marks); err != nil {
		t.Fatal(err)
	}
	return ids
}

func TestSentHistory(t *testing.T) {
	t.Parallel()
	coll := newOutbox(t)
	ids := fill(t, coll, 300, 250)
	// As copied documents may: some share a stamp.
	var first struct {
		TS bson.Timestamp `bson:"ts"`
	}
	if err := coll.FindOne(t.Context(), bson.D{{Key: "_id", Value: ids[0]}}).Decode(&first); err != nil {
		t.Fatal(err)
	}
	if _, err := coll.UpdateMany(t.Context(), bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids[:31]}}}}, bson.D{{Key: "$set", Value: bson.D{{Key: "ts", Value: first.TS}}}}); err != nil {
		t.Fatal(err)
	}

	for _, q := range []struct {
		name  string
		query HistoryQuery
		want  int
	}{
		{"all", HistoryQuery{Limit: 7}, 250},
		{"in one page", HistoryQuery{Limit: 1000}, 250},
		{"default page", HistoryQuery{}, 250},
		{"of a key", HistoryQuery{Key: "3", Limit: 4}, 25},
		{"of an unknown key", HistoryQuery{Key: "33"}, 0},
		{"of a window", HistoryQuery{From: time.Now().Add(-time.Hour), To: time.Now().Add(time.Hour), Limit: 100}, 250},
		{"before", HistoryQuery{To: time.Now().Add(-time.Hour)}, 0},
		{"after", HistoryQuery{From: time.Now().Add(time.Hour)}, 0},
	} {
		seen := make(map[string]bool)
		var last bson.Timestamp
		for query := q.query; ; {
			page, err := SentHistory(t.Context(), coll, query)
			if err != nil {
				t.Fatalf("%s: %v", q.name, err)
			}
			for _, e := range page.Envelopes {
				if seen[e.ID.String()] || e.TS.Before(last) || e.SentAt == nil || len(e.Sent) != 1 || e.NS != mongodb.Namespace(coll) {
					t.Fatalf("%s: %+v", q.name, e)
				}
				seen[e.ID.String()], last = true, e.TS
			}
			if query.After = page.Next; page.Next == "" {
				break
			}
		}
		if len(seen) != q.want {
			t.Errorf("%s: %d envelopes, want %d", q.name, len(seen), q.want)
		}
	}

	page, err := SentHistory(t.Context(), coll, HistoryQuery{IDs: []eventid.ID{eventid.New(ids[299])}})
	if err != nil || len(page.Envelopes) != 1 || page.Envelopes[0].SentAt != nil {
		t.Errorf("one that was not sent: %+v, %v", page, err)
	}
	if _, err := SentHistory(t.Context(), coll, HistoryQuery{After: "x"}); !errors.Is(err, listing.ErrCursor) {
		t.Errorf("a wrong cursor: %v", err)
	}
}

func TestKeyForms(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]int{"a": 1, "5": 2, "05": 1, "-7": 2, "6560d0c3a1b2c3d4e5f60718": 2, "6560D0C3A1B2C3D4E5F60718": 1, "0191d5a0-7b1c-7000-8000-000000000001": 2} {
		if n := len(KeyForms(text)); n != want {
			t.Errorf("%s: %d forms, want %d", text, n, want)
		}
	}
}

// The fields of an envelope may have any type. A field of another type counts as missing, and the others are read.
func TestHistoryReadsEnvelopesOfAnyForm(t *testing.T) {
	t.Parallel()
	coll := newOutbox(t)
	stamp, now := bson.Timestamp{T: 1000, I: 1}, time.UnixMilli(1_900_000_000_000).UTC()
	for _, doc := range []bson.D{
		{{Key: "_id", Value: "flag"}, {Key: "ts", Value: stamp}, {Key: "type", Value: "T"}, {Key: "sent", Value: true}, {Key: "sentAt", Value: now}},
		{{Key: "_id", Value: "numbers"}, {Key: "ts", Value: stamp}, {Key: "aggregatetype", Value: int32(3)}, {Key: "type", Value: bson.D{}}, {Key: "sent", Value: bson.A{1}}, {Key: "sentAt", Value: now}},
		{{Key: "_id", Value: "due"}, {Key: "ts", Value: stamp}, {Key: "sentAt", Value: now}, {Key: "dueAt", Value: "x"}},
		{{Key: "_id", Value: "a list of stamps"}, {Key: "ts", Value: bson.A{stamp}}, {Key: "sentAt", Value: now}},
		{{Key: "_id", Value: "a list of marks"}, {Key: "ts", Value: stamp}, {Key: "sentAt", Value: bson.A{now}}},
		{{Key: "_id", Value: "a text as mark"}, {Key: "ts", Value: stamp}, {Key: "sentAt", Value: "now"}},
	} {
		if _, err := coll.InsertOne(t.Context(), doc); err != nil {
			t.Fatal(err)
		}
		id := doc[0].Value.(string)
		page, err := SentHistory(t.Context(), coll, HistoryQuery{IDs: []eventid.ID{eventid.New(id)}})
		if err != nil || len(page.Envelopes) != 1 || page.Envelopes[0].ID.StringValue() != id || page.Envelopes[0].Sent != nil {
			t.Errorf("%s: %+v, %v", id, page, err)
		}
	}

	page, err := SentHistory(t.Context(), coll, HistoryQuery{})
	if err != nil || len(page.Envelopes) != 2 {
		t.Fatalf("%+v, %v", page, err)
	}
	for i, id := range []string{"flag", "numbers"} {
		if e := page.Envelopes[i]; e.ID.StringValue() != id || e.SentAt == nil || !e.SentAt.Equal(now) || e.TS != stamp || e.DueAt != nil {
			t.Errorf("%+v, want %s", e, id)
		}
	}
}
