package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/internal/contract/keyhash"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/inbox/mongostore"
)

func TestOptionsReportEveryProblem(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, err := mongostore.Open(b.db, inbox.Settings{Collection: "a$b", Retention: time.Second, Lease: time.Millisecond})
	if err == nil {
		t.Fatal("no error")
	}

	for _, part := range []string{`"a$b"`, "retention 1s", "lease 1ms"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not in %q", part, err)
		}
	}

	if _, err := mongostore.Open(nil, inbox.Settings{}); err == nil {
		t.Error("a nil database is taken")
	}
}

// TestEveryPathSetsAnExpiry: a marker without an expiry would never be deleted.
func TestEveryPathSetsAnExpiry(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ctx := t.Context()
	b.admit(t, b.inbox, newEntry("admitted"), newEntryAt("placed", 0, 1))
	for id, c := range map[string]inbox.OnceConfig{"once": {}, "once with a claim": {Claim: true}} {
		if err := b.inbox.Once(ctx, newEntry(id), func(context.Context) error { return nil }, c); err != nil {
			t.Fatal(err)
		}
	}

	for _, id := range []string{"claimed", "released", "deferred", "taken over"} {
		c, err := b.inbox.Claim(ctx, newEntry(id), inbox.MinLease)
		if err != nil {
			t.Fatal(err)
		}

		switch id {
		case "released":
			err = c.Release(ctx)
		case "deferred":
			err = c.Defer(ctx, time.Second)
		}

		if err != nil {
			t.Fatal(err)
		}
	}

	if err := b.setPast(ctx, "inbox_claims", "until"); err != nil {
		t.Fatal(err)
	}

	b.admit(t, b.inbox, newEntry("taken over"))

	cur, err := b.db.Collection("inbox").Aggregate(ctx, bson.A{bson.D{{Key: "$project", Value: bson.D{
		{Key: "left", Value: bson.D{{Key: "$subtract", Value: bson.A{"$k", "$$NOW"}}}}, {Key: "s", Value: 1},
	}}}})
	if err != nil {
		t.Fatal(err)
	}

	var docs []struct {
		ID   bson.Raw `bson:"_id"`
		Left *int64   `bson:"left"`
	}
	if err := cur.All(ctx, &docs); err != nil {
		t.Fatal(err)
	}
	if len(docs) != 8 {
		t.Fatalf("%d markers", len(docs))
	}

	for _, d := range docs {
		if d.Left == nil {
			t.Errorf("%s has no expiry", d.ID)
			continue
		}

		if left := time.Duration(*d.Left) * time.Millisecond; left > inbox.DefaultRetention || left < inbox.DefaultRetention-5*time.Minute {
			t.Errorf("%s is kept for %s more", d.ID, left)
		}
	}
}

func TestSweepIsBounded(t *testing.T) {
	t.Parallel()
	w := new(watch)
	b := setup(t, w.options())
	b.dropTTL(t, "inbox", "k_1")
	if err := b.newWith(t, inbox.Settings{WithoutTTL: true}).EnsureIndexes(t.Context()); err != nil {
		t.Fatal(err)
	}

	b.admit(t, b.inbox, newBatch("old", 25, 0)...)
	if err := b.setPast(t.Context(), "inbox", "k"); err != nil {
		t.Fatal(err)
	}

	b.admit(t, b.inbox, newBatch("new", 5, 100)...)
	w.reset()
	for _, want := range []struct {
		removed int64
	}{{20}, {5}, {0}} {
		removed, err := b.inbox.Sweep(t.Context(), 20)
		if err != nil || removed != want.removed {
			t.Fatalf("removed %d, %v; want %+v", removed, err, want)
		}
	}

	if n := b.countDocuments(t, "inbox", bson.D{}); n != 5 {
		t.Fatalf("%d markers are left", n)
	}
	if _, err := b.inbox.Sweep(t.Context(), -1); !errors.Is(err, inbox.ErrInvalid) {
		t.Fatalf("negative limits: %v", err)
	}

	// The query must use the index instead of reading the collection.
	sent := w.commandsOn("inbox")[0].raw
	explained, err := b.db.RunCommand(t.Context(), bson.D{{Key: "explain", Value: bson.D{
		{Key: "aggregate", Value: "inbox"}, {Key: "pipeline", Value: sent.Lookup("pipeline")}, {Key: "cursor", Value: bson.D{}},
	}}}).Raw()
	if err != nil {
		t.Fatal(err)
	}

	plan := explained.Lookup("queryPlanner", "winningPlan").String()
	if !strings.Contains(plan, `"k_1"`) || !strings.Contains(plan, "indexBounds") || strings.Contains(plan, `[MinKey, MaxKey]`) {
		t.Errorf("the plan is %s", plan)
	}
}

