package process_test

import (
	"log/slog"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/resume"
)

// TestN19_ScheduledEnvelopesBeforeAnAdoptedPositionAreSent: no stream of the watcher contains them, as when another watcher had the outbox
// before.
func TestN19_ScheduledEnvelopesBeforeAnAdoptedPositionAreSent(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(1, event.WithDueAt(time.Now().Add(2*time.Second)))
	// The watcher continues at the later event.
	b.append(1)
	var last struct {
		TS bson.Timestamp `bson:"ts"`
	}
	latest := options.FindOne().SetSort(bson.D{{Key: "ts", Value: -1}})
	if err := b.db.Collection("outbox").FindOne(t.Context(), bson.D{}, latest).Decode(&last); err != nil {
		t.Fatal(err)
	}

	if err := b.state.Ensure(t.Context(), slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	document := lease.Vacant{ID: "default/0of1"}
	err := lease.AdoptPosition(t.Context(), b.state.Collection("watchers"), []lease.Vacant{document}, resume.Position{ClusterTime: last.TS}, "")
	if err != nil {
		t.Fatal(err)
	}
	b.start()
	b.consume(2)
}
