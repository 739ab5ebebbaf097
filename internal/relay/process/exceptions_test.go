package process_test

import (
	"context"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/process"
	"github.com/outrelay/outrelay/pkg/event"
)

// TestN19_EnvelopesScheduledBeforeTheFirstPositionAreSent: a watcher that starts at now skips the backlog, but no watcher
// has sent the envelopes that are due later.
func TestN19_EnvelopesScheduledBeforeTheFirstPositionAreSent(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(3)
	b.append(1, event.WithDueAt(time.Now().Add(time.Second)))
	b.start("start=now")
	if got := b.consume(1); string(got[0].Value) != "0" {
		t.Errorf("got %q, want the scheduled event alone", got[0].Value)
	}
	stacktest.Eventually(t, "the scheduled envelope is sent", func() bool {
		n, err := b.db.Collection("outbox").CountDocuments(t.Context(), bson.D{{Key: "dueAt", Value: bson.D{{Key: "$exists", Value: true}}}})
		return err == nil && n == 0
	})
}

// TestN19_AMalformedScheduledEnvelopeGetsOneLetter: the stream brings it, and the index does when it is due.
func TestN19_AMalformedScheduledEnvelopeGetsOneLetter(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(1)
	b.start()
	b.consume(1)

	malformed := bson.D{{Key: "_id", Value: "bad"}, {Key: "dueAt", Value: time.Now().Add(time.Second)}, {Key: "type", Value: 5}}
	if _, err := b.db.Collection("outbox").InsertOne(t.Context(), malformed); err != nil {
		t.Fatal(err)
	}
	b.append(1, event.WithDueAt(time.Now().Add(2*time.Second)))
	b.consume(2)
	stacktest.Eventually(t, "the malformed envelope leaves the outbox", func() bool {
		n, err := b.db.Collection("outbox").CountDocuments(t.Context(), bson.D{{Key: "_id", Value: "bad"}})
		return err == nil && n == 0
	})

	stacktest.Eventually(t, "its letter is stored", func() bool { return b.count("letters", bson.D{{Key: "id", Value: "bad"}}) > 0 })
	if n := b.countWaiting(bson.D{{Key: "id", Value: "bad"}}) + b.count("letters", bson.D{{Key: "id", Value: "bad"}}); n != 1 {
		t.Errorf("%d letters, want one", n)
	}
}

// TestN17_DeadEnvelopesAreDeletedWithTheOthers: with `recording: delete`, the outbox stays empty: the letter has the envelope.
func TestN17_DeadEnvelopesAreDeletedWithTheOthers(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.start("recording=delete")
	outbox := b.db.Collection("outbox")
	if _, err := outbox.InsertOne(t.Context(), bson.D{{Key: "_id", Value: "malformed"}, {Key: "type", Value: 5}}); err != nil {
		t.Fatal(err)
	}
	b.append(1, event.WithPartition(99))

	b.append(1)
	b.consume(1)
	stacktest.Eventually(t, "the letters are stored", func() bool { return b.count("letters", bson.D{}) == 2 })
	stacktest.Eventually(t, "the outbox is empty", func() bool {
		n, err := outbox.CountDocuments(t.Context(), bson.D{})
		return err == nil && n == 0
	})
}

// TestAValidatorOfTheOutboxStopsNothing: what waits is stored in the state database, so the rules of the outbox do not apply to it.
func TestAValidatorOfTheOutboxStopsNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(1)
	if err := b.db.RunCommand(t.Context(), bson.D{{Key: "collMod", Value: "outbox"}, {Key: "validator", Value: bson.D{{Key: "state", Value: bson.D{{Key: "$exists", Value: false}}}}}}).Err(); err != nil {
		t.Fatal(err)
	}

	b.start()
	b.append(3, event.WithTopic("missing-"+b.topic))
	stacktest.Eventually(t, "three envelopes wait", func() bool { return b.countWaiting(bson.D{{Key: "reason", Value: "parked"}}) == 3 })

	b.append(1)
	b.consume(2)
	stacktest.Eventually(t, "the relay is live without a lag", func() bool { w := b.status(); return w.State == "live" && w.LagS != nil && *w.LagS == 0 })
}

