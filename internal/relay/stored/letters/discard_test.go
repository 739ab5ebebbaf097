package letters

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
	"github.com/outrelay/outrelay/resume"
)

func (b *bench) discard(ctx context.Context, q Query, did func(int64)) (int64, error) {
	q.Watcher = "orders"
	return Discard(ctx, b.coll, b.db.Collection("watchers"), q, Discarding{}, did)
}

func TestDiscard(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	var list []Letter
	for i := range 2500 {
		list = append(list, b.newLetter(order(i, bson.E{Key: "key", Value: []string{"a", "b"}[i%2]}), at(i)))
	}
	b.write(list...)
	b.write(
		b.newLetter(bson.D{{Key: "_id", Value: "large"}, {Key: "payload", Value: make([]byte, maxInline+1)}}),
		b.newLetter(order(1), func(l *Letter) { l.Watcher = "other" }),
	)

	if _, err := b.discard(t.Context(), Query{RequeueStatus: NotRequeued}, nil); !errors.Is(err, ErrEmptyQuery) {
		t.Errorf("an empty query: got %v, want %v", err, ErrEmptyQuery)
	}

	// An interrupted discard keeps the finished parts, and the same call does the rest.
	ctx, cancel := context.WithCancel(t.Context())
	n, err := b.discard(ctx, Query{Key: "a"}, func(int64) { cancel() })
	if err == nil || n != mongodb.MaxDocuments {
		t.Errorf("interrupted after the first part: got %d, %v, want %d and an error", n, err, mongodb.MaxDocuments)
	}
	n, err = b.discard(t.Context(), Query{Key: "a"}, nil)
	if err != nil || n != 1250-mongodb.MaxDocuments {
		t.Errorf("the second call: got %d, %v, want %d", n, err, 1250-mongodb.MaxDocuments)
	}

	// The chunks of a large letter go with it, and the letters of another watcher stay.
	n, err = b.discard(t.Context(), Query{All: true}, nil)
	if left := b.count(bson.D{}); err != nil || n != 1251 || left != 1 {
		t.Errorf("discard of all: got %d, %v, %d documents left, want 1251 and 1 left", n, err, left)
	}
}

// A letter may be requeued after a discard has read it, and before the discard removes it.
func TestALetterThatWasRequeuedSinceTheScanKeepsItsChunks(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.write(b.newLetter(bson.D{{Key: "_id", Value: "large"}, {Key: "payload", Value: make([]byte, maxInline+1)}}))
	part, err := mongodb.FindAll[scanEntry](t.Context(), b.coll, "reading", bson.D{{Key: "chunks", Value: bson.D{{Key: "$gt", Value: 0}}}})
	if err != nil || len(part) != 1 {
		t.Fatalf("%d letters, %v", len(part), err)
	}
	before := b.count(bson.D{})
	if _, err := b.coll.UpdateOne(t.Context(), idIn([]string{part[0].ID}), setFields(bson.E{Key: "requeued", Value: Requeue{At: b.now}})); err != nil {
		t.Fatal(err)
	}

	n, err := removePart(t.Context(), b.coll, part, Query{Watcher: "orders", RequeueStatus: NotRequeued, All: true})
	if left := b.count(bson.D{}); err != nil || n != 0 || left != before {
		t.Errorf("%d removed, %v; %d documents are left, want %d", n, err, left, before)
	}
}

