package process_test

import (
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/process"
	"github.com/outrelay/outrelay/pkg/event"
)

// TestAFirstStartIsNotBoundByTheTimeOfACall: where reading the outbox takes longer than a call may, because it is large and has no
// indexes, the first start takes as long, and ends.
func TestAFirstStartIsNotBoundByTheTimeOfACall(t *testing.T) {
	t.Parallel()
	b := setupOn(t, stacktest.Own(t, devstack.Options{Mongods: 1, Quick: true}).MongoURI())
	b.append(3)
	for i, client := range []string{"state", "stream"} {
		node := stacktest.Name(t)
		off := stacktest.FailCommandOn(t, b.client, "outrelay "+client+" "+node, "alwaysOn", bson.D{
			{Key: "failCommands", Value: bson.A{"find", "aggregate"}},
			{Key: "namespace", Value: b.db.Name() + ".outbox"},
			{Key: "blockConnection", Value: true},
			{Key: "blockTimeMS", Value: 1500},
		})

		stop := b.startAs(func(r *process.Relay) { r.Hasten(time.Second) }, "node="+node)
		b.consume(3 * (i + 1))
		off()
		if err := stop(); err != nil {
			t.Error(err)
		}
		// Without the state, the next start is a first start.
		if err := b.state.Mongo().Drop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// TestN17_AScheduledEnvelopeCostsNoTransactions: while an outbox holds a scheduled envelope, the owner writes nothing but its lease.
func TestN17_AScheduledEnvelopeCostsNoTransactions(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(1, event.WithDueAt(time.Now().Add(time.Hour)))
	b.startAs(func(r *process.Relay) { r.Hasten(10 * time.Second) })
	b.append(1)
	b.consume(1)
	var doc struct {
		Fence     int64     `bson:"fence"`
		ExpiresAt time.Time `bson:"expiresAt"`
	}

	read := func() {
		if err := b.state.Collection("watchers").FindOne(t.Context(), bson.D{}).Decode(&doc); err != nil {
			t.Fatal(err)
		}
	}

	read()
	fence, until := doc.Fence, doc.ExpiresAt.Add(3*time.Second)
	// In this time the owner renews its lease, and looks for work between the renewals.
	stacktest.Eventually(t, "the lease was renewed for three seconds", func() bool { read(); return doc.ExpiresAt.After(until) })
	if doc.Fence != fence {
		t.Errorf("%d fenced transactions, want none", doc.Fence-fence)
	}
	if n := b.count("schedules", bson.D{}); n != 1 {
		t.Errorf("%d outboxes are listed as holding scheduled envelopes, want one", n)
	}
}
