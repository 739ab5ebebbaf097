package watched

import (
	"log/slog"
	"slices"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// N25: a collection gets another UUID without a drop when it is resharded. The purge continues with the collection that has the name now,
// also if the stream still brings events of an earlier one.
func TestN25_TheListHasThePresentHolderOfAName(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	if err := s.db.CreateCollection(t.Context(), "outbox"); err != nil {
		t.Fatal(err)
	}
	present, err := mongodb.CollectionUUID(t.Context(), s.client, s.db.Name(), "outbox")
	if err != nil {
		t.Fatal(err)
	}

	other := [16]byte{1}
	for name, c := range map[string]struct{ listed, inserted, want [16]byte }{
		"resharded":       {other, present, present},
		"listed when old": {present, other, present},
		"both are gone":   {other, [16]byte{2}, other},
		"unidentified":    {[16]byte{}, other, other},
	} {
		t.Run(name, func(t *testing.T) {
			outbox := outboxes.Outbox{DB: s.db.Name(), Coll: "outbox", UUID: c.listed}
			collections := &Collections{
				Calls: newCalls(), Client: s.client, Registry: outboxes.NewRegistry(s.db.Collection("registry")), Watcher: "w",
				Log: slog.New(slog.DiscardHandler), Claimed: map[[16]byte]bool{}, listed: []outboxes.Outbox{outbox},
			}
			ev := &changes.Event{Op: changes.Insert, DB: []byte(s.db.Name()), Coll: []byte("outbox"), UUID: c.inserted, HasUUID: true, ClusterTime: bson.Timestamp{T: 1}}
			if _, err := collections.AdoptCollection(t.Context(), ev); err != nil {
				t.Fatal(err)
			}

			outbox.UUID = c.want
			if got := collections.WatchedOutboxes(); !slices.Equal(got, []outboxes.Outbox{outbox}) {
				t.Errorf("listed: %+v, want %+v", got, outbox)
			}
		})
	}
}