// A discarded letter is in the archive, whole and with an expiry, and its event stays decided.
func TestDiscardedLettersStayInTheArchive(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	body := make([]byte, maxInline+1)
	ids := b.write(b.newLetter(order(1)), b.newLetter(order(2)), b.newLetter(bson.D{{Key: "_id", Value: "large"}, {Key: "payload", Value: body}}))
	discard := func(q Query) (int64, error) {
		q.Watcher = "orders"
		return Discard(t.Context(), b.coll, b.db.Collection("watchers"), q, Discarding{Actor: "ann", Archive: time.Hour}, nil)
	}
	count := func(q Query) int64 {
		t.Helper()
		q.Watcher = "orders"
		n, err := Count(t.Context(), b.coll, q)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}

	began := time.Now()
	if n, err := discard(Query{Letters: ids[1:]}); err != nil || n != 2 {
		t.Fatalf("discarded %d, %v, want 2", n, err)
	}
	if n, archived := count(Query{}), count(Query{Archived: true}); n != 1 || archived != 2 {
		t.Errorf("%d letters, %d in the archive, want 1 and 2", n, archived)
	}
	open, _, err := CountOpen(t.Context(), b.coll, "orders")
	if err != nil || open != 1 {
		t.Errorf("%d letters need a decision, %v, want 1", open, err)
	}
	large := b.open(ids[2])
	if large.Archived == nil || large.Archived.Actor != "ann" || large.ExpireAt == nil || len(large.Envelope) < len(body) {
		t.Fatalf("unexpected letter in the archive: %+v of %d bytes", large.Archived, len(large.Envelope))
	}
	// The clock of the server may differ by some seconds.
	if left := large.ExpireAt.Sub(began); left < 55*time.Minute || left > 65*time.Minute {
		t.Errorf("the archive has it for %s, want 1h", left)
	}
	later := bson.D{{Key: "movedAt", Value: nil}, {Key: "expireAt", Value: bson.D{{Key: "$gt", Value: *large.ExpireAt}}}}
	if n := b.count(later); n != int64(large.Chunks) || n == 0 {
		t.Errorf("%d of %d chunks expire after their letter", n, large.Chunks)
	}
	known := 0
	if err := Each(t.Context(), b.coll, "orders", func(Mark) error { known++; return nil }); err != nil || known != 3 {
		t.Errorf("%d decided events, %v, want 3", known, err)
	}

	// From the archive, letters go for good.
	if n, err := discard(Query{All: true, Archived: true}); err != nil || n != 2 {
		t.Errorf("removed %d, %v, want 2", n, err)
	}
	if left := b.count(bson.D{}); left != 1 {
		t.Errorf("%d documents are left, want 1", left)
	}
}

