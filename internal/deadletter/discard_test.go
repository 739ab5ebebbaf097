package deadletter

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/record"
)

func TestDiscard(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.fill(2500, func(i int) bson.D { return append(order(i), bson.E{Key: "key", Value: []string{"a", "b"}[i%2]}) })
	keep := b.good("keep")
	b.move(keep)
	if _, err := b.desk().Discard(t.Context(), b.ns(), Query{Stand: Replayable}, nil); !errors.Is(err, ErrEmptyQuery) {
		t.Errorf("an empty query: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	n, err := b.desk().Discard(ctx, b.ns(), Query{Key: "a"}, func(int64) { cancel() })
	if err == nil || n != MaxLetters {
		t.Errorf("stopped after the first part: %d, %v", n, err)
	}
	if n, err := b.desk().Discard(t.Context(), b.ns(), Query{Key: "a"}, nil); err != nil || n != 1250-MaxLetters {
		t.Errorf("again: %d, %v", n, err)
	}
	if c := b.count("outbox_dead"); c != 1251 {
		t.Errorf("%d letters are left", c)
	}
	if n, err := b.desk().Discard(t.Context(), b.ns(), Query{All: true}, nil); err != nil || n != 1251 || b.count("outbox_dead") != 0 {
		t.Errorf("all: %d, %v", n, err)
	}
}

// index makes the declared indexes.
func (b *bench) index(coll string) {
	b.t.Helper()
	specs := bson.A{}
	for _, i := range Indexes() {
		specs = append(specs, bson.D{{Key: "key", Value: i.Keys}, {Key: "name", Value: i.Name}})
	}
	if err := b.db.RunCommand(b.t.Context(), bson.D{{Key: "createIndexes", Value: coll}, {Key: "indexes", Value: specs}}).Err(); err != nil {
		b.t.Fatal(err)
	}
}

// TestIndexesServeTheQueries looks at the plans: none may read the whole collection, nor sort it.
func TestIndexesServeTheQueries(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.index("outbox_dead")
	b.fill(200, order)
	newest := bson.D{{Key: "movedAt", Value: -1}, {Key: "_id", Value: -1}}
	stream := bson.D{{Key: "pos", Value: 1}, {Key: "_id", Value: 1}}
	for name, c := range map[string]struct {
		filter, sort bson.D
		index        string
	}{
		"newest":      {Query{}.mongoFilter(), newest, "movedAt_1__id_1"},
		"window":      {Query{From: time.Now()}.mongoFilter(), newest, "movedAt_1__id_1"},
		"ids":         {Query{IDs: ids(t, "a")}.mongoFilter(), nil, "_id.id_1"},
		"key":         {Query{Key: "none"}.mongoFilter(), nil, "key_1_movedAt_1"},
		"class":       {Query{Class: record.Handler}.mongoFilter(), nil, "class_1_movedAt_1"},
		"type":        {Query{Type: "none"}.mongoFilter(), nil, "type_1_movedAt_1"},
		"requeue all": {(&scan{filter: Query{}.mongoFilter(), lastEntry: &scanEntry{ID: ID{ID: ids(t, "a")[0]}, Pos: "8200000042"}}).remainingFilter(), stream, "pos_1__id_1"},
	} {
		find := bson.D{{Key: "find", Value: "outbox_dead"}, {Key: "filter", Value: c.filter}, {Key: "limit", Value: 100}}
		if c.sort != nil {
			find = append(find, bson.E{Key: "sort", Value: c.sort})
		}
		var reply struct {
			QueryPlanner struct {
				WinningPlan bson.Raw `bson:"winningPlan"`
			} `bson:"queryPlanner"`
		}
		if err := b.db.RunCommand(t.Context(), bson.D{{Key: "explain", Value: find}, {Key: "verbosity", Value: "queryPlanner"}}).Decode(&reply); err != nil {
			t.Fatal(err)
		}
		used := map[string]bool{}
		stages(reply.QueryPlanner.WinningPlan, used)
		if !used[c.index] || used["COLLSCAN"] || used["SORT"] && c.sort != nil {
			t.Errorf("%s: %v, want %s", name, used, c.index)
		}
	}
}

// stages collects the names of stages and indexes of a plan.
func stages(plan bson.Raw, used map[string]bool) {
	elems, err := plan.Elements()
	if err != nil {
		return
	}
	for _, e := range elems {
		switch v := e.Value(); {
		case e.Key() == "stage" || e.Key() == "indexName":
			used[v.StringValue()] = true
		case v.Type == bson.TypeEmbeddedDocument || v.Type == bson.TypeArray:
			stages(v.Value, used)
		}
	}
}

func TestExpiryIsOffUntilItIsAskedFor(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	coll := b.db.Collection("outbox_dead")
	if err := SetExpiry(t.Context(), coll, 0); err != nil { // nothing there at all
		t.Fatal(err)
	}
	b.index("outbox_dead")
	for _, bad := range []time.Duration{-1, time.Minute, 100 * 365 * 24 * time.Hour} {
		if err := SetExpiry(t.Context(), coll, bad); err == nil {
			t.Errorf("an expiry of %s was taken", bad)
		}
	}
	for _, d := range []time.Duration{48 * time.Hour, 48 * time.Hour, 24 * time.Hour, 0, 0} {
		if err := SetExpiry(t.Context(), coll, d); err != nil {
			t.Fatal(err)
		}
		have, err := readExpirySeconds(t.Context(), coll)
		if err != nil {
			t.Fatal(err)
		}
		if d == 0 && len(have) != 0 || d > 0 && (have[expiryIndex] != int64(d/time.Second) || have[chunkExpiryIndex] != int64((d+time.Hour)/time.Second)) {
			t.Errorf("%s: %v", d, have)
		}
	}
	if specs, err := coll.Indexes().ListSpecifications(t.Context()); err != nil || len(specs) != 1+len(Indexes()) {
		t.Errorf("%d indexes are left, %v", len(specs), err)
	}
	// What expires is there to expire by: on the letter and on its chunks.
	b.move(b.good("large", bson.E{Key: "extra", Value: make([]byte, 15<<20+1)}))
	n, err := coll.CountDocuments(t.Context(), bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: "movedAt", Value: bson.D{{Key: "$type", Value: "date"}}}}, bson.D{{Key: "chunkedAt", Value: bson.D{{Key: "$type", Value: "date"}}}},
	}}})
	if all := b.count("outbox_dead"); err != nil || n != all {
		t.Errorf("%d of %d documents can expire, %v", n, all, err)
	}
}

