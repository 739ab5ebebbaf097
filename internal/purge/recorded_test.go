package purge

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/pkg/event"
)

func TestEnsureSentTTL(t *testing.T) {
	t.Parallel()
	coll := newDatabase(t).Collection("outbox")
	if err := coll.Database().CreateCollection(t.Context(), coll.Name()); err != nil {
		t.Fatal(err)
	}
	uuid, err := mongodb.CollectionUUID(t.Context(), coll.Database().Client(), coll.Database().Name(), coll.Name())
	if err != nil {
		t.Fatal(err)
	}
	o := outboxes.Outbox{DB: coll.Database().Name(), Coll: coll.Name(), UUID: uuid}
	for i, step := range []struct {
		ttl     time.Duration
		changed bool
	}{{0, false}, {time.Hour, true}, {time.Hour, false}, {2*time.Hour - time.Millisecond, true}, {0, true}, {0, false}, {time.Minute, true}} {
		changed, err := outboxes.EnsureSentTTL(t.Context(), coll.Database().Client(), o, step.ttl)
		if err != nil || changed != step.changed {
			t.Fatalf("step %d: changed %v, %v", i, changed, err)
		}
		var have int32
		specs, err := coll.Indexes().ListSpecifications(t.Context())
		for _, s := range specs {
			if s.Name == outboxes.SentIndexName {
				have = *s.ExpireAfterSeconds
			}
		}
		if err != nil || have != int32((step.ttl+time.Second-1)/time.Second) {
			t.Fatalf("step %d: TTL %d, %v", i, have, err)
		}
	}

	// The index contains only marked envelopes that are not to be sent again.
	if _, err := coll.InsertMany(t.Context(), []any{
		bson.D{{Key: "_id", Value: 1}, {Key: "sentAt", Value: time.Now()}},
		bson.D{{Key: "_id", Value: 2}, {Key: "sentAt", Value: time.Now()}, {Key: "state", Value: "retry"}},
		bson.D{{Key: "_id", Value: 3}, {Key: "sentAt", Value: time.Now()}, {Key: "dueAt", Value: time.Now()}},
		bson.D{{Key: "_id", Value: 4}},
	}); err != nil {
		t.Fatal(err)
	}

	n, err := coll.CountDocuments(t.Context(), bson.D{{Key: "sentAt", Value: bson.D{{Key: "$exists", Value: true}}}, {Key: "state", Value: nil}, {Key: "dueAt", Value: nil}},
		options.Count().SetHint(outboxes.SentIndexName))
	if err != nil || n != 1 {
		t.Errorf("%d envelopes by the index, %v", n, err)
	}
}

// fencer runs transactions without a lease, and each of them twice if the test sets that, as after an unknown
// outcome.
type fencer struct {
	client *mongo.Client
	twice  bool
	runs   int
}

func (f *fencer) Fenced(ctx context.Context, _ []string, fn func(context.Context) error) error {
	s, err := f.client.StartSession()
	if err != nil {
		return err
	}
	defer s.EndSession(ctx)
	for range 2 {
		f.runs++
		_, err = s.WithTransaction(ctx, func(tx context.Context) (any, error) { return nil, fn(tx) })
		if err != nil || !f.twice {
			return err
		}
	}

	return nil
}

// fill inserts n stamped envelopes of ten keys and returns them as delivered in the order of their stamps, each to the
// offset of its place.
func fill(tb testing.TB, coll *mongo.Collection, n int) []Sent {
	tb.Helper()
	docs := make([]any, n)
	for i := range docs {
		docs[i] = bson.D{
			{Key: "_id", Value: event.NewID(uuid.New())},
			{Key: "aggregatetype", Value: "order"},
			{Key: "aggregateid", Value: int32(i % 10)},
			{Key: "type", Value: "Placed"},
			{Key: "ts", Value: bson.Timestamp{}},
			{Key: "payload", Value: strings.Repeat("x", 200)},
		}
	}

	for part := range slices.Chunk(docs, 10_000) {
		if _, err := coll.InsertMany(tb.Context(), part); err != nil {
			tb.Fatal(err)
		}
	}

	cur, err := coll.Find(tb.Context(), bson.D{}, options.Find().SetSort(bson.D{{Key: "ts", Value: 1}}))
	if err != nil {
		tb.Fatal(err)
	}

	var found []struct {
		ID bson.RawValue  `bson:"_id"`
		TS bson.Timestamp `bson:"ts"`
	}

	if err := cur.All(tb.Context(), &found); err != nil {
		tb.Fatal(err)
	}

	sent := make([]Sent, len(found))
	for i, f := range found {
		sent[i] = Sent{NS: mongodb.Namespace(coll), ID: f.ID, TS: f.TS, Places: []outboxes.Place{{Topic: "$orders", Partition: int32(i % 3), Offset: int64(i)}}}
	}

	return sent
}

func marked(tb testing.TB, coll *mongo.Collection) int64 {
	tb.Helper()
	n, err := coll.CountDocuments(tb.Context(), bson.D{{Key: "sentAt", Value: bson.D{{Key: "$type", Value: "date"}}}})
	if err != nil {
		tb.Fatal(err)
	}
	return n
}

