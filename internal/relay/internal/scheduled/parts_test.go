package scheduled

import (
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// For all values of the field, the server finds each document in exactly one part, the same as Has.
func TestN28_TheServerDividesLikeHas(t *testing.T) {
	t.Parallel()
	coll := stacktest.Database(t, stacktest.Client(t)).Collection("outbox")
	big, _ := bson.ParseDecimal128("700.5")
	values := []any{
		int32(0), int32(341), int32(342), int32(511), int32(512), int32(1023), int32(1024), int32(-1), int64(700), 511.5, 1023.5, 1024.0, big,
		"512", nil, true,
		bson.A{int32(5), int32(700)},
		bson.A{int32(700)},
		bson.A{},
		bson.D{{Key: "x", Value: int32(700)}},
		bson.Timestamp{T: 600},
	}

	docs := []any{bson.D{{Key: "_id", Value: -1}}}
	for i, v := range values {
		docs = append(docs, bson.D{{Key: "_id", Value: i}, {Key: "slot", Value: v}})
	}
	if _, err := coll.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}

	for n := 1; n <= 7; n++ {
		found := map[int32]int{}
		for _, p := range slot.Ranges(n) {
			cur, err := coll.Find(t.Context(), p.AddFilter(bson.D{}))
			if err != nil {
				t.Fatal(err)
			}
			for cur.Next(t.Context()) {
				found[cur.Current.Lookup("_id").Int32()]++
				if !p.Contains(cur.Current) {
					t.Errorf("the server assigns %v to %v, and Has does not", cur.Current, p)
				}
				// The slot that claims an envelope also reads it in the store.
				stored, _ := bson.Marshal(bson.D{{Key: "slot", Value: waiting.SlotOf(cur.Current)}})
				if !p.Contains(stored) {
					t.Errorf("%v claims %v, and another slot reads it in the store", p, cur.Current)
				}
			}
		}
		for i := range docs {
			if c := found[int32(i-1)]; c != 1 {
				t.Errorf("document %d is in %d of %d parts", i-1, c, n)
			}
		}
	}
}

// Each slot reads only its own waiting and scheduled envelopes.
func TestN28_EachSlotSeesItsOwnEnvelopes(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	coll, store := db.Collection("outbox"), db.Collection("waiting")
	past := time.Now().Add(-time.Second)
	for i, s := range []int32{10, 600, 20} {
		doc := bson.D{{Key: "_id", Value: i}, {Key: "slot", Value: s}, {Key: "dueAt", Value: past}}
		if i == 2 {
			if _, err := coll.InsertOne(t.Context(), doc); err != nil {
				t.Fatal(err)
			}
			continue
		}
		raw, err := bson.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		entry := waiting.Entry{Watcher: "w", NS: "a.outbox", Raw: raw, Key: "k", Slot: waiting.SlotOf(raw), Pos: "82", Reason: waiting.Retry, NextAt: past}
		if err := waiting.Enter(t.Context(), store, []waiting.Entry{entry}); err != nil {
			t.Fatal(err)
		}
	}

	for i, want := range [][3]int{{1, 1, 1}, {1, 1, 0}} {
		p := slot.Range{I: i, N: 2}
		s := waiting.NewStore(store, "w", p)
		keys, err := s.DueKeys(t.Context(), time.Now(), nil, 10)
		if err != nil || len(keys) != want[0] {
			t.Errorf("%v: %d due retries, %v", p, len(keys), err)
		}
		n := 0
		if err := s.Each(t.Context(), func(*waiting.Document) error { n++; return nil }); err != nil || n != want[1] {
			t.Errorf("%v: %d waiting envelopes, %v", p, n, err)
		}
		first, err := findFirstDue(t.Context(), coll, p, nil)
		due, _, takeErr := takeAll(t.Context(), coll, &query{slot: p, limit: 10, bytes: maxClaimBytes}, bson.NewDateTimeFromTime(time.Now()))
		if err != nil || takeErr != nil || len(due) != want[2] || (first != nil) != (want[2] > 0) {
			t.Errorf("%v: %d scheduled, the first %v, %v %v", p, len(due), first, err, takeErr)
		}
	}

	third := slot.Range{I: 2, N: 3}
	if found, err := outboxes.HasScheduled(t.Context(), coll, third); err != nil || found {
		t.Errorf("%v holds something, %v", third, err)
	}
}
