package deadletter_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

func TestALetterStaysAsItWasStoredFirst(t *testing.T) {
	t.Parallel()
	onBothStores(t, func(g *graveyard) {
		want := newLetter(1, "h", "A")
		g.bury(want)
		again := newLetter(1, "h", "A")
		again.Reason = "another reason"
		g.bury(again)

		got, err := g.Get(g.Context(), want.ID)
		if err != nil {
			g.Fatal(err)
		}
		if got.GivenUpAt.IsZero() {
			g.Error("the letter has no time")
		}
		want.GivenUpAt = got.GivenUpAt
		if diff := cmp.Diff(*want, got); diff != "" {
			g.Error(diff)
		}
		if n, err := g.Count(g.Context(), deadletter.Query{}); n != 1 || err != nil {
			g.Errorf("letters: got %d (%v), want 1", n, err)
		}
		if _, err := g.Get(g.Context(), deadletter.ID{Message: "none"}); !errors.Is(err, deadletter.ErrNotFound) {
			g.Errorf("a letter that does not exist: got %v, want ErrNotFound", err)
		}
	})
}

func TestATombstoneAndALargeBodyAreKept(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t)
	tombstone, large := newLetter(1, "h", "A"), newLetter(2, "h", "A")
	tombstone.Value, large.Value = nil, bytes.Repeat([]byte("0123456789abcdef"), 13<<16) // 13 MiB
	body := large.Value
	g.bury(tombstone, large)
	if l, err := g.Get(t.Context(), tombstone.ID); err != nil || l.Value != nil {
		t.Errorf("tombstone: got %d bytes (%v), want none", len(l.Value), err)
	}
	if l, err := g.Get(t.Context(), large.ID); err != nil || !bytes.Equal(l.Value, body) {
		t.Errorf("large value: got %d bytes (%v)", len(l.Value), err)
	}
	if n, err := g.Count(t.Context(), deadletter.Query{}); n != 2 || err != nil {
		t.Errorf("letters: got %d (%v), want 2", n, err)
	}

	// A record of this size cannot be set aside. The others go on.
	n, err := g.Requeue(t.Context(), deadletter.Query{All: true}, deadletter.RequeueOptions{})
	if n != 1 || !isRejected(err) {
		t.Errorf("requeued letters: got %d (%v), want 1 and a RejectedError", n, err)
	}
	if n, err := g.Discard(t.Context(), deadletter.Query{All: true}, deadletter.DiscardOptions{Archive: -1}); n != 2 || err != nil {
		t.Errorf("discarded letters: got %d (%v), want 2", n, err)
	}
	if n, err := g.db.Collection(deadletter.DefaultCollection).CountDocuments(t.Context(), bson.D{}); n != 0 || err != nil {
		t.Errorf("documents after the discard: got %d (%v), want none", n, err)
	}
}

// A letter that no document can hold is stored without its content.
func TestALetterLargerThanADocumentIsBare(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t)
	large := newLetter(1, "h", "A")
	large.Headers = append(large.Headers, event.Header{Key: "x", Value: make([]byte, 17<<20)})
	omitted, err := g.Desk.Put(t.Context(), module.Key{}, large, noTopic)
	if omitted == nil || err != nil {
		t.Fatalf("got %v, %v; want the reason of the omission", omitted, err)
	}
	l, err := g.Get(t.Context(), large.ID)
	if err != nil || l.ID.Offset != 1 || l.Headers != nil || l.Value != nil || l.Class != deadletter.ClassHandler {
		t.Errorf("got %+v, %v; want the place and the class of the message alone", l, err)
	}

	// Its handler would take the missing value for a tombstone.
	n, err := g.Requeue(t.Context(), deadletter.Query{All: true}, deadletter.RequeueOptions{})
	if n != 0 || !isRejected(err) || g.countHandedBack("h") != 0 {
		t.Errorf("requeued %d (%v), want a RejectedError", n, err)
	}
	restore := func(l *deadletter.Letter) error { l.Key, l.Value = []byte("k"), []byte("v"); return nil }
	g.requeue(deadletter.Query{All: true}, deadletter.RequeueOptions{Edit: restore}, 1)
}