// TestN19_EnvelopesScheduledBeforeTheFirstPositionAreSentAfterARestart: the process ended between its first position and Kafka's response.
func TestN19_EnvelopesScheduledBeforeTheFirstPositionAreSentAfterARestart(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(3)
	b.append(1, event.WithDueAt(time.Now().Add(time.Second)))
	stop := b.start("start=now", "kafka.brokers=[127.0.0.1:1]")
	stacktest.Eventually(t, "the first position is saved", func() bool {
		n, err := b.state.Collection("watchers").CountDocuments(t.Context(), bson.D{{Key: "clusterTime", Value: bson.D{{Key: "$exists", Value: true}}}})
		return err == nil && n == 1
	})

	if err := stop(); err != nil {
		t.Fatal(err)
	}

	b.start("start=now")
	if got := b.consume(1); string(got[0].Value) != "0" {
		t.Errorf("got %q, want the scheduled event alone", got[0].Value)
	}
}

// TestADeliveryThatCannotBeWrittenDownHoldsUpNobody: a validator forbids the fields of a delivered envelope.
func TestADeliveryThatCannotBeWrittenDownHoldsUpNobody(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(1)
	if err := b.db.RunCommand(t.Context(), bson.D{{Key: "collMod", Value: "outbox"}, {Key: "validator", Value: bson.D{{Key: "sentAt", Value: bson.D{{Key: "$exists", Value: false}}}}}}).Err(); err != nil {
		t.Fatal(err)
	}
	b.start("recording=mark")
	b.append(20)
	b.consume(21)
	stacktest.Eventually(t, "the relay is live and everything is resolved", func() bool {
		w := b.status()
		return w.State == "live" && w.Unresolved == 0 && w.LagS != nil && *w.LagS == 0
	})
	b.log.wait(t, "cannot record deliveries")
}

// TestN15_AGateOpensWhenTheLetterIsSafe: with one attempt, a later event of the key is not delivered before the letter
// of the rejected event is written. If an owner died in between, its successor would deliver the rejected event after the
// later one.
func TestN15_AGateOpensWhenTheLetterIsSafe(t *testing.T) {
	t.Parallel()
	b := setup(t)
	node := stacktest.Name(t)
	age := func(ms string) {
		t.Helper()
		if err := devstack.SetTopic(t.Context(), stacktest.Brokers(t), b.topic, "message.timestamp.before.max.ms", ms); err != nil {
			t.Fatal(err)
		}
	}
	age("0")
	failing, safe := stacktest.FailAlways(t, "outrelay state "+node, bson.D{
		{Key: "failCommands", Value: bson.A{"update"}},
		{Key: "namespace", Value: b.state.Namespace("letters")},
		{Key: "errorCode", Value: 112},
		{Key: "errorLabels", Value: bson.A{"TransientTransactionError"}},
	})
	b.start("node="+node, "retry.max_attempts=1")
	b.log.wait(t, "took over")
	key := event.WithKey("one")
	b.append(1, key)
	failing()
	age("9223372036854775807")
	b.append(1, key)

	cl, err := kgo.NewClient(kgo.SeedBrokers(stacktest.Brokers(t)...), kgo.ConsumeTopics(b.topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if n := cl.PollFetches(ctx).NumRecords(); n > 0 {
		t.Error("the later event was delivered while the letter of the rejected one was not written")
	}
	safe()
	b.consume(1)
}

// TestAPositionThatDoesNotMoveIsReported: a dead letter cannot be stored. No target is blocked, so nothing else explains why
// the position stays.
func TestAPositionThatDoesNotMoveIsReported(t *testing.T) {
	t.Parallel()
	b := setup(t)
	node := stacktest.Name(t)
	_, safe := stacktest.FailAlways(t, "outrelay state "+node, bson.D{
		{Key: "failCommands", Value: bson.A{"update"}},
		{Key: "namespace", Value: b.state.Namespace("letters")},
		{Key: "errorCode", Value: 112},
		{Key: "errorLabels", Value: bson.A{"TransientTransactionError"}},
	})
	b.startAs(func(r *process.Relay) { r.Hasten(10 * time.Second) }, "node="+node)
	b.log.wait(t, "took over")
	if _, err := b.db.Collection("outbox").InsertOne(t.Context(), bson.D{{Key: "_id", Value: "not an envelope"}}); err != nil {
		t.Fatal(err)
	}

	b.log.wait(t, "MongoDB has not stored the oldest waiting or dead event")
	safe()
	b.log.wait(t, "an envelope is dead")
}
