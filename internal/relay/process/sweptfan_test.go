package process_test

import (
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// fansOut is the rule that every order goes to these topics.
func fansOut(topics ...string) string {
	rule := "topics.rules=[{match: {aggregatetype: order}, to: ["
	for i, t := range topics {
		if i > 0 {
			rule += ", "
		}
		rule += t
	}
	return rule + "]}]"
}

// fannedOut has an owner deliver one event that goes to two topics, and stop.
func (b *bundle) fannedOut() (rules, other string) {
	b.t.Helper()
	other = stacktest.Topic(b.t, 1)
	rules = fansOut(b.topic, other)
	stop := b.start(rules)
	b.append(1)
	b.consume(1)
	if err := stop(); err != nil {
		b.t.Fatal(err)
	}
	return rules, other
}

// TestN22_ASweepOwesTheOtherTopicsOfUnstampedEnvelopes: an owner swept an envelope without a stamp, wrote down that it waits for one
// of its two topics, and died before it had sent it to the other. A sweep leaves out only the topic for which it waits.
func TestN22_ASweepOwesTheOtherTopicsOfUnstampedEnvelopes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	rules, other := b.fannedOut()
	watcher, _, err := lease.Read(t.Context(), b.state.Collection("watchers"), "default/0of1")
	if err != nil {
		t.Fatal(err)
	}

	from := watcher.ClusterTime
	_, err = b.db.Collection("outbox").InsertOne(t.Context(), bson.D{
		{Key: "_id", Value: "second"},
		{Key: "aggregatetype", Value: "order"},
		{Key: "aggregateid", Value: "0"},
		{Key: "type", Value: "Placed"},
		{Key: "payload", Value: bson.Binary{Data: []byte("1")}},
	})
	if err != nil {
		t.Fatal(err)
	}
	b.enterWaiting("second", outboxes.PosAt(bson.Timestamp{}), func(e *waiting.Entry) {
		e.Pending, e.Origin, e.Number = []string{other}, waiting.OriginSweep, outboxes.PosNumber(from, 1)
	})
	if _, err := b.state.Collection("watchers").UpdateOne(t.Context(), bson.D{}, bson.D{
		{Key: "$set", Value: bson.D{{Key: "gap", Value: lease.Gap{
			Reason: "history_lost", From: from, To: bson.Timestamp{T: from.T + 1, I: 1}, Since: time.Now(),
		}}}},
	}); err != nil {
		t.Fatal(err)
	}

	b.start(rules)
	b.waitRecords("second", other, b.topic)
}

// TestN22_AGapThatIsFoundAtTheOpeningOwesTheOtherTopics: an owner died between two topics of an envelope, as above, and the relay
// was down for so long that its successor finds the stream gone when it opens it, after everything that a takeover looks up.
func TestN22_AGapThatIsFoundAtTheOpeningOwesTheOtherTopics(t *testing.T) {
	t.Parallel()
	b := setup(t)
	rules, other := b.fannedOut()
	b.halfSent("second", other, false)
	// Neither the token nor its time can be opened.
	stacktest.FailCommand(t, "outrelay stream "+b.topic, bson.D{{Key: "times", Value: 2}},
		bson.D{{Key: "failCommands", Value: bson.A{"aggregate"}}, {Key: "errorCode", Value: 286}})
	b.start(rules, "node="+b.topic)
	b.waitRecords("second", other, b.topic)
	b.log.wait(t, "the gap is closed")
}

// waitRecords waits for a record of an envelope in each of the topics.
func (b *bundle) waitRecords(envelope string, topics ...string) {
	b.t.Helper()
	for _, topic := range topics {
		b.arrivesIn(topic, envelope)
	}
}

func (b *bundle) arrivesIn(topic, envelope string) {
	b.t.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(stacktest.Brokers(b.t)...), kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	if err != nil {
		b.t.Fatal(err)
	}
	defer cl.Close()
	for records := b.poll(cl); records != nil; records = b.poll(cl) {
		for _, r := range records {
			if findID(r) == envelope {
				return
			}
		}
	}

	b.t.Fatalf("no record of %s arrived in topic %s", envelope, topic)
}

// TestN27_ARenamedCollectionOwesTheOtherTopics: an owner swept a collection that was renamed into the watch list,
// recorded that an envelope of it waits for a missing topic, and died before the envelope reached the other topic. The
// next owner that finds the rename sweeps the envelope for the other topic only.
func TestN27_ARenamedCollectionOwesTheOtherTopics(t *testing.T) {
	t.Parallel()
	b := setup(t)
	missing := "late-" + b.topic
	set := []string{"watch=" + b.db.Name() + ".outbox*", fansOut(b.topic, missing)}
	stop := b.start("watch=" + b.db.Name() + ".outbox*")
	b.append(1)
	b.consume(1)
	if err := stop(); err != nil {
		t.Fatal(err)
	}

	watchers := b.state.Collection("watchers")
	before, err := watchers.FindOne(t.Context(), bson.D{}).Raw()
	if err != nil {
		t.Fatal(err)
	}

	stash, err := outbox.New(b.db, outbox.WithoutTransaction(), outbox.WithCollection("stash"))
	if err != nil {
		t.Fatal(err)
	}
	if err := stash.Append(t.Context(), event.New(event.Aggregate{Type: "order", ID: "k"}, "Placed", event.Bytes("", []byte("1")), event.WithID("moved"))); err != nil {
		t.Fatal(err)
	}
	if err := b.client.Database("admin").RunCommand(t.Context(), bson.D{
		{Key: "renameCollection", Value: b.db.Name() + ".stash"}, {Key: "to", Value: b.db.Name() + ".outbox_old"},
	}).Err(); err != nil {
		t.Fatal(err)
	}

	stop = b.start(set...)
	b.waitRecords("moved", b.topic)
	stacktest.Eventually(t, "the envelope is parked", func() bool {
		return b.countWaiting(bson.D{{Key: "reason", Value: "parked"}}) == 1
	})

	if err := stop(); err != nil {
		t.Fatal(err)
	}

	b.forgetRecords()
	back := bson.D{}
	for _, field := range []string{"token", "clusterTime", "offsets", "collections", "pipelineHash"} {
		back = append(back, bson.E{Key: field, Value: before.Lookup(field)})
	}
	if _, err := watchers.UpdateOne(t.Context(), bson.D{}, bson.D{{Key: "$set", Value: back}}); err != nil {
		t.Fatal(err)
	}

	b.start(set...)
	b.waitRecords("moved", b.topic)
	stacktest.CreateTopic(t, missing, 1)
	b.waitRecords("moved", missing)
	stacktest.Eventually(t, "no envelope waits", func() bool {
		return b.countWaiting(bson.D{}) == 0
	})
}

// forgetRecords removes all records of the topic, as if they had never been sent.
func (b *bundle) forgetRecords() {
	b.t.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(stacktest.Brokers(b.t)...))
	if err != nil {
		b.t.Fatal(err)
	}
	defer cl.Close()
	adm := kadm.NewClient(cl)
	ends, err := adm.ListEndOffsets(b.t.Context(), b.topic)
	if err == nil {
		err = ends.Error()
	}
	if err != nil {
		b.t.Fatal(err)
	}

	res, err := adm.DeleteRecords(b.t.Context(), ends.Offsets())
	if err == nil {
		err = res.Error()
	}
	if err != nil {
		b.t.Fatal(err)
	}
}
