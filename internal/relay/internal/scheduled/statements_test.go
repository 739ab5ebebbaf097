package scheduled

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// upcoming is a scheduled envelope as the index has it.
type upcoming struct {
	ID    bson.RawValue `bson:"_id"`
	DueAt bson.DateTime `bson:"dueAt"`
}

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
			}
			var docs []bson.D
			for _, c := range cases {
				docs = append(docs, c.doc)
			}

			ids := dueDocs(t, coll, docs...)
			f := &plainFencer{client: coll.Database().Client(), twice: true}
			had, runs := map[string]time.Time{}, 0
			began := time.Now()
			err := f.Fenced(t.Context(), nil, func(tx context.Context) error {
				runs++
				if _, err := takeDue(tx, coll.Database().Collection("other"), ids[:1], 10*time.Second, mark, mongodb.MaxBytes, func(bson.Raw, time.Time) {
					t.Error("an envelope of a collection that does not exist")
				}); err != nil {
					return err
				}
				_, err := takeDue(tx, coll, ids, 10*time.Second, mark, mongodb.MaxBytes, func(raw bson.Raw, at time.Time) {
					if runs > 1 {
						t.Errorf("a claim is repeated and takes %s again", raw)
					}
					had[string(raw.Lookup("_id").Value)] = at
				})
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
	}{{100, 0, true}, {mongodb.MaxBytes, 1, true}, {mongodb.MaxBytes, 2, true}, {4 << 20, 1, false}, {4 << 20, 0, false}} {
		err := f.Fenced(t.Context(), nil, func(tx context.Context) error {
			n := 0
			size, err := takeDue(tx, coll, ids, 0, false, c.room, func(bson.Raw, time.Time) { n++ })
			if n != c.want || errors.Is(err, errFull) != c.full || n > 1 && size > c.room {
				t.Errorf("%d envelopes with %d bytes are taken into %d bytes, want %d; %v", n, size, c.room, c.want, err)
			}
			if errors.Is(err, errFull) {
				return nil
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
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

	cur, err := scheduledUntil(t.Context(), coll, time.Now(), 100, slot.Range{})
	if err != nil {
		t.Fatal(err)
	}

	var found []upcoming
	if err := cur.All(t.Context(), &found); err != nil || len(found) != 2 || found[0].DueAt > found[1].DueAt {
		t.Errorf("%v %v", found, err)
	}

	if n, err := coll.CountDocuments(t.Context(), bson.D{}); err != nil || n != 1002 {
		t.Errorf("a look left %d, %v", n, err)
	}
}