func TestTheExpiryOfLettersCanBeChanged(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	for _, after := range []time.Duration{time.Hour, 2 * time.Hour, time.Minute} {
		desk, err := deadletter.New(db, deadletter.WithExpiry(after))
		if err != nil {
			t.Fatal(err)
		}

		if err := desk.EnsureIndexes(t.Context(), module.Key{}); err != nil {
			t.Fatal(err)
		}

		specs, err := db.Collection(deadletter.DefaultCollection).Indexes().ListSpecifications(t.Context())
		if err != nil {
			t.Fatal(err)
		}

		i := slices.IndexFunc(specs, func(s mongo.IndexSpecification) bool { return s.Name == "expiry" })
		if i < 0 || specs[i].ExpireAfterSeconds == nil || time.Duration(*specs[i].ExpireAfterSeconds)*time.Second != after {
			t.Errorf("indexes for an expiry of %s: got %+v", after, specs)
		}
	}
}

func TestLettersAreRedactedBeforeTheyAreWritten(t *testing.T) {
	t.Parallel()
	redact := func(_ context.Context, l *deadletter.Letter) error {
		switch l.Name {
		case "error":
			return errFlaky
		case "panic":
			panic("in a redaction")
		}
		l.Value, l.Reason, l.Headers = []byte("redacted"), "redacted", l.Headers[:1]
		return nil
	}
	g := newGraveyard(t, deadletter.WithTopic(""), deadletter.WithRedaction(redact))

	for n, name := range []string{"A", "error", "panic"} {
		l := newLetter(n, "h", name)
		published := false
		_, err := g.Desk.Put(t.Context(), module.Key{}, l, func(_ context.Context, topic string) error {
			published = true
			if topic != "orders.g.dead" || bytes.Contains(l.Value, []byte{255}) || strings.Contains(l.Reason, "flaky\n") {
				t.Errorf("%s: the topic %s gets %+v", name, topic, l)
			}
			return nil
		})
		if err != nil || !published {
			t.Fatalf("%s: published %v, %v", name, published, err)
		}

		got, err := g.Get(t.Context(), l.ID)
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case name == "A" && (string(got.Value) != "redacted" || got.Reason != "redacted" || len(got.Headers) != 1):
			t.Errorf("redacted letter: got %+v", got)
		case name != "A" && (got.Key != nil || got.Value != nil || got.Headers != nil):
			t.Errorf("%s: the letter has content that was not redacted: %+v", name, got)
		}
	}
}

func TestATopicThatFailsDelaysTheLetter(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, deadletter.WithTopic("graves"))
	away := func(context.Context, string) error { return errFlaky }
	if _, err := g.Desk.Put(t.Context(), module.Key{}, newLetter(1, "h", "A"), away); !errors.Is(err, errFlaky) {
		t.Errorf("got %v, want the error of the topic", err)
	}
	if n, err := g.Count(t.Context(), deadletter.Query{}); n != 0 || err != nil {
		t.Errorf("letters before the topic was written: got %d (%v), want none", n, err)
	}
}

