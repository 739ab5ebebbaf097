package process_test

import (
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/operators"
	"github.com/outrelay/outrelay/internal/relay/process"
	"github.com/outrelay/outrelay/pkg/event"
)

// TestAnOperatorSkipsTheEventAtWhichTheStreamStands: while the stream cannot be read, an operator passes over the next event. It
// becomes a dead letter with its envelope, which expires like all others, the order is logged, and the next owner delivers what follows.
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

	op := b.operator("dead_letters.expire=48h")
	planned, err := op.Recovery().PassOver(t.Context(), admin.SkipOrder{DryRun: true})
	if err != nil || planned.Bytes == 0 || planned.Letter != "" {
		t.Fatalf("%+v, %v", planned, err)
	}
	done, err := op.Recovery().PassOver(t.Context(), admin.SkipOrder{Collection: planned.Collection, ID: planned.ID})
	if err != nil || done.ID != planned.ID || done.Letter == "" {
		t.Fatalf("%+v, %v", done, err)
	}
	// The owner of the order must not read the event.
	stacktest.Eventually(t, "the next term", func() bool { return b.log.countWith(`msg="took over"`) == 2 })
	repaired()

	// The events after it arrive, and it does not wait for its topic.
	b.consume(3)
	letters, err := op.Letters().List(t.Context(), admin.DeadFilter{Class: "skipped"}, 0, "")
	if err != nil || len(letters.Items) != 1 || letters.Items[0].ID != planned.ID {
		t.Errorf("%+v, %v", letters, err)
	}
	for coll, filter := range map[string]bson.D{
		"audit": {{Key: "kind", Value: "event_skipped"}, {Key: "fields.actor", Value: "ann"}, {Key: "fields.id", Value: planned.ID}},
		"letters": {
			{Key: "class", Value: "skipped"},
			{Key: "envelope.payload", Value: bson.D{{Key: "$exists", Value: true}}},
			{Key: "$expr", Value: bson.D{{Key: "$eq", Value: bson.A{"$expireAt", bson.D{{Key: "$add", Value: bson.A{"$movedAt", (48 * time.Hour).Milliseconds()}}}}}}},
		},
	} {
		if n, err := b.state.Collection(coll).CountDocuments(t.Context(), filter); err != nil || n != 1 {
			t.Errorf("%d entries in %s, %v", n, coll, err)
		}
	}
	if n, err := b.state.Collection("waiting").CountDocuments(t.Context(), bson.D{}); err != nil || n != 0 {
		t.Errorf("%d events wait, %v", n, err)
	}
}

// TestAnEventWithALargeIDIsSkipped: the id of an event may be too large for the watcher document and for a command line. The event is
// named by a digest, also if its document is gone, and the dead letter has the whole id.
func TestAnEventWithALargeIDIsSkipped(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(1)
	node := stacktest.Name(t)
	b.start("node=" + node)
	b.consume(1)
	repaired := stacktest.FailCommand(t, "outrelay stream "+node, "alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"getMore"}}, {Key: "errorCode", Value: 11602},
	})
	b.log.wait(t, "interrupted")
	id := strings.Repeat("i", 1<<20)
	if _, err := b.db.Collection("outbox").InsertOne(t.Context(), bson.D{{Key: "_id", Value: id}}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.db.Collection("outbox").DeleteOne(t.Context(), bson.D{{Key: "_id", Value: id}}); err != nil {
		t.Fatal(err)
	}
	b.append(1)

	op := b.operator()
	planned, err := op.Recovery().PassOver(t.Context(), admin.SkipOrder{DryRun: true})
	if err != nil || len(planned.ID) > 200 || !strings.Contains(planned.ID, "1048581") {
		t.Fatalf("%.1000s, %v", planned.ID, err)
	}
	done, err := op.Recovery().PassOver(t.Context(), admin.SkipOrder{Collection: planned.Collection, ID: planned.ID})
	if err != nil || done.ID != planned.ID {
		t.Fatalf("%.1000s, %v", done.ID, err)
	}
	// The owner of the order must not read the event.
	stacktest.Eventually(t, "the next term", func() bool { return b.log.countWith(`msg="took over"`) == 2 })
	repaired()

	b.consume(2)
	list, err := op.Letters().List(t.Context(), admin.DeadFilter{}, 0, "")
	if err != nil || len(list.Items) != 1 || list.Items[0].ID != planned.ID || list.Items[0].Class != "skipped" {
		t.Errorf("%+v, %v", list, err)
	}
	n, err := b.state.Collection("letters").CountDocuments(t.Context(), bson.D{{Key: "envelope._id", Value: id}})
	if err != nil || n != 1 {
		t.Errorf("%d letters with the whole id, %v", n, err)
	}
}

// operator returns the operator of the command line with the configuration of the relay.
func (b *bundle) operator(set ...string) admin.Operator {
	b.t.Helper()
	cfg, _, err := config.Load("", b.env, set)
	if err != nil {
		b.t.Fatal(err)
	}
	op, err := operators.NewOperator(cfg, process.Host{}, "test", b.state)
	if err != nil {
		b.t.Fatal(err)
	}
	return op.For(admin.Actor{Name: "ann"})
}
