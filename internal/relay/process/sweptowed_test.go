package process_test

import (
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/pkg/event"
)

// TestN22_AnEnvelopeThatASweepOwesToAnotherTopicStaysInItsOutbox: an owner swept an envelope, wrote down that it waits for one of its two topics,
// and died before the other topic had it. The next owner repeats the sweep, and can send the waiting envelope at once. It does so only
// after the sweep: deliveries are recorded by a deletion, and the sweep would not find the envelope.
func TestN22_AnEnvelopeThatASweepOwesToAnotherTopicStaysInItsOutbox(t *testing.T) {
	t.Parallel()
	for name, isAdded := range map[string]bool{"of an added collection": true, "of a gap, without a stamp": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			other := stacktest.Topic(t, 1)
			rules := fansOut(b.topic, other)
			now := b.watch("outbox", "first")
			second := bson.D{
				{Key: "_id", Value: "second"},
				{Key: "aggregatetype", Value: "order"},
				{Key: "aggregateid", Value: "0"},
				{Key: "type", Value: "Placed"},
				{Key: "payload", Value: bson.Binary{Data: []byte("1")}},
			}
			stamp, number := bson.Timestamp{}, ""
			if isAdded {
				stamp = bson.Timestamp{T: uint32(time.Now().Add(-time.Hour).Unix()), I: 1}
				second = append(second, bson.E{Key: "ts", Value: stamp})
			} else {
				b.runOnce("first", "read", rules, now)
				number = outboxes.PosNumber(b.position(), 1)
			}
			if _, err := b.db.Collection("outbox").InsertOne(t.Context(), second); err != nil {
				t.Fatal(err)
			}
			if isAdded {
				b.runOnce("first", "read", rules, b.watch("first"))
			}
			b.enterWaiting("second", outboxes.PosAt(stamp), func(e *waiting.Entry) {
				e.Pending, e.Origin, e.Number = []string{other}, waiting.OriginSweep, number
			})
			// It follows in the order of the store, and waits for nothing.
			b.append(1, event.WithID("witness"))
			b.enterWaiting("witness", outboxes.PosAt(stamp), func(e *waiting.Entry) {
				e.Pending, e.Origin, e.Delivery, e.Key = []string{other}, waiting.OriginRequeue, 1, "1"
			})

			if !isAdded {
				witness, err := b.db.Collection("outbox").FindOne(t.Context(), bson.D{{Key: "_id", Value: "witness"}}).Raw()
				if err != nil {
					t.Fatal(err)
				}
				at := outboxes.Stamp(witness)
				if _, err := b.state.Collection("watchers").UpdateOne(t.Context(), bson.D{}, bson.D{
					{Key: "$unset", Value: bson.D{{Key: "token", Value: ""}}},
					{Key: "$set", Value: bson.D{
						{Key: "clusterTime", Value: at}, {Key: "gap", Value: lease.Gap{Reason: "history_lost", From: at, To: at, Since: time.Now()}},
					}},
				}); err != nil {
					t.Fatal(err)
				}
			}

			// The sweep cannot begin before the sender has looked at all of the store.
			node := b.topic
			read := stacktest.FailCommand(t, "outrelay stream "+node, "alwaysOn", bson.D{
				{Key: "failCommands", Value: bson.A{"aggregate"}}, {Key: "errorCode", Value: 91},
			})
			b.start(rules, now, "recording=delete", "node="+node)
			stacktest.Eventually(t, "the pass over the store has reached the witness", func() bool {
				n, err := b.db.Collection("outbox").CountDocuments(t.Context(), bson.D{{Key: "_id", Value: "witness"}})
				return err == nil && n == 0
			})
			read()
			b.waitRecords("second", b.topic, other)
			stacktest.Eventually(t, "the envelope has left the outbox and the store", func() bool {
				n, err := b.db.Collection("outbox").CountDocuments(t.Context(), bson.D{})
				return err == nil && n == 0 && b.countWaiting(bson.D{}) == 0
			})
		})
	}
}