func TestCounts(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.dropTTL(t, "inbox_claims", "until_1")
	b.admit(t, b.inbox, newEntry("1"), newEntry("2"))
	for _, id := range []string{"3", "4"} {
		if _, err := b.inbox.Claim(t.Context(), newEntry(id), 0); err != nil {
			t.Fatal(err)
		}
	}

	if _, err := b.db.Collection("inbox_claims").UpdateOne(t.Context(), bson.D{{Key: "_id.i", Value: "3"}}, bson.D{{Key: "$set", Value: bson.D{{Key: "until", Value: time.Unix(1, 0)}}}}); err != nil {
		t.Fatal(err)
	}

	got, err := b.inbox.Counts(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	if diff := cmp.Diff(inbox.Counts{Markers: 4, Claimed: 2, Expired: 1}, got); diff != "" {
		t.Error(diff)
	}
}

func TestEnsureIndexes(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	b := setup(t, options.Client().SetAppName(app))
	if err := b.inbox.EnsureIndexes(t.Context()); err != nil { // again
		t.Fatal(err)
	}

	var ttls []string
	for _, coll := range []string{"inbox", "inbox_claims"} {
		specs, err := b.db.Collection(coll).Indexes().ListSpecifications(t.Context())
		if err != nil {
			t.Fatal(err)
		}

		for _, s := range specs {
			if s.ExpireAfterSeconds != nil && *s.ExpireAfterSeconds == 0 {
				ttls = append(ttls, coll+" "+s.Name)
			}
		}
	}

	if diff := cmp.Diff([]string{"inbox k_1", "inbox_claims until_1"}, ttls); diff != "" {
		t.Error(diff)
	}

	if err := b.newWith(t, inbox.Settings{WithoutTTL: true}).EnsureIndexes(t.Context()); err == nil || !strings.Contains(err.Error(), b.db.Name()+".inbox") {
		t.Errorf("an index with other options: %v", err)
	}

	plain := b.newWith(t, inbox.Settings{WithoutTTL: true, Collection: "plain"})
	if err := plain.EnsureIndexes(t.Context()); err != nil {
		t.Fatal(err)
	}

	stacktest.FailCommand(t, app, "alwaysOn", bson.D{{Key: "failCommands", Value: bson.A{"createIndexes"}}, {Key: "errorCode", Value: 13}})
	err := b.inbox.EnsureIndexes(t.Context())
	if err == nil || !strings.Contains(err.Error(), "creating the index {k: 1} on "+b.db.Name()+".inbox: ") || !strings.Contains(err.Error(), "; grant the user this permission") {
		t.Errorf("a rejection: %v", err)
	}
}

func TestNoWaitReturnsTheConflict(t *testing.T) {
	t.Parallel()
	b := setup(t)
	held, finish, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	hold := sync.OnceFunc(func() { close(held) })
	go func() {
		done <- b.inbox.Once(t.Context(), newEntry("1"), func(context.Context) error {
			hold()
			<-finish
			return nil
		}, inbox.OnceConfig{})
	}()
	<-held
	nothing := func(context.Context) error { return nil }
	err := b.inbox.Once(t.Context(), newEntry("1"), nothing, inbox.OnceConfig{NoWait: true})
	var busy *inbox.InProgressError
	if !errors.As(err, &busy) || busy.Key != newEntry("1").Key || !busy.Until.IsZero() || !errors.Is(err, inbox.ErrInProgress) {
		t.Errorf("the error is %v", err)
	}

	impatient, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("enough")
	cancel(cause)
	if err := b.inbox.Once(impatient, newEntry("1"), nothing, inbox.OnceConfig{}); !errors.Is(err, cause) {
		t.Errorf("the error is %v", err)
	}

	waits := make(chan error, 1)
	go func() { waits <- b.inbox.Once(t.Context(), newEntry("1"), nothing, inbox.OnceConfig{}) }()
	close(finish)
	if err := <-done; err != nil {
		t.Error(err)
	}

	if err := <-waits; !errors.Is(err, inbox.ErrDuplicate) {
		t.Errorf("the waiting handler: %v", err)
	}
}

// TestLanesAreSpreadForAnyNumberOfPartitions: in each partition of any topic, all lanes are used.
func TestLanesAreSpreadForAnyNumberOfPartitions(t *testing.T) {
	t.Parallel()
	for _, partitions := range []uint32{1, 3, 8, 12, 16, 64} {
		var got [inbox.Lanes]int
		var total int
		for i := range 200 * inbox.Lanes * int(partitions) {
			key := fmt.Append(nil, "customer-", i)
			if keyhash.Murmur2(key)&0x7fffffff%partitions == 0 {
				got[inbox.Lane(key, 0)]++
				total++
			}
		}

		for lane, n := range got {
			if n < total/inbox.Lanes/2 || n > total/inbox.Lanes*2 {
				t.Errorf("%d partitions: lane %d has %d of %d records", partitions, lane, n, total)
			}
		}
	}

	if inbox.Lane(nil, 35) != 3 || inbox.Lane([]byte{}, 35) != inbox.Lane([]byte{}, 36) {
		t.Error("a nil key goes by the offset, an empty one by its hash")
	}

	if id := inbox.PlaceID("orders", 12, 345); id != "orders/12/345" {
		t.Error(id)
	}
}

func TestMarkersHoldNoBody(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.admit(t, b.inbox, newEntry("1"), newEntryAt("2", 0, 2))
	c, err := b.inbox.Claim(t.Context(), newEntryAt("3", 0, 3), 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Handled(t.Context()); err != nil {
		t.Fatal(err)
	}

	cur, err := b.db.Collection("inbox").Find(t.Context(), bson.D{})
	if err != nil {
		t.Fatal(err)
	}

	var docs []bson.Raw
	if err := cur.All(t.Context(), &docs); err != nil || len(docs) != 3 {
		t.Fatalf("%d markers, %v", len(docs), err)
	}

	for _, d := range docs {
		if len(d) > 256 {
			t.Errorf("a marker has %d bytes: %s", len(d), d)
		}
	}
}

// TestAnIDOfTheBusinessIsAnIdentity: two records with different events may have the same business
// id.
func TestAnIDOfTheBusinessIsAnIdentity(t *testing.T) {
	t.Parallel()
	b := setup(t)
	if fresh := b.admit(t, b.inbox, newEntryAt("invoice 4711 paid", 0, 10), newEntryAt("invoice 4711 paid", 5, 90)); !cmp.Equal(fresh, []bool{true, false}) {
		t.Fatalf("fresh is %v", fresh)
	}
}

// TestWritesAreByMajorityForAnyClient: a claim must not be rolled back by a failover.
func TestWritesAreByMajorityForAnyClient(t *testing.T) {
	t.Parallel()
	w := new(watch)
	b := setup(t, w.options().SetWriteConcern(writeconcern.W1()).SetReadPreference(readpref.SecondaryPreferred()))
	w.reset()
	c, err := b.inbox.Claim(t.Context(), newEntryAt("1", 0, 1), 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(c.Handled(t.Context()), c.Release(t.Context()), b.inbox.Pass(t.Context(), []inbox.Entry{newEntryAt("2", 1, 2)})); err != nil {
		t.Fatal(err)
	}

	var writes int
	for _, s := range append(append(w.commandsOn("inbox"), w.commandsOn("inbox_claims")...), w.commandsOn("inbox_offsets")...) {
		if s.name == "find" || s.name == "aggregate" {
			continue
		}

		writes++
		if concern := s.raw.Lookup("writeConcern", "w"); concern.Type != bson.TypeString || concern.StringValue() != "majority" {
			t.Errorf("%s of %s has the write concern %s", s.name, s.coll, concern)
		}
	}

	if writes != 6 {
		t.Errorf("%d writes were seen", writes)
	}
}
