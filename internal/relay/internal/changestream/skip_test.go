package changestream

import (
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/resume"
)

// A stream passes over an event that the server cannot send, if an operator has ordered it: the server leaves it out before. A
// later event with the id of an order is read.
func TestN24_AnEventIsLeftOutByOrder(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	coll := b.db.Collection("outbox")
	at := b.clusterTime()
	const fat = "fat"
	b.insertIDs(coll, "a")
	if _, err := coll.InsertOne(t.Context(), oversizeDocument(t, fat)); err != nil {
		t.Fatal(err)
	}
	order := b.clusterTime()
	b.insertIDs(coll, "b", "c")

	for _, id := range []string{"a", fat, "c"} {
		b.skip = append(b.skip, b.skipOf(id, order))
	}
	for _, watch := range []string{b.db.Name() + ".outbox", b.db.Name() + ".*"} {
		r := b.startReader(scopeOf(t, watch), changes.Start{At: &at})
		r.wantIDs("b", "c")
		r.withLock(func() {
			if len(r.counts) > 0 {
				t.Errorf("%s: reopened: %v", watch, r.counts)
			}
		})
	}
}

// Images of events after a skipped one are read, although the server cannot send the skipped event.
func TestN24_ImagesAreReadPastASkippedEvent(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	coll := b.db.Collection("outbox")
	at := b.clusterTime()
	huge := strings.Repeat("i", 7<<20)
	b.insertIDs(coll, huge)
	var entry struct{ TS bson.Timestamp }
	filter := bson.D{{Key: "ns", Value: b.db.Name() + ".outbox"}, {Key: "op", Value: "i"}}
	if err := b.admin.Database("local").Collection("oplog.rs").FindOne(t.Context(), filter).Decode(&entry); err != nil {
		t.Fatal(err)
	}
	b.insertIDs(coll, strings.Repeat("i", 2000), "b")

	// The order of an operator contains the time of such an event.
	b.skip = []changes.Skip{{DB: b.db.Name(), Coll: "outbox", At: entry.TS, Size: len(huge) + 5}}
	s, err := New(Config{Client: b.watch, Scope: scopeOf(t, b.db.Name()+".outbox"), Skip: b.skip, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	var got []int
	err = s.Refetch(t.Context(), resume.Position{ClusterTime: at}, func(*changes.Event) bool { return true }, func(_ *changes.Event, doc []byte) bool {
		got = append(got, len(bson.Raw(doc).Lookup("_id").StringValue()))
		return len(got) < 2
	})
	if err != nil || !slices.Equal(got, []int{2000, 1}) {
		t.Errorf("ids of %d bytes, %v", got, err)
	}
	b.startReader(scopeOf(t, b.db.Name()+".outbox"), changes.Start{At: &at}).wantIDs(strings.Repeat("i", 2000), "b")
}

// The server cannot name an event with an id of such a size.
func TestN24_AnIDThatNoTokenCanHoldIsNotNamed(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	at := b.clusterTime()
	b.insertIDs(b.db.Collection("outbox"), strings.Repeat("i", 8<<20))
	_, err := NextInsert(t.Context(), b.watch, scopeOf(t, b.db.Name()+".outbox"), resume.Position{ClusterTime: at})
	if !errors.Is(err, changes.ErrNoEvent) || !strings.Contains(err.Error(), "outrelay recover") {
		t.Errorf("%v, want the fix", err)
	}
}

func (b *fixture) skipOf(id string, until bson.Timestamp) changes.Skip {
	b.t.Helper()
	typ, value, err := bson.MarshalValue(id)
	if err != nil {
		b.t.Fatal(err)
	}
	return changes.Skip{DB: b.db.Name(), Coll: "outbox", ID: bson.RawValue{Type: typ, Value: value}, Until: until}
}
