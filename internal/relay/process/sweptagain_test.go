package process_test

import (
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/pkg/event"
)

// TestN15_TheStreamDoesNotSendEnvelopesHeldByASweep: an envelope was committed after the end of a stretch, while that was swept, so the sweep
// found it and the stream brings it again. It had no stamp, or that of a transaction that was open at the end. It waited for its topic
// when its owner died, and the next owner delivers it before the stream brings it.
func TestN15_TheStreamDoesNotSendEnvelopesHeldByASweep(t *testing.T) {
	t.Parallel()
	for name, age := range map[string]uint32{"without a stamp": 0, "of an open transaction": 5} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			missing := "late-" + b.topic
			stop := b.start()
			b.append(1)
			b.consume(1)
			if err := stop(); err != nil {
				t.Fatal(err)
			}
			watchers := b.state.Collection("watchers")

			// 200 envelopes are more than the first response of a stream.
			b.append(200)
			doc := bson.D{
				{Key: "_id", Value: "held"},
				{Key: "aggregatetype", Value: "order"},
				{Key: "aggregateid", Value: "held"},
				{Key: "type", Value: "Placed"},
				{Key: "payload", Value: "1"},
				{Key: "topic", Value: missing},
			}
			at := b.position()
			if age > 0 {
				doc = append(doc, bson.E{Key: "ts", Value: bson.Timestamp{T: at.T - age, I: 1}})
			}
			if _, err := b.db.Collection("outbox").InsertOne(t.Context(), doc); err != nil {
				t.Fatal(err)
			}
			if err := (admin.Operator{State: b.state, Watcher: "default", Actor: "ann"}).Recovery().OrderSweep(t.Context(), time.Time{}); err != nil {
				t.Fatal(err)
			}
			stop = b.start()
			b.log.wait(t, "the gap is closed")
			if err := stop(); err != nil {
				t.Fatal(err)
			}

			// As if the stretch had ended before the envelope was committed.
			if _, err := watchers.UpdateOne(t.Context(), bson.D{}, bson.D{
				{Key: "$set", Value: bson.D{{Key: "clusterTime", Value: at}}}, {Key: "$unset", Value: bson.D{{Key: "token", Value: ""}}},
			}); err != nil {
				t.Fatal(err)
			}
			stacktest.CreateTopic(t, missing, 1)
			stacktest.FailCommand(t, "outrelay stream "+b.topic, bson.D{{Key: "times", Value: 1}}, bson.D{
				{Key: "failCommands", Value: bson.A{"getMore"}}, {Key: "blockConnection", Value: true}, {Key: "blockTimeMS", Value: 2000},
			})
			b.start("node=" + b.topic)
			b.waitRecords("held", missing)
			b.append(1, event.WithID("behind"), event.WithTopic(missing))
			late := *b
			late.topic = missing
			if n := late.countUntil("held", "behind"); n != 1 {
				t.Errorf("it was delivered %d times", n)
			}
		})
	}
}

// TestN15_TheStreamDoesNotSendEnvelopesThatDiedInASweep: an envelope was committed after the end of a gap, while the gap was swept. The sweep
// dead-lettered it, because its topic was not allowed, and the owner died before a checkpoint passed its event. The next owner may send
// to the topic. Its stream repeats the event, and only the letter shows that it is dead. An envelope with the same id that was inserted
// after the letter is sent.
func TestN15_TheStreamDoesNotSendEnvelopesThatDiedInASweep(t *testing.T) {
	t.Parallel()
	for name, age := range map[string]uint32{"without a stamp": 0, "of an open transaction": 5} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			forbidden := stacktest.Topic(t, 1)
			outbox, watchers := b.db.Collection("outbox"), b.state.Collection("watchers")
			stop := b.start()
			b.append(1)
			b.consume(1)
			if err := stop(); err != nil {
				t.Fatal(err)
			}
			at := b.position()

			insert := func(id, payload string) {
				t.Helper()
				doc := bson.D{
					{Key: "_id", Value: id},
					{Key: "aggregatetype", Value: "order"},
					{Key: "aggregateid", Value: "dead"},
					{Key: "type", Value: "Placed"},
					{Key: "payload", Value: payload},
					{Key: "topic", Value: forbidden},
				}
				if age > 0 {
					doc = append(doc, bson.E{Key: "ts", Value: bson.Timestamp{T: at.T - age, I: 1}})
				}
				if _, err := outbox.InsertOne(t.Context(), doc); err != nil {
					t.Fatal(err)
				}
			}
			insert("dead", "1")
			insert("again", "2")
			if err := (admin.Operator{State: b.state, Watcher: "default", Actor: "ann"}).Recovery().OrderSweep(t.Context(), time.Time{}); err != nil {
				t.Fatal(err)
			}
			stop = b.start("topics.allow=[" + b.topic + "]")
			b.log.wait(t, "the gap is closed")
			stacktest.Eventually(t, "both envelopes are dead letters", func() bool {
				return b.countLetters(bson.D{{Key: "class", Value: "not_allowed"}}) == 2
			})
			if err := stop(); err != nil {
				t.Fatal(err)
			}

			// As if the gap had ended before the envelopes were committed.
			if _, err := watchers.UpdateOne(t.Context(), bson.D{}, bson.D{
				{Key: "$set", Value: bson.D{{Key: "clusterTime", Value: at}}}, {Key: "$unset", Value: bson.D{{Key: "token", Value: ""}}},
			}); err != nil {
				t.Fatal(err)
			}
			// The service uses the id of a deleted envelope again.
			if _, err := outbox.DeleteOne(t.Context(), bson.D{{Key: "_id", Value: "again"}}); err != nil {
				t.Fatal(err)
			}
			insert("again", "3")
			b.append(1, event.WithID("last"), event.WithTopic(forbidden))
			b.start("topics.allow=[" + b.topic + "," + forbidden + "]")
			late := *b
			late.topic = forbidden
			if n := late.countUntil("dead", "last"); n != 0 {
				t.Errorf("the dead envelope was delivered %d times, want 0", n)
			}
			if n := late.countUntil("again", "last"); n != 1 {
				t.Errorf("the id that was inserted again was delivered %d times, want 1", n)
			}
		})
	}
}

// countUntil counts the records of an envelope in the topic, up to that of another one.
func (b *bundle) countUntil(envelope, last string) (n int) {
	b.t.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(stacktest.Brokers(b.t)...), kgo.ConsumeTopics(b.topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	if err != nil {
		b.t.Fatal(err)
	}
	defer cl.Close()

	for records := b.poll(cl); records != nil; records = b.poll(cl) {
		for _, r := range records {
			switch findID(r) {
			case envelope:
				n++
			case last:
				return n
			}
		}
	}
	b.t.Fatalf("no record of %s arrived in topic %s", last, b.topic)
	return n
}