func TestLettersAreFoundByTheirFields(t *testing.T) {
	t.Parallel()
	onBothStores(t, func(g *graveyard) {
		g.bury(newLetter(1, "h1", "A"), newLetter(2, "h1", "B"), newLetter(3, "h1", "A"), newLetter(1, "h2", "A"))
		unknown := newLetter(4, "", "Z")
		unknown.Class, unknown.Reason = deadletter.ClassUnknown, "no handler"
		unknown.Aggregate.Type = "parcel"
		g.bury(unknown)

		yes, no := true, false
		for name, c := range map[string]struct {
			q    deadletter.Query
			want int64
		}{
			"all":               {deadletter.Query{}, 5},
			"handler":           {deadletter.Query{Handler: "h1"}, 3},
			"group":             {deadletter.Query{Group: "other"}, 0},
			"name":              {deadletter.Query{Name: "A"}, 3},
			"class":             {deadletter.Query{Class: deadletter.ClassUnknown}, 1},
			"aggregate type":    {deadletter.Query{AggregateType: "parcel"}, 1},
			"topic":             {deadletter.Query{Topic: "orders"}, 5},
			"key":               {deadletter.Query{Key: []byte{0, 1}}, 2},
			"reason":            {deadletter.Query{Reason: "fla"}, 4},
			"a pattern is text": {deadletter.Query{Reason: "f.a"}, 0},
			"message":           {deadletter.Query{Messages: []string{"m1"}}, 2},
			"id":                {deadletter.Query{IDs: []deadletter.ID{newLetter(1, "h2", "A").ID}}, 1},
			"from":              {deadletter.Query{From: time.Now().Add(time.Hour)}, 0},
			"before":            {deadletter.Query{Before: time.Now().Add(time.Hour)}, 5},
			"both":              {deadletter.Query{Handler: "h1", Name: "B"}, 1},
			"requeued":          {deadletter.Query{Requeued: &yes}, 0},
			"not requeued":      {deadletter.Query{Requeued: &no}, 5},
		} {
			if n, err := g.Count(g.Context(), c.q); n != c.want || err != nil {
				g.Errorf("%s: counted %d (%v), want %d", name, n, err, c.want)
			}
			if list := g.list(c.q); len(list) != int(c.want) {
				g.Errorf("%s: listed %d, want %d", name, len(list), c.want)
			}
		}

		sum, err := g.Summary(g.Context(), deadletter.Query{})
		if err != nil || len(sum) != 4 || sum[0].Handler != "h1" || sum[0].Name != "A" || sum[0].Count != 2 || sum[0].Requeued != 0 {
			g.Errorf("summary: got %+v (%v), want two letters of h1 and A first", sum, err)
		}
		if n, err := g.Count(g.Context(), deadletter.Query{Fingerprint: sum[0].Fingerprint}); n != 2 || err != nil || sum[0].Failure == "" {
			g.Errorf("the fingerprint of %+v selects %d letters (%v), want 2", sum[0], n, err)
		}
	})
}

func TestAListContinuesAfterACursor(t *testing.T) {
	t.Parallel()
	onBothStores(t, func(g *graveyard) {
		for n := range 250 {
			g.bury(newLetter(n, "h", "A"))
		}
		all := g.list(deadletter.Query{})
		seen := map[deadletter.ID]bool{}
		for _, l := range all {
			seen[l.ID] = true
		}
		if len(all) != 250 || len(seen) != 250 {
			g.Fatalf("listed %d letters, %d different ones; want 250", len(all), len(seen))
		}

		rest := g.list(deadletter.Query{After: all[199].Cursor()})
		if len(rest) != 50 || rest[0].ID != all[200].ID {
			g.Errorf("after 200 letters: got %d, want the other 50", len(rest))
		}
		for _, err := range g.List(g.Context(), deadletter.Query{After: "nonsense"}) {
			if err == nil {
				g.Error("a list continued after a wrong cursor")
			}
		}
	})
}

func TestEmptyQueriesActOnNothing(t *testing.T) {
	t.Parallel()
	onBothStores(t, func(g *graveyard) {
		g.bury(newLetter(1, "h", "A"), newLetter(2, "h", "B"))

		no := false
		for _, q := range []deadletter.Query{{}, {Requeued: &no}} {
			if n, err := g.Discard(g.Context(), q, deadletter.DiscardOptions{}); n != 0 || !errors.Is(err, deadletter.ErrEmptyQuery) {
				g.Errorf("discarded %d (%v), want ErrEmptyQuery", n, err)
			}
			if n, err := g.Requeue(g.Context(), q, deadletter.RequeueOptions{}); n != 0 || !errors.Is(err, deadletter.ErrEmptyQuery) {
				g.Errorf("requeued %d (%v), want ErrEmptyQuery", n, err)
			}
		}

		if n, err := g.Discard(g.Context(), deadletter.Query{Name: "A"}, deadletter.DiscardOptions{}); n != 1 || err != nil {
			g.Errorf("discarded %d (%v), want 1", n, err)
		}
		if n, err := g.Discard(g.Context(), deadletter.Query{All: true}, deadletter.DiscardOptions{}); n != 1 || err != nil {
			g.Errorf("discarded %d (%v), want 1", n, err)
		}
	})
}

