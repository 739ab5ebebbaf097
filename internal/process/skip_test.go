package process_test

import (
	"context"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/changes"
	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/resume"
)

// TestAnOperatorSkipsTheEventAtWhichTheStreamStands: while the stream cannot be read, an operator passes over the next event. It
// becomes a dead letter with its envelope, the order is logged, and the next owner delivers what follows.
func TestAnOperatorSkipsTheEventAtWhichTheStreamStands(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(1)
	node := stacktest.Name(t)
	b.start("node=" + node)
	b.consume(1)
	if _, err := b.db.Collection("other").InsertOne(t.Context(), bson.D{}); err != nil {
		t.Fatal(err)
	}
	repaired := stacktest.FailCommand(t, "outrelay stream "+node, "alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"getMore"}}, {Key: "errorCode", Value: 11602},
	})
	b.log.wait(t, "interrupted")
	b.append(1, event.WithTopic("poison-"+b.topic))
	b.append(2)

	scope, err := changes.ParseScope([]string{b.db.Name() + ".outbox"})
	if err != nil {
		t.Fatal(err)
	}
	op := admin.Operator{
		State: b.state, Watcher: "default", Actor: "ann",
		NextInsert: func(ctx context.Context, of slot.Range, at resume.Position) (changes.Skip, error) {
			return changestream.NextInsert(ctx, b.client, scope.Of(of), at)
		},
	}
	planned, err := op.Recovery().PassOver(t.Context(), admin.SkipOrder{DryRun: true})
	if err != nil || planned.Bytes == 0 || planned.Letter != "" {
		t.Fatalf("%+v, %v", planned, err)
	}
	done, err := op.Recovery().PassOver(t.Context(), admin.SkipOrder{Collection: planned.Collection, ID: planned.ID})
	if err != nil || done.ID != planned.ID || done.Letter == "" {
		t.Fatalf("%+v, %v", done, err)
	}
	repaired()

	// The events after it arrive, and it does not wait for its topic.
	b.consume(3)
	letters, err := op.Letters().List(t.Context(), admin.DeadFilter{Class: "skipped"}, 0, "")
	if err != nil || len(letters.Letters) != 1 || letters.Letters[0].ID != planned.ID {
		t.Errorf("%+v, %v", letters, err)
	}
	for coll, filter := range map[string]bson.D{
		"events":  {{Key: "kind", Value: "event_skipped"}, {Key: "fields.actor", Value: "ann"}, {Key: "fields.id", Value: planned.ID}},
		"letters": {{Key: "class", Value: "skipped"}, {Key: "envelope.payload", Value: bson.D{{Key: "$exists", Value: true}}}},
	} {
		if n, err := b.state.Collection(coll).CountDocuments(t.Context(), filter); err != nil || n != 1 {
			t.Errorf("%d entries in %s, %v", n, coll, err)
		}
	}
	if n, err := b.state.Collection("waiting").CountDocuments(t.Context(), bson.D{}); err != nil || n != 0 {
		t.Errorf("%d events wait, %v", n, err)
	}
}
