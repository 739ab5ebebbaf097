package scheduled

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// plainFencer runs its function in a transaction, twice if the test sets that, as after a commit of unknown
// outcome.
type plainFencer struct {
	client *mongo.Client
	twice  bool
}

func (f *plainFencer) Fenced(ctx context.Context, _ bson.D, fn func(ctx context.Context) error) error {
	for range map[bool]int{false: 1, true: 2}[f.twice] {
		err := f.client.UseSession(ctx, func(ctx context.Context) error {
			_, err := mongo.SessionFromContext(ctx).WithTransaction(ctx, func(ctx context.Context) (any, error) { return nil, fn(ctx) })
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// takeAll reads the due envelopes that query selects, and takes them out of the outbox.
func takeAll(tx context.Context, coll *mongo.Collection, query *query, latest bson.DateTime) (list []taken, full bool, err error) {
	if list, full, err = readDue(tx, coll, query, latest); err == nil {
		err = removeTaken(tx, coll, query, list, full)
	}
	return list, full, err
}

func dueDocs(t *testing.T, coll *mongo.Collection, docs ...bson.D) []bson.RawValue {
	t.Helper()
	var ids []bson.RawValue
	for _, d := range docs {
		id := bson.NewObjectID()
		if _, err := coll.InsertOne(t.Context(), append(bson.D{{Key: "_id", Value: id}}, d...)); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, bson.RawValue{Type: bson.TypeObjectID, Value: id[:]})
	}
	return ids
}

// N19: a claim takes the scheduled envelopes that are due, with any fields that a service uses, and ignores the others.
func TestN19_ClaimFilter(t *testing.T) {
	t.Parallel()
	for _, mark := range []bool{false, true} {
		t.Run(fmt.Sprintf("mark %v", mark), func(t *testing.T) {
			t.Parallel()
			coll := newDatabase(t).Collection("outbox")
			if err := outboxes.EnsureIndexes(t.Context(), coll); err != nil {
				t.Fatal(err)
			}

			past := bson.E{Key: "dueAt", Value: time.Now().Add(-time.Hour)}
			cases := []struct {
				name string
				doc  bson.D
				has  bool // the claim takes it
			}{
				{"due", bson.D{past}, true},
				{"due in a moment", bson.D{{Key: "dueAt", Value: time.Now().Add(5 * time.Second)}}, true},
				{"with fields of the service", bson.D{past, {Key: "state", Value: "open"}, {Key: "claim", Value: "mine"}, {Key: "pos", Value: 1}}, true},
				{"due since ever", bson.D{{Key: "dueAt", Value: bson.DateTime(math.MinInt64)}}, true},
				{"not due", bson.D{{Key: "dueAt", Value: time.Now().Add(time.Minute)}}, false},
				{"never due", bson.D{{Key: "dueAt", Value: bson.DateTime(math.MaxInt64)}}, false},
				{"not scheduled", bson.D{}, false},
				{"null", bson.D{{Key: "dueAt", Value: nil}}, false},
				{"no date", bson.D{{Key: "dueAt", Value: "yesterday"}}, false},
				{"a list with a date", bson.D{{Key: "dueAt", Value: bson.A{time.Now().Add(-time.Hour)}}}, false},
			}
			var docs []bson.D
			for _, c := range cases {
				docs = append(docs, c.doc)
			}

			ids := dueDocs(t, coll, docs...)
			f := &plainFencer{client: coll.Database().Client(), twice: true}
			watchers := coll.Database().Collection("watchers")
			if _, err := watchers.InsertOne(t.Context(), bson.D{{Key: "_id", Value: watcherID}}); err != nil {
				t.Fatal(err)
			}
			had, runs := map[string]time.Time{}, 0
			began := time.Now()
			err := f.Fenced(t.Context(), nil, func(tx context.Context) error {
				runs++
				all := &query{limit: 100, bytes: maxClaimBytes, mark: mark}
				other := coll.Database().Collection("other")
				if list, full, err := takeAll(tx, other, all, bson.NewDateTimeFromTime(began)); len(list) > 0 || full || err != nil {
					t.Errorf("of a collection that does not exist: %v %v %v", list, full, err)
				}
				clock, err := readClock(tx, watchers, watcherID)
				if err != nil {
					return err
				}
				list, full, err := takeAll(tx, coll, all, clock.now+10_000)
				if full || runs > 1 && len(list) > 0 {
					t.Errorf("run %d takes %d envelopes, full %v", runs, len(list), full)
				}
				for i := range list {
					had[string(list[i].id().Value)] = clock.localTime(list[i].due)
				}
				return err
			})
			if err != nil || runs != 2 {
				t.Fatalf("%d runs, %v", runs, err)
			}

			for i, c := range cases {
				at, has := had[string(ids[i].Value)]
				if has != c.has {
					t.Errorf("%s: claimed %v", c.name, has)
				}
				if due, ok := c.doc, c.name == "due in a moment"; ok && at.Before(due[0].Value.(time.Time).Truncate(time.Millisecond)) {
					t.Errorf("%s: is sent at %s", c.name, at)
				} else if has && !ok && at.After(time.Now()) || has && at.Before(began) {
					t.Errorf("%s: is sent at %s", c.name, at)
				}

				doc, err := coll.FindOne(t.Context(), bson.D{{Key: "_id", Value: ids[i]}}).Raw()
				switch {
				case c.has && !mark:
					if !errors.Is(err, mongo.ErrNoDocuments) {
						t.Errorf("%s: still in the outbox: %s, %v", c.name, doc, err)
					}
				case c.has:
					want, _ := bson.Marshal(bson.D{{Key: "at", Value: c.doc[0].Value}})
					if err != nil || doc.Lookup("dueAt").Type != 0 || !doc.Lookup("scheduledFor").Equal(bson.Raw(want).Lookup("at")) {
						t.Errorf("%s: %s, %v", c.name, doc, err)
					}
				default:
					if err != nil || doc.Lookup("scheduledFor").Type != 0 {
						t.Errorf("%s: %s, %v", c.name, doc, err)
					}
				}
			}
		})
	}
}

// A claim takes as many envelopes as one transaction may hold, and reports that there are more. It takes a larger one alone.
func TestAClaimIsBoundedInBytes(t *testing.T) {
	t.Parallel()
	coll := newDatabase(t).Collection("outbox")
	past := bson.E{Key: "dueAt", Value: time.Now().Add(-time.Hour)}
	body := func(n int) bson.E { return bson.E{Key: "payload", Value: make([]byte, n)} }
	ids := dueDocs(t, coll, bson.D{past, body(9 << 20)}, bson.D{past, body(3 << 20)}, bson.D{past, body(3 << 20)}, bson.D{past, body(3 << 20)})

	f := &plainFencer{client: coll.Database().Client()}
	for _, c := range []struct {
		room, want int
		full       bool
	}{{100, 0, true}, {maxClaimBytes, 1, true}, {maxClaimBytes, 1, true}, {3 << 20, 0, true}, {maxClaimBytes, 1, true}, {maxClaimBytes, 1, false}, {maxClaimBytes, 0, false}} {
		err := f.Fenced(t.Context(), nil, func(tx context.Context) error {
			list, full, err := takeAll(tx, coll, &query{limit: 10, bytes: c.room}, bson.NewDateTimeFromTime(time.Now()))
			if len(list) != c.want || full != c.full {
				t.Errorf("%d envelopes are taken into %d bytes, full %v, want %d; %v", len(list), c.room, full, c.want, err)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if n, err := coll.CountDocuments(t.Context(), bson.D{}); err != nil || n > 0 {
		t.Errorf("%d of %d are left, %v", n, len(ids), err)
	}
}

// For envelopes with random due times, of which many share one, and for claims of every size, a claim takes the envelopes that are due first,
// and removes exactly these. An id that differs from another one only for the collation of the collection is another id.
func TestN19_AClaimRemovesWhatItHasRead(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	for _, mark := range []bool{false, true} {
		name := fmt.Sprintf("outbox%v", mark)
		ignoresCase := options.CreateCollection().SetCollation(&options.Collation{Locale: "en", Strength: 2})
		if err := db.CreateCollection(t.Context(), name, ignoresCase); err != nil {
			t.Fatal(err)
		}
		coll := db.Collection(name)
		if err := outboxes.EnsureIndexes(t.Context(), coll); err != nil {
			t.Fatal(err)
		}
		began := time.Now().Truncate(time.Millisecond)
		var docs []any
		due := map[string]time.Time{}
		for i := range 200 {
			at := began.Add(-time.Duration(rand.IntN(12)) * time.Minute)
			id := fmt.Sprint("id", i)
			due[id] = at
			docs = append(docs, bson.D{{Key: "_id", Value: id}, {Key: "dueAt", Value: at}, {Key: "slot", Value: int32(rand.IntN(1024))}})
		}
		later := bson.D{{Key: "_id", Value: "later"}, {Key: "dueAt", Value: began.Add(time.Hour)}}
		if _, err := coll.InsertMany(t.Context(), append(docs, later)); err != nil {
			t.Fatal(err)
		}

		f := &plainFencer{client: coll.Database().Client()}
		last := time.Time{}
		for len(due) > 0 {
			take := &query{limit: 1 + rand.IntN(30), bytes: maxClaimBytes, mark: mark}
			if rand.IntN(3) == 0 {
				for id := range due {
					value, _ := bson.Marshal(bson.D{{Key: "id", Value: id}})
					if take.except = append(take.except, bson.Raw(value).Lookup("id")); rand.IntN(4) == 0 {
						break
					}
				}
			}
			err := f.Fenced(t.Context(), nil, func(tx context.Context) error {
				list, full, err := takeAll(tx, coll, take, bson.NewDateTimeFromTime(began))
				if full != (len(list) == take.limit) {
					t.Errorf("%d of %d are taken, full %v", len(list), take.limit, full)
				}
				for i := range list {
					id, at := list[i].id().StringValue(), list[i].due.Time()
					if !at.Equal(due[id]) || len(take.except) == 0 && at.Before(last) {
						t.Errorf("%s is taken, which is due at %s", id, due[id])
					}
					delete(due, id)
					if len(take.except) == 0 {
						last = at
					}
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			if len(take.except) > 0 {
				last = time.Time{}
			}
			n, err := coll.CountDocuments(t.Context(), bson.D{{Key: "dueAt", Value: bson.D{{Key: "$exists", Value: true}}}})
			if err != nil || int(n) != len(due)+1 {
				t.Fatalf("%d are left in the outbox, want %d; %v", n, len(due)+1, err)
			}
		}
	}
}

// The query for due envelopes reads only the index, for any number of envelopes that are not due.
func TestScheduledByTheIndex(t *testing.T) {
	t.Parallel()
	coll := newDatabase(t).Collection("outbox")
	if err := outboxes.EnsureIndexes(t.Context(), coll); err != nil {
		t.Fatal(err)
	}

	var docs []any
	for i := range 500 {
		docs = append(docs, bson.D{{Key: "n", Value: i}}, bson.D{{Key: "dueAt", Value: time.Now().Add(time.Hour)}})
	}
	if _, err := coll.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}

	dueDocs(t, coll, bson.D{{Key: "dueAt", Value: time.Now().Add(-time.Minute)}}, bson.D{{Key: "dueAt", Value: time.Now().Add(-time.Hour)}})
	var plan bson.Raw
	err := coll.Database().RunCommand(t.Context(), bson.D{{Key: "explain", Value: bson.D{
		{Key: "find", Value: coll.Name()},
		{Key: "filter", Value: bson.D{{Key: "dueAt", Value: bson.D{{Key: "$lte", Value: time.Now()}}}}},
		{Key: "sort", Value: bson.D{{Key: "dueAt", Value: 1}}},
	}}, {Key: "verbosity", Value: "executionStats"}}).Decode(&plan)
	if err != nil {
		t.Fatal(err)
	}
	if n := plan.Lookup("executionStats", "totalDocsExamined").AsInt64(); n != 2 {
		t.Errorf("%d documents examined to find 2", n)
	}

	first, err := findFirstDue(t.Context(), coll, slot.Range{}, nil)
	if err != nil || first == nil || first.until != 0 || time.Since(time.UnixMilli(first.at)) < 59*time.Minute {
		t.Errorf("the first: %+v, %v", first, err)
	}

	if n, err := coll.CountDocuments(t.Context(), bson.D{}); err != nil || n != 1002 {
		t.Errorf("a look left %d, %v", n, err)
	}
}