// A discarded letter can be taken back until it leaves the archive. A message that is given up once more has a letter again.
func TestDiscardedLettersStayInTheArchive(t *testing.T) {
	t.Parallel()
	onBothStores(t, func(g *graveyard) {
		g.bury(newLetter(1, "h", "A"), newLetter(2, "h", "B"), newLetter(3, "h", "B"))
		if n, err := g.Discard(g.Context(), deadletter.Query{All: true}, deadletter.DiscardOptions{Actor: "ann"}); n != 3 || err != nil {
			g.Fatalf("discarded %d (%v), want 3", n, err)
		}
		if list := g.list(deadletter.Query{}); len(list) != 0 {
			g.Errorf("letters outside of the archive: %+v", list)
		}
		archived := g.list(deadletter.Query{Archived: true, Name: "A"})
		if len(archived) != 1 || archived[0].Archived == nil || archived[0].Archived.Actor != "ann" || archived[0].ExpireAt == nil {
			g.Fatalf("the archive has %+v", archived)
		}
		if left := time.Until(*archived[0].ExpireAt); left < 29*24*time.Hour || left > 31*24*time.Hour {
			g.Errorf("the archive has it for %s, want 30 days", left)
		}

		// A requeue takes letters of the archive only if it is meant.
		g.requeue(deadletter.Query{Name: "A"}, deadletter.RequeueOptions{}, 0)
		g.requeue(deadletter.Query{Name: "A", Archived: true}, deadletter.RequeueOptions{}, 1)
		if n := g.countHandedBack("h"); n != 1 {
			g.Errorf("%d messages wait for the handler, want 1", n)
		}

		g.bury(newLetter(2, "h", "B"))
		again := g.list(deadletter.Query{})
		if len(again) != 1 || again[0].Name != "B" || again[0].Archived != nil || again[0].ExpireAt != nil {
			g.Errorf("given up once more: %+v", again)
		}
		if n, err := g.Discard(g.Context(), deadletter.Query{All: true, Archived: true}, deadletter.DiscardOptions{}); n != 2 || err != nil {
			g.Errorf("removed %d from the archive (%v), want 2", n, err)
		}
		if list := g.list(deadletter.Query{Archived: true}); len(list) != 0 {
			g.Errorf("the archive still has %+v", list)
		}
	})
}

// MongoDB removes the letters of the archive and their chunks when they have expired.
func TestTheArchiveExpires(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t)
	if err := g.Desk.EnsureIndexes(t.Context(), module.Key{}); err != nil {
		t.Fatal(err)
	}
	large := newLetter(1, "h", "A")
	large.Value = make([]byte, 13<<20)
	g.bury(large)

	if n, err := g.Discard(t.Context(), deadletter.Query{All: true}, deadletter.DiscardOptions{Archive: time.Minute}); n != 1 || err != nil {
		t.Fatalf("discarded %d (%v), want 1", n, err)
	}
	coll := g.db.Collection(deadletter.DefaultCollection)
	if n, err := coll.CountDocuments(t.Context(), bson.D{{Key: "expireAt", Value: bson.D{{Key: "$type", Value: "date"}}}}); n != 3 || err != nil {
		t.Errorf("%d documents with an expiry (%v), want the letter and two chunks", n, err)
	}
	if got, err := g.Get(t.Context(), large.ID); err != nil || len(got.Value) != len(large.Value) {
		t.Errorf("the letter in the archive has %d bytes (%v)", len(got.Value), err)
	}

	specs, err := coll.Indexes().ListSpecifications(t.Context())
	if err != nil || !slices.ContainsFunc(specs, func(spec mongo.IndexSpecification) bool {
		return spec.Name == "expireAt_1" && spec.ExpireAfterSeconds != nil && *spec.ExpireAfterSeconds == 0
	}) {
		t.Errorf("no index removes the letters: %+v, %v", specs, err)
	}
}