func TestRecordSentMarksEachWithItsOwnPositions(t *testing.T) {
	t.Parallel()
	coll := newDatabase(t).Collection("outbox")
	other := coll.Database().Collection("outbox2")
	f := &fencer{client: coll.Database().Client(), twice: true}
	sent := fill(t, coll, 2*markGroup+7)
	sent[0].Places = append(sent[0].Places, outboxes.Place{Topic: "audit", Offset: 9})
	all := append(slices.Clone(sent), fill(t, other, 3)...)
	if err := RecordSent(t.Context(), f, RecordMark, all); err != nil {
		t.Fatal(err)
	}

	for _, s := range all {
		db, name, _ := strings.Cut(s.NS, ".")
		var got History
		if err := coll.Database().Client().Database(db).Collection(name).FindOne(t.Context(), bson.D{{Key: "_id", Value: s.ID}}).Decode(&got); err != nil {
			t.Fatal(err)
		}
		if got.SentAt == nil || time.Since(*got.SentAt).Abs() > time.Hour || !slices.Equal(got.Sent, s.Places) {
			t.Fatalf("%v: %+v, want %+v", s.ID, got, s.Places)
		}
	}
	if err := RecordSent(t.Context(), f, RecordMark, nil); err != nil || f.runs != 2 {
		t.Errorf("%d transactions, %v", f.runs, err)
	}
}

// N25: what became an exception, or was replaced by a newer envelope of its id, is not touched by what its first delivery
// was recorded with.
func TestN25_RecordingLeavesExceptionsAndNewerEnvelopes(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{RecordMark, recordDelete} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()

			coll := newDatabase(t).Collection("outbox")
			sent := fill(t, coll, 10)
			set := func(s Sent, field string, value any) {
				if _, err := coll.UpdateOne(t.Context(), bson.D{{Key: "_id", Value: s.ID}}, bson.D{{Key: "$set", Value: bson.D{{Key: field, Value: value}}}}); err != nil {
					t.Fatal(err)
				}
			}

			set(sent[3], "state", "retry")
			// The server sets a new stamp.
			if _, err := coll.ReplaceOne(t.Context(), bson.D{{Key: "_id", Value: sent[5].ID}}, bson.D{{Key: "ts", Value: bson.Timestamp{}}}); err != nil {
				t.Fatal(err)
			}

			// The purge must find this envelope by its id, as if it had no stamp.
			sent[7].TS = bson.Timestamp{}
			set(sent[7], "ts", time.Now())

			if err := RecordSent(t.Context(), &fencer{client: coll.Database().Client()}, mode, sent); err != nil {
				t.Fatal(err)
			}

			left, err := coll.CountDocuments(t.Context(), bson.D{})
			want, wantMarked := int64(10), int64(8)
			if mode == recordDelete {
				want, wantMarked = 2, 0
			}
			if n := marked(t, coll); err != nil || left != want || n != wantMarked {
				t.Errorf("%d envelopes, %d marked, %v", left, n, err)
			}

			for _, i := range []int{3, 5} {
				if n, err := coll.CountDocuments(t.Context(), bson.D{{Key: "_id", Value: sent[i].ID}, {Key: "sentAt", Value: nil}}); err != nil || n != 1 {
					t.Errorf("envelope %d was touched (%v)", i, err)
				}
			}
		})
	}
}

func TestRecordSentKeepsToTheBoundsOfATransaction(t *testing.T) {
	t.Parallel()
	many := make([]Sent, 2500)
	if n := mongodb.CountFitting(many, mongodb.MaxDocuments, (*Sent).estimateSize); n != mongodb.MaxDocuments {
		t.Errorf("%d at once", n)
	}
	many[0].ID.Value = make([]byte, mongodb.MaxBytes+1)
	if n := mongodb.CountFitting(many, mongodb.MaxDocuments, (*Sent).estimateSize); n != 1 {
		t.Errorf("%d with one that is too large for any bound", n)
	}
}

func TestSentHistory(t *testing.T) {
	t.Parallel()
	coll := newDatabase(t).Collection("outbox")
	if err := outboxes.EnsureIndexes(t.Context(), coll); err != nil {
		t.Fatal(err)
	}

	sent := fill(t, coll, 300)
	// As copied documents may: some share a stamp.
	if _, err := coll.UpdateMany(t.Context(), bson.D{{Key: "ts", Value: bson.D{{Key: "$lte", Value: sent[30].TS}}}}, bson.D{{Key: "$set", Value: bson.D{{Key: "ts", Value: sent[0].TS}}}}); err != nil {
		t.Fatal(err)
	}

	f := &fencer{client: coll.Database().Client()}
	for part := range slices.Chunk(sent[:250], 25) {
		if err := RecordSent(t.Context(), f, RecordMark, part); err != nil {
			t.Fatal(err)
		}
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

	var id event.ID
	if err := sent[299].ID.Unmarshal(&id); err != nil {
		t.Fatal(err)
	}

	page, err := SentHistory(t.Context(), coll, HistoryQuery{IDs: []event.ID{id}})
	if err != nil || len(page.Envelopes) != 1 || page.Envelopes[0].SentAt != nil {
		t.Errorf("one that was not sent: %+v, %v", page, err)
	}
	if _, err := SentHistory(t.Context(), coll, HistoryQuery{After: "x"}); !errors.Is(err, mongodb.ErrCursor) {
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

// The least speed of a mark is 10,000 envelopes a second. Run go test -bench RecordSent for the
// figure.
func BenchmarkRecordSent(b *testing.B) {
	for _, mode := range []string{RecordMark, recordDelete} {
		b.Run(mode, func(b *testing.B) {
			coll := stacktest.Database(b, stacktest.Client(b)).Collection("outbox")
			if err := outboxes.EnsureIndexes(b.Context(), coll); err != nil {
				b.Fatal(err)
			}
			f := &fencer{client: coll.Database().Client()}

			var spent time.Duration
			for b.Loop() {
				b.StopTimer()
				sent := fill(b, coll, 20_000)
				b.StartTimer()

				begun := time.Now()
				if err := RecordSent(b.Context(), f, mode, sent); err != nil {
					b.Fatal(err)
				}
				spent += time.Since(begun)
			}
			b.ReportMetric(float64(b.N)*20_000/spent.Seconds(), "envelopes/s")
		})
	}
}
