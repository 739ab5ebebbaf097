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
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/x/bsonx/bsoncore"

	"github.com/outrelay/outrelay/internal/contract/keyhash"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/purge"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// TestN28_FrequentStatementsExamineTheirOwnDocuments explains the statements that a running relay repeats, for a whole
// watcher and for a slot of sixteen. None of them scans a collection, and none reads documents that it does not need.
// For example, none reads documents of other slots.
func TestN28_FrequentStatementsExamineTheirOwnDocuments(t *testing.T) {
	t.Parallel()
	const (
		// The number counts waiting, scheduled envelopes and healthy envelopes.
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
	db := stacktest.Database(t, client)
	// The database of a tenant may compare text in its own way.
	if err := db.CreateCollection(t.Context(), "outbox", options.CreateCollection().SetCollation(&options.Collation{Locale: "en", Strength: 2})); err != nil {
		t.Fatal(err)
	}
	coll, waits := mongodb.Majority(db.Collection("outbox")), db.Collection("waiting")
	for coll, indexes := range map[*mongo.Collection][]mongodb.Index{coll: outboxes.Indexes{Purge: true, Scheduled: true}.List(), waits: waiting.Indexes()} {
		if err := mongodb.EnsureIndexSet(t.Context(), coll, indexes); err != nil {
			t.Fatal(err)
		}
	}
	now := time.Now()
	var docs, stored []any
	for i := range each {
		in := bson.E{Key: "slot", Value: int32(i % keyhash.Slots)}
		ts := bson.E{Key: "ts", Value: bson.Timestamp{T: uint32(1000 + i)}}
		for _, watcher := range []string{"w", "other"} {
			w := bson.D{
				{Key: "_id", Value: bson.Binary{Data: fmt.Appendf(nil, "%5s%011d", watcher, i)}},
				{Key: "watcher", Value: watcher},
				{Key: "ns", Value: "a.outbox"},
				{Key: "id", Value: fmt.Sprint("waits", i)},
				{Key: "key", Value: fmt.Sprint("k", i%keyhash.Slots)},
				{Key: "pos", Value: fmt.Sprintf("82%06d", i)},
				{Key: "reason", Value: waiting.Reasons()[i%3]},
				{Key: "topics", Value: "a"},
				in,
			}
			if i%3 == 0 {
				w = append(w, bson.E{Key: "nextAt", Value: now.Add(-time.Hour)})
			}
			stored = append(stored, w)
		}
		docs = append(docs,
			bson.D{{Key: "_id", Value: fmt.Sprint("scheduled", i)}, {Key: "dueAt", Value: now.Add(-time.Minute)}, ts, in},
			bson.D{{Key: "_id", Value: fmt.Sprint("healthy", i)}, ts, in})
	}
	if _, err := coll.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}
	if _, err := waits.InsertMany(t.Context(), stored); err != nil {
		t.Fatal(err)
	}

	take := func(bson.Raw) error { return nil }
	takeDocument := func(*waiting.Document) error { return nil }
	for _, p := range []slot.Range{{}, {I: 5, N: slots}} {
		own := int64(each / max(p.N, 1))
		store := waiting.NewStore(waits, "w", p)
		look := func() error { _, err := findFirstDue(t.Context(), coll, p, nil); return err }
		claim := func() error {
			_, _, err := takeAll(t.Context(), coll, &query{slot: p, limit: 10, bytes: maxClaimBytes}, bson.NewDateTimeFromTime(now))
			return err
		}
		claimLocked := func() error {
			ids := []bson.RawValue{{Type: bson.TypeString, Value: bsoncore.AppendString(nil, fmt.Sprint("scheduled", 5*keyhash.Slots/slots+20+p.N))}}
			list, _, err := takeAll(t.Context(), coll, &query{slot: p, ids: ids, limit: 1, bytes: maxClaimBytes}, bson.NewDateTimeFromTime(now))
			if len(list) != 1 {
				t.Errorf("%d envelopes claimed", len(list))
			}
			return err
		}
		scan := &waiting.Scan{Store: store}
		for _, s := range []struct {
			name string
			most int64
			run  func() error
		}{
			{"the first page", 100, func() error { _, err := scan.Page(t.Context(), 100, take); return err }},
			{"the second page", 100, func() error { _, err := scan.Page(t.Context(), 100, take); return err }},
			{"a key", 2, func() error {
				_, err := (&waiting.Scan{Store: store, NS: "a.outbox", Keys: []string{fmt.Sprint("k", 5*keyhash.Slots/slots)}}).Page(t.Context(), 100, take)
				return err
			}},
			{"due retries", min(own, 100), func() error { _, err := store.DueKeys(t.Context(), now, nil, 100); return err }},
			{"gates", own, func() error { return store.Each(t.Context(), takeDocument) }},
			{"a takeover", own, func() error { return store.EachWithoutPayload(t.Context(), []string{"a"}, takeDocument) }},
			{"stamps", own, func() error {
				return store.EachStamp(t.Context(), func(*waiting.Document) error { return nil })
			}},
			{"an id", 2, func() error {
				return store.OfIDs(t.Context(), "a.outbox", []bson.RawValue{{Type: bson.TypeString, Value: bsoncore.AppendString(nil, "waits500")}}, takeDocument)
			}},
			{"has scheduled", 1, func() error { _, err := outboxes.HasScheduled(t.Context(), coll, p); return err }},
			{"the first scheduled", 1, look},
			{"a claim", 10, claim},
			{"a claim of a locked envelope", 1, claimLocked},
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
			_, err := purge.PurgeBatch(t.Context(), coll, bson.Timestamp{}, purge.Cut{Before: bson.Timestamp{T: 1000 + healthy}}, 100)
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
		{"by id", 1, func() error {
			_, err := mongodb.Fetch(t.Context(), coll, bson.RawValue{Type: bson.TypeString, Value: bsoncore.AppendString(nil, "healthy500")})
			return err
		}},
	} {
		name, most = s.name, s.most
		if err := s.run(); err != nil && !errors.Is(err, mongo.ErrNoDocuments) {
			t.Fatalf("%s: %v", name, err)
		}
	}
	if statements < 2*14+4 {
		t.Errorf("%d statements were explained", statements)
	}
}
