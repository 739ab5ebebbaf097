package scheduled

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/keyhash"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/purge"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/waiting"
)

// TestN28_FrequentStatementsExamineTheirOwnDocuments explains the statements that a running relay repeats, for a whole
// watcher and for a slot of sixteen. None of them scans a collection, and none reads documents that it does not need.
// For example, none reads documents of other slots.
func TestN28_FrequentStatementsExamineTheirOwnDocuments(t *testing.T) {
	t.Parallel()
	const (
		// The number counts exceptions, scheduled envelopes and healthy envelopes.
		each    = keyhash.Slots * 2
		slack   = 5
		slots   = 16
		healthy = each
	)
	name, most, statements := "", int64(0), 0
	client := stacktest.Explained(t, func(p stacktest.Plan) {
		if statements++; slices.Contains(p.Stages, "COLLSCAN") || p.Docs > most+slack {
			t.Errorf("%s: %d keys and %d documents examined, want at most %d: %v %v", name, p.Keys, p.Docs, most, p.Stages, p.Command)
		}
	})
	coll := mongodb.Majority(stacktest.Database(t, client).Collection("outbox"))
	if err := outboxes.EnsureIndexes(t.Context(), coll); err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	var docs []any
	for i := range each {
		in := bson.E{Key: "slot", Value: int32(i % keyhash.Slots)}
		ts := bson.E{Key: "ts", Value: bson.Timestamp{T: uint32(1000 + i)}}
		waits := bson.D{
			{Key: "_id", Value: fmt.Sprint("waits", i)},
			{Key: "state", Value: outboxes.Exceptional[i%3]},
			{Key: "key", Value: fmt.Sprint("k", i%keyhash.Slots)},
			{Key: "pos", Value: fmt.Sprintf("82%06d", i)},
			{Key: "pending", Value: bson.A{"a"}},
			ts, in,
		}
		if i%3 == 0 {
			waits = append(waits, bson.E{Key: "nextAt", Value: now.Add(-time.Hour)})
		}
		docs = append(docs, waits,
			bson.D{{Key: "_id", Value: fmt.Sprint("scheduled", i)}, {Key: "dueAt", Value: now.Add(-time.Minute)}, ts, in},
			bson.D{{Key: "_id", Value: fmt.Sprint("healthy", i)}, ts, in})
	}
	if _, err := coll.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}

	take := func(bson.Raw) error { return nil }
	for _, p := range []slot.Range{{}, {I: 5, N: slots}} {
		own := int64(each / max(p.N, 1))
		due := func() (err error) {
			cur, err := scheduledUntil(t.Context(), coll, dueClaim{Token: "t", Epoch: 1}, now, 100, p)
			if err == nil {
				err = cur.Close(t.Context())
			}
			return err
		}
		scan := &waiting.ExceptionScan{Coll: coll, Slot: p}
		for _, s := range []struct {
			name string
			most int64
			run  func() error
		}{
			{"the first page", 100, func() error { _, err := scan.Page(t.Context(), 100, take); return err }},
			{"the second page", 100, func() error { _, err := scan.Page(t.Context(), 100, take); return err }},
			{"a key", 2, func() error {
				_, err := (&waiting.ExceptionScan{Coll: coll, Slot: p, Keys: keysOf(t, fmt.Sprint("k", 5*keyhash.Slots/slots))}).Page(t.Context(), 100, take)
				return err
			}},
			{"due retries", min(own, 100), func() error { _, err := waiting.DueRetries(t.Context(), coll, now, nil, 100, p); return err }},
			{"gates", own, func() error { return waiting.EachException(t.Context(), coll, p, take) }},
			{"a takeover", own, func() error { return waiting.EachTaken(t.Context(), coll, p, now, take) }},
			{"behind a position", own, func() error { return waiting.EachBehind(t.Context(), coll, p, "82", take) }},
			{"counts", own, func() error { _, err := waiting.CountExceptions(t.Context(), coll, p); return err }},
			{"dirty", 1, func() error { _, err := outboxes.StillDirty(t.Context(), coll, p); return err }},
			{"scheduled", own, due},
			{"stray claims", own, func() error { _, err := findStrayClaims(t.Context(), coll, 1, now, p); return err }},
		} {
			name, most = fmt.Sprintf("%s of %v", s.name, p), s.most
			if err := s.run(); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
	}

	for _, s := range []struct {
		name string
		most int64
		run  func() error
	}{
		{"the oldest", 1, func() error { _, _, err := outboxes.OldestTS(t.Context(), coll); return err }},
		{"purge", 300, func() error {
			_, err := purge.PurgeBatch(t.Context(), coll, bson.Timestamp{}, bson.Timestamp{T: 1000 + healthy}, 100)
			return err
		}},
		{"purge of unstamped", 0, func() error {
			_, err := purge.Loop{
				Coll: coll, Candidates: &purge.Candidates{}, Size: func() int { return 100 },
				Cut:  func(context.Context) (purge.Cut, error) { return purge.Cut{Before: bson.Timestamp{T: 1}}, nil },
				Step: func(context.Context, int64) error { return nil },
			}.Run(t.Context())
			return err
		}},
		{"by id", 1, func() error { _, err := mongodb.Fetch(t.Context(), coll, keysOf(t, "healthy500")[0]); return err }},
	} {
		name, most = s.name, s.most
		if err := s.run(); err != nil && !errors.Is(err, mongo.ErrNoDocuments) {
			t.Fatalf("%s: %v", name, err)
		}
	}
	if statements < 2*12+5 {
		t.Errorf("%d statements were explained", statements)
	}
}