// TestIndexesServeTheQueries checks the query plans: no plan may read the whole collection or sort
// it. So a server that runs with notablescan accepts every query.
func TestIndexesServeTheQueries(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	var list []Letter
	for i := range 200 {
		list = append(list, b.newLetter(order(i), at(i)))
	}
	b.write(list...)

	latest, stream := newest.Sort(), ofStream.Sort()
	of := func(q Query) bson.D {
		q.Watcher = "orders"
		return q.mongoFilter()
	}
	rest := (&Scan{filter: of(Query{}), lastEntry: &scanEntry{ID: list[0].id(bson.RawValue{}), Pos: "8200000042"}}).remainingFilter()
	after := resume.Position{ClusterTime: bson.Timestamp{T: uint32(time.Now().Unix())}}
	for name, c := range map[string]struct {
		filter, sort bson.D
		index        string
	}{
		"newest":             {of(Query{}), latest, "watcher_1_movedAt_1__id_1"},
		"next page":          {listing.All(of(Query{}), newest.After(b.now, "dead-a")), latest, "watcher_1_movedAt_1__id_1"},
		"archive":            {of(Query{Archived: true}), latest, "watcher_1_movedAt_1__id_1"},
		"window":             {of(Query{From: time.Now()}), latest, "watcher_1_movedAt_1__id_1"},
		"message":            {of(Query{Message: "x"}), latest, "watcher_1_movedAt_1__id_1"},
		"outbox":             {of(Query{NS: "none"}), latest, "watcher_1_ns_1_movedAt_1__id_1"},
		"ids":                {of(Query{IDs: toValues(t, "a")}), nil, "id_1_ns_1"},
		"letters and ids":    {of(Query{IDs: toValues(t, "a"), Letters: []string{"b"}}), nil, "id_1_ns_1"},
		"letters":            {of(Query{Letters: []string{"b"}}), nil, "_id_"},
		"key":                {of(Query{Key: "none"}), nil, "watcher_1_key_1_movedAt_1"},
		"class":              {of(Query{Class: record.AttemptsExhausted}), nil, "watcher_1_class_1_movedAt_1"},
		"type":               {of(Query{Type: "none"}), nil, "watcher_1_type_1_movedAt_1"},
		"fingerprint":        {of(Query{Fingerprint: "none"}), nil, "watcher_1_fingerprint_1_movedAt_1"},
		"requeue all":        {rest, stream, "watcher_1_pos_1__id_1"},
		"after a position":   {afterPosition("orders", slot.Range{}, after), nil, "watcher_1_pos_1__id_1"},
		"swept":              {afterPosition("orders", slot.Range{}, after), nil, "watcher_1_movedAt_1__id_1"},
		"of a slot":          {afterPosition("orders", slot.Range{I: 1, N: 2}, after), nil, "watcher_1_pos_1__id_1"},
		"of the first slot":  {afterPosition("orders", slot.Range{I: 0, N: 2}, after), nil, "watcher_1_movedAt_1__id_1"},
		"still to be passed": {listing.All(afterPosition("orders", slot.Range{I: 1, N: 2}, after), of(Query{NS: "x"})), nil, ""},
		"chunks":             {idIn([]string{"dead-a/00"}), nil, "_id_"},
	} {
		find := bson.D{{Key: "find", Value: b.coll.Name()}, {Key: "filter", Value: c.filter}, {Key: "limit", Value: 100}}
		if c.sort != nil {
			find = append(find, bson.E{Key: "sort", Value: c.sort})
		}
		var response struct {
			QueryPlanner struct {
				WinningPlan bson.Raw `bson:"winningPlan"`
			} `bson:"queryPlanner"`
		}
		explain := bson.D{{Key: "explain", Value: find}, {Key: "verbosity", Value: "queryPlanner"}}
		if err := b.db.RunCommand(t.Context(), explain).Decode(&response); err != nil {
			t.Fatal(err)
		}

		used := map[string]bool{}
		collectStages(response.QueryPlanner.WinningPlan, used)
		if c.index != "" && !used[c.index] || used["COLLSCAN"] || used["SORT"] && c.sort != nil {
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

// TestN15_ALetterThatIsNeededStillIsNotDiscarded: if the position is before the event, only the
// letter keeps the next owner from sending the event.
func TestN15_ALetterThatIsNeededStillIsNotDiscarded(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	letter := func(id, pos string, slot int32) Letter {
		return b.newLetter(bson.D{{Key: "_id", Value: id}}, func(l *Letter) { l.Pos, l.Slot = pos, slot })
	}
	b.write(letter("old", "82000000030000000100", 0), letter("late", "82000000090000000100", 0), letter("other slot", "82000000090000000100", 900))

	setPosition := func(id string, second uint32) {
		t.Helper()
		_, err := b.db.Collection("watchers").UpdateOne(t.Context(), bson.D{{Key: "_id", Value: id}},
			bson.D{{Key: "$set", Value: bson.D{{Key: "clusterTime", Value: bson.Timestamp{T: second}}}}},
			options.UpdateOne().SetUpsert(true))
		if err != nil {
			t.Fatal(err)
		}
	}

	setPosition("orders/0of2", 5)
	setPosition("orders/1of2", 10)
	n, err := b.discard(t.Context(), Query{All: true}, nil)
	var rejected *RejectedError
	if n != 0 || !errors.As(err, &rejected) || rejected.Letter.IDText() != "late" {
		t.Errorf("discard of all: got %d, %v, want a rejection of late", n, err)
	}
	for _, id := range []string{"old", "other slot"} {
		if n, err := b.discard(t.Context(), Query{IDs: toValues(t, id)}, nil); n != 1 || err != nil {
			t.Errorf("discard of %s, which is passed: got %d, %v, want 1", id, n, err)
		}
	}

	setPosition("orders/0of2", 10)
	if n, err := b.discard(t.Context(), Query{All: true}, nil); n != 1 || err != nil {
		t.Errorf("discard after the watcher has passed it: got %d, %v, want 1", n, err)
	}
}