func TestANotificationIsAppendedOnceAndNeverOfItself(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	box, err := outbox.New(db)
	if err != nil {
		t.Fatal(err)
	}
	desk, err := deadletter.New(db, deadletter.WithNotification(box))
	if err != nil {
		t.Fatal(err)
	}
	g := &graveyard{T: t, Desk: desk, db: db, count: countIn(db)}
	g.bury(newLetter(1, "h", "A"), newLetter(1, "h", "A")) // again after a crash

	var docs []bson.Raw
	cur, err := db.Collection("outbox").Find(t.Context(), bson.D{})
	if err != nil {
		t.Fatal(err)
	}
	if err := cur.All(t.Context(), &docs); err != nil {
		t.Fatal(err)
	}
	if len(docs) != 1 {
		t.Fatalf("events: got %d, want 1", len(docs))
	}
	var view envelope.View
	if err := envelope.Parse(docs[0], &view); err != nil {
		t.Fatal(err)
	}
	var n deadletter.Notification
	if err := json.Unmarshal(view.Payload, &n); err != nil {
		t.Fatal(err)
	}
	if string(view.Type) != deadletter.Notified.Name || n.ID.Message != "m1" || n.Class != deadletter.ClassHandler || n.ID.Offset != 1 || n.Name != "A" {
		t.Errorf("got the type %s and %+v", view.Type, n)
	}

	// A handler of the notification gives it up.
	own := newLetter(2, "h", string(view.Type))
	for it := view.Headers.Iter(); it.Next(); {
		own.Headers = append(own.Headers, event.Header{Key: string(it.Key), Value: it.Value})
	}
	g.bury(own)
	if n, err := db.Collection("outbox").CountDocuments(t.Context(), bson.D{}); n != 1 || err != nil {
		t.Errorf("events after the letter of a notification: got %d (%v), want 1", n, err)
	}

	// An event that the outbox never takes does not hold the letter up.
	long := newLetter(3, "h", strings.Repeat("n", 1<<20))
	if omitted, err := desk.Put(t.Context(), module.Key{}, long, noTopic); omitted == nil || err != nil {
		t.Errorf("a notification that is too large: got %v, %v; want it reported", omitted, err)
	}
}

func TestOptionsAreChecked(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	_, err := deadletter.New(db, deadletter.WithExpiry(time.Millisecond), deadletter.WithRedaction(nil))
	for _, part := range []string{"at least 1 s", "WithRedaction is nil"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("got %v, want both problems", err)
		}
	}
	if _, err := deadletter.New(nil); err == nil {
		t.Error("a Desk without a database")
	}
}

// A program that has found no message must not act on all letters.
func TestAnEmptyListSelectsNothing(t *testing.T) {
	t.Parallel()
	onBothStores(t, func(g *graveyard) {
		keyless, empty := newLetter(2, "h", "A"), newLetter(3, "h", "A")
		keyless.Key, empty.Key = nil, []byte{}
		g.bury(newLetter(1, "h", "A"), keyless, empty)

		for name, query := range map[string]deadletter.Query{
			"no message": {Handler: "h", Messages: []string{}}, "no id": {Handler: "h", IDs: []deadletter.ID{}}, "not even a handler": {IDs: []deadletter.ID{}},
		} {
			if n, err := g.Requeue(g.Context(), query, deadletter.RequeueOptions{}); n != 0 || err != nil {
				g.Errorf("%s: requeued %d (%v), want none", name, n, err)
			}
		}
		if n, err := g.Count(g.Context(), deadletter.Query{Key: []byte{}}); n != 1 || err != nil {
			g.Errorf("letters with an empty key: got %d (%v), want 1", n, err)
		}
	})
}
