package deadletter

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/resume"
)

func TestDiscard(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.fill(2500, func(i int) bson.D {
		return append(order(i), bson.E{Key: "key", Value: []string{"a", "b"}[i%2]})
	})
	b.move(b.insertValid("keep"))

	if _, err := b.newDesk().Discard(t.Context(), b.ns(), Query{RequeueStatus: Replayable}, nil); !errors.Is(err, ErrEmptyQuery) {
		t.Errorf("an empty query: got %v, want %v", err, ErrEmptyQuery)
	}

	// An interrupted discard keeps the finished parts, and the same call does the rest.
	ctx, cancel := context.WithCancel(t.Context())
	n, err := b.newDesk().Discard(ctx, b.ns(), Query{Key: "a"}, func(int64) { cancel() })
	if err == nil || n != mongodb.MaxDocuments {
		t.Errorf("interrupted after the first part: got %d, %v, want %d and an error", n, err, mongodb.MaxDocuments)
	}
	n, err = b.newDesk().Discard(t.Context(), b.ns(), Query{Key: "a"}, nil)
	if err != nil || n != 1250-mongodb.MaxDocuments {
		t.Errorf("the second call: got %d, %v, want %d", n, err, 1250-mongodb.MaxDocuments)
	}
	if left := b.countDocuments("outbox_dead"); left != 1251 {
		t.Errorf("%d letters are left, want 1251", left)
	}

	n, err = b.newDesk().Discard(t.Context(), b.ns(), Query{All: true}, nil)
	if err != nil || n != 1251 || b.countDocuments("outbox_dead") != 0 {
		t.Errorf("discard of all: got %d, %v, want 1251", n, err)
	}
}

// createIndexes creates the declared indexes.
func (b *bench) createIndexes(coll string) {
	b.t.Helper()
	specs := bson.A{}
	for _, i := range Indexes() {
		specs = append(specs, bson.D{{Key: "key", Value: i.Keys}, {Key: "name", Value: i.Name}})
	}

	command := bson.D{{Key: "createIndexes", Value: coll}, {Key: "indexes", Value: specs}}
	if err := b.db.RunCommand(b.t.Context(), command).Err(); err != nil {
		b.t.Fatal(err)
	}
}

// TestIndexesServeTheQueries checks the query plans: no plan may read the whole collection or sort
// it.
func TestIndexesServeTheQueries(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.createIndexes("outbox_dead")
	b.fill(200, order)

	newest := bson.D{{Key: "movedAt", Value: -1}, {Key: "_id", Value: -1}}
	stream := bson.D{{Key: "pos", Value: 1}, {Key: "_id", Value: 1}}
	last := &scanEntry{ID: ID{ID: toValues(t, "a")[0]}, Pos: "8200000042"}
	rest := (&scan{filter: Query{}.mongoFilter(), lastEntry: last}).remainingFilter()
	for name, c := range map[string]struct {
		filter, sort bson.D
		index        string
	}{
		"newest":           {Query{}.mongoFilter(), newest, "movedAt_1__id_1"},
		"window":           {Query{From: time.Now()}.mongoFilter(), newest, "movedAt_1__id_1"},
		"ids":              {Query{IDs: toValues(t, "a")}.mongoFilter(), nil, "_id.id_1"},
		"key":              {Query{Key: "none"}.mongoFilter(), nil, "key_1_movedAt_1"},
		"class":            {Query{Class: record.AttemptsExhausted}.mongoFilter(), nil, "class_1_movedAt_1"},
		"type":             {Query{Type: "none"}.mongoFilter(), nil, "type_1_movedAt_1"},
		"requeue all":      {rest, stream, "pos_1__id_1"},
		"after a position": {afterPosition(resume.Position{ClusterTime: bson.Timestamp{T: uint32(time.Now().Unix())}}), nil, "movedAt_1__id_1"},
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
		explain := bson.D{{Key: "explain", Value: find}, {Key: "verbosity", Value: "queryPlanner"}}
		if err := b.db.RunCommand(t.Context(), explain).Decode(&reply); err != nil {
			t.Fatal(err)
		}

		used := map[string]bool{}
		collectStages(reply.QueryPlanner.WinningPlan, used)
		if !used[c.index] || used["COLLSCAN"] || used["SORT"] && c.sort != nil {
			t.Errorf("%s: the plan uses %v, want index %s without COLLSCAN and SORT", name, used, c.index)
		}
	}
}

