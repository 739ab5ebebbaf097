package scheduled

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/slot"
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
	dirty  []string
}

func (f *plainFencer) Fenced(ctx context.Context, dirty []string, fn func(ctx context.Context) error) error {
	f.dirty = dirty
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

func scheduledClaim(token string, epoch int64) bson.E {
	return bson.E{Key: "claim", Value: bson.D{{Key: "token", Value: token}, {Key: "epoch", Value: epoch}}}
}

// N19: a claim takes some envelopes, and ignores the others.
func TestN19_ClaimFilter(t *testing.T) {
	t.Parallel()
	coll := newDatabase(t).Collection("outbox")
	if err := outboxes.EnsureIndexes(t.Context(), coll); err != nil {
		t.Fatal(err)
	}

	past := bson.E{Key: "dueAt", Value: time.Now().Add(-time.Hour)}
	cases := []struct {
		name string
		doc  bson.D
		// has reports whether the envelope has the claim afterwards.
		has bool
		// lists reports whether the index lists the envelope as available.
		lists bool
	}{
		{"unclaimed", bson.D{past}, true, true},
		{"of an older epoch", bson.D{past, scheduledClaim("x", 6)}, true, true},
		{"of this owner", bson.D{past, scheduledClaim("mine", 7)}, true, false},
		{"of another of this epoch", bson.D{past, scheduledClaim("x", 7)}, false, false},
		{"of a later epoch", bson.D{past, scheduledClaim("x", 8)}, false, false},
		{"not due", bson.D{{Key: "dueAt", Value: time.Now().Add(10 * time.Second)}}, false, false},
		{"with a state", bson.D{past, {Key: "state", Value: "retry"}}, false, false},
		{"not scheduled", bson.D{}, false, false},
		{"no date", bson.D{{Key: "dueAt", Value: "yesterday"}}, false, false},
	}

	var docs []bson.D
	for _, c := range cases {
		docs = append(docs, c.doc)
	}

	ids := dueDocs(t, coll, docs...)
	claim := dueClaim{Token: "mine", Epoch: 7}
	cur, err := scheduledUntil(t.Context(), coll, claim, time.Now(), 2, slot.Range{})
	if err != nil {
		t.Fatal(err)
	}

	listed := map[string]bool{}
	for cur.Next(t.Context()) {
		var a upcoming
		if err := cur.Decode(&a); err != nil {
			t.Fatal(err)
		}
		listed[string(a.ID.Value)] = true
	}

	f := &plainFencer{client: coll.Database().Client(), twice: true}
	groups := []*claimGroup{{coll: coll, ids: ids}, {coll: coll.Database().Collection("other"), ids: ids[:1]}}
	if err := claimGroups(t.Context(), f, claim, time.Now(), groups); err != nil {
		t.Fatal(err)
	}

	had := map[string]bool{}
	n, err := readClaimed(t.Context(), *groups[0], claim, bson.Timestamp{}, 2, func(raw bson.Raw) error {
		had[string(raw.Lookup("_id").Value)] = true
		return nil
	})
	if err != nil || n != 3 || groups[0].have != 3 || groups[1].have != 0 {
		t.Errorf("%d claimed, %d read, %v; want 3", groups[0].have, n, err)
	}
	if want := fmt.Sprint([]string{mongodb.Namespace(coll), coll.Database().Name() + ".other"}); fmt.Sprint(f.dirty) != want {
		t.Errorf("dirty %v, want %s", f.dirty, want)
	}

	for i, c := range cases {
		if id := ids[i].Value; had[string(id)] != c.has || listed[string(id)] != c.lists {
			t.Errorf("%s: claimed %v, listed %v", c.name, had[string(id)], listed[string(id)])
		}
	}

	stop := errors.New("stop")
	if _, err := readClaimed(t.Context(), *groups[0], claim, bson.Timestamp{T: 1}, 2, func(bson.Raw) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("the error of take: %v", err)
	}
	if err := claimGroups(t.Context(), f, claim, time.Now(), []*claimGroup{{coll: coll, ids: make([]bson.RawValue, maxClaim+1)}}); err == nil {
		t.Error("more than a transaction may hold were accepted")
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
	c := dueClaim{Token: "t", Epoch: 1}
	err := coll.Database().RunCommand(t.Context(), bson.D{{Key: "explain", Value: bson.D{
		{Key: "find", Value: coll.Name()},
		{Key: "filter", Value: c.filterUnclaimed(bson.E{Key: "dueAt", Value: bson.D{{Key: "$lte", Value: time.Now()}}})},
		{Key: "sort", Value: bson.D{{Key: "dueAt", Value: 1}}},
	}}, {Key: "verbosity", Value: "executionStats"}}).Decode(&plan)
	if err != nil {
		t.Fatal(err)
	}
	if n := plan.Lookup("executionStats", "totalDocsExamined").AsInt64(); n != 2 {
		t.Errorf("%d documents examined to find 2", n)
	}

	cur, err := scheduledUntil(t.Context(), coll, c, time.Now(), 100, slot.Range{})
	if err != nil {
		t.Fatal(err)
	}

	var found []upcoming
	if err := cur.All(t.Context(), &found); err != nil || len(found) != 2 || found[0].DueAt > found[1].DueAt {
		t.Errorf("%v %v", found, err)
	}

	if n, err := coll.CountDocuments(t.Context(), bson.D{{Key: "claim", Value: bson.D{{Key: "$exists", Value: true}}}}, options.Count().SetLimit(1)); err != nil || n != 0 {
		t.Errorf("a look claimed %d, %v", n, err)
	}
}