// TestN15_ALetterThatIsNeededStillIsNotDiscarded: where the position stands before its event, the letter alone keeps the next
// owner from sending that.
func TestN15_ALetterThatIsNeededStillIsNotDiscarded(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	old, late := b.good("old"), b.good("late")
	old.Pos, late.Pos = "82000000030000000100", "82000000090000000100"
	b.move(old, late)
	at := func(second uint32) {
		t.Helper()
		if _, err := b.db.Collection("watchers").UpdateOne(t.Context(), bson.D{{Key: "_id", Value: "orders/0of1"}},
			bson.D{{Key: "$set", Value: bson.D{{Key: "clusterTime", Value: bson.Timestamp{T: second}}}}}, options.UpdateOne().SetUpsert(true)); err != nil {
			t.Fatal(err)
		}
	}
	at(5)
	var refused *RefusedError
	if n, err := b.desk().Discard(t.Context(), b.ns(), Query{All: true}, nil); n != 0 || !errors.As(err, &refused) || refused.ID.ID.StringValue() != "late" {
		t.Errorf("%d are discarded, %v", n, err)
	}
	if n, err := b.desk().Discard(t.Context(), b.ns(), Query{IDs: ids(t, "old")}, nil); n != 1 || err != nil {
		t.Errorf("one that is behind the position: %d, %v", n, err)
	}
	at(10)
	if n, err := b.desk().Discard(t.Context(), b.ns(), Query{All: true}, nil); n != 1 || err != nil {
		t.Errorf("the watcher has passed it: %d, %v", n, err)
	}
}