// collectStages adds the names of the stages and indexes of a plan to used.
func collectStages(plan bson.Raw, used map[string]bool) {
	elems, err := plan.Elements()
	if err != nil {
		return
	}

	for _, e := range elems {
		switch v := e.Value(); {
		case e.Key() == "stage" || e.Key() == "indexName":
			used[v.StringValue()] = true
		case v.Type == bson.TypeEmbeddedDocument || v.Type == bson.TypeArray:
			collectStages(v.Value, used)
		}
	}
}

func TestExpiryIsOffUntilItIsAskedFor(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	coll := b.db.Collection("outbox_dead")

	// The collection does not exist yet.
	if err := SetExpiry(t.Context(), coll, 0); err != nil {
		t.Fatal(err)
	}
	b.createIndexes("outbox_dead")
	for _, bad := range []time.Duration{-1, time.Minute, 100 * 365 * 24 * time.Hour} {
		if err := SetExpiry(t.Context(), coll, bad); err == nil {
			t.Errorf("SetExpiry(%s): got no error", bad)
		}
	}

	for _, d := range []time.Duration{48 * time.Hour, 48 * time.Hour, 24 * time.Hour, 0, 0} {
		if err := SetExpiry(t.Context(), coll, d); err != nil {
			t.Fatal(err)
		}
		seconds := map[string]int64{}
		specs, err := coll.Indexes().ListSpecifications(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range specs {
			if s.ExpireAfterSeconds != nil {
				seconds[s.Name] = int64(*s.ExpireAfterSeconds)
			}
		}
		if d == 0 && len(seconds) != 0 {
			t.Errorf("after SetExpiry(0): got %v, want no expiry", seconds)
		}
		letterExpires := seconds[expiryIndex] == int64(d/time.Second)
		chunkExpires := seconds[chunkExpiryIndex] == int64((d+time.Hour)/time.Second)
		if d > 0 && (!letterExpires || !chunkExpires) {
			t.Errorf("after SetExpiry(%s): got %v", d, seconds)
		}
	}
	specs, err := coll.Indexes().ListSpecifications(t.Context())
	if want := 1 + len(Indexes()); err != nil || len(specs) != want {
		t.Errorf("%d indexes are left, %v, want %d", len(specs), err, want)
	}

	// Letters and chunks have the fields by which they expire.
	b.move(b.insertValid("large", bson.E{Key: "extra", Value: make([]byte, 15<<20+1)}))
	isDate := bson.D{{Key: "$type", Value: "date"}}
	n, err := coll.CountDocuments(t.Context(), bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: "movedAt", Value: isDate}},
		bson.D{{Key: "chunkedAt", Value: isDate}},
	}}})
	if all := b.countDocuments("outbox_dead"); err != nil || n != all {
		t.Errorf("%d of %d documents can expire, %v, want all", n, all, err)
	}
}

// TestN15_ALetterThatIsNeededStillIsNotDiscarded: if the position is before the event, only the
// letter keeps the next owner from sending the event.
func TestN15_ALetterThatIsNeededStillIsNotDiscarded(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	old, late := b.insertValid("old"), b.insertValid("late")
	old.Pos = "82000000030000000100"
	late.Pos = "82000000090000000100"
	b.move(old, late)

	setPosition := func(second uint32) {
		t.Helper()
		_, err := b.state.Collection("watchers").UpdateOne(t.Context(),
			bson.D{{Key: "_id", Value: "orders/0of1"}},
			bson.D{{Key: "$set", Value: bson.D{{Key: "clusterTime", Value: bson.Timestamp{T: second}}}}},
			options.UpdateOne().SetUpsert(true))
		if err != nil {
			t.Fatal(err)
		}
	}

	setPosition(5)
	n, err := b.newDesk().Discard(t.Context(), b.ns(), Query{All: true}, nil)
	var refused *RefusedError
	if n != 0 || !errors.As(err, &refused) || refused.ID.ID.StringValue() != "late" {
		t.Errorf("discard of all: got %d, %v, want a refusal of late", n, err)
	}
	if n, err := b.newDesk().Discard(t.Context(), b.ns(), Query{IDs: toValues(t, "old")}, nil); n != 1 || err != nil {
		t.Errorf("discard of a passed letter: got %d, %v, want 1", n, err)
	}

	setPosition(10)
	if n, err := b.newDesk().Discard(t.Context(), b.ns(), Query{All: true}, nil); n != 1 || err != nil {
		t.Errorf("discard after the watcher has passed it: got %d, %v, want 1", n, err)
	}
}
