package process_test

import (
	"crypto/rand"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/resume"
)

// TestN15_AnExceptionForOneTopicDoesNotHideTheOthers: an owner wrote an envelope of two topics down as parked for one of
// them, and died before it had sent it to the other. Neither the stream nor a sweep sends an envelope that has a state.
func TestN15_AnExceptionForOneTopicDoesNotHideTheOthers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name           string
		swept, expires bool
	}{{"stream", false, false}, {"sweep", true, false}, {"stream, expired", false, true}, {"sweep, expired", true, true}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			other := stacktest.Topic(t, 1)
			rules := "topics.rules=[{match: {aggregatetype: order}, to: [" + b.topic + ", " + other + "]}]"

			stop := b.start(rules)
			b.append(1)
			b.consume(1)
			if err := stop(); err != nil {
				t.Fatal(err)
			}

			if !c.expires {
				b.halfSent("second", other, c.swept)
				b.start(rules)
				for _, topic := range []string{other, b.topic} {
					read := *b
					read.topic = topic
					read.consume(2)
				}
				return
			}

			// The owner began both topics in time. An envelope that waits for so long has expired.
			expires := time.Now().Add(time.Second)
			b.halfSent("second", other, c.swept, event.WithExpiry(expires))
			stacktest.Eventually(t, "the envelope has expired", func() bool { return time.Now().After(expires) })
			b.start(rules)
			b.consume(2)
			stacktest.Eventually(t, "the other topic has a letter", func() bool { return b.countLetters(bson.D{}) == 1 })
		})
	}
}

// halfSent leaves an envelope as an owner does that dies when it has written down that it waits for one topic.
func (b *bundle) halfSent(id, topic string, swept bool, opts ...event.Option) {
	b.t.Helper()
	ctx, outbox := b.t.Context(), b.db.Collection("outbox")
	cs, err := outbox.Watch(ctx, mongo.Pipeline{})
	if err != nil {
		b.t.Fatal(err)
	}
	defer cs.Close(ctx)
	b.append(1, append(opts, event.WithID(id))...)
	if !cs.Next(ctx) {
		b.t.Fatal(cs.Err())
	}

	pos := outboxes.PosOf(resume.Position{Token: cs.Current.Lookup("_id").Value})
	origin := waiting.OriginStream
	if swept {
		var ts, to bson.Timestamp
		ts.T, ts.I = cs.Current.Lookup("fullDocument", "ts").Timestamp()
		to.T, to.I = cs.Current.Lookup("clusterTime").Timestamp()
		pos, origin = outboxes.PosAt(ts), waiting.OriginSweep
		if _, err := b.state.Collection("watchers").UpdateOne(ctx, bson.D{}, bson.D{{Key: "$set", Value: bson.D{{Key: "gap", Value: lease.Gap{
			Reason: "history_lost", From: bson.Timestamp{T: ts.T - 1}, To: to, Since: time.Now(), Cursor: bson.Timestamp{T: ts.T - 1},
		}}}}}); err != nil {
			b.t.Fatal(err)
		}
	}
	b.enterWaiting(id, pos, func(e *waiting.Entry) { e.Pending, e.Origin = []string{topic}, origin })
}

// TestN17_ALetterForOneTopicLeavesTheOthersTheirs: an envelope that waits for a missing topic is too large for another one.
// The relay writes a letter for the small topic, and still owes the envelope to the missing topic.
func TestN17_ALetterForOneTopicLeavesTheOthersTheirs(t *testing.T) {
	t.Parallel()
	b := setup(t)
	small, missing := "small-"+b.topic, "late-"+b.topic
	stacktest.CreateTopic(t, small, 1, kafka.ConfigEntry{ConfigName: "max.message.bytes", ConfigValue: "100000"})
	// With compression, only the broker can find that a record is too large.
	b.start("topics.rules=[{match: {aggregatetype: order}, to: ["+small+", "+missing+"]}]", "kafka.compression=zstd")
	b.append(1)
	held := func(n int64) func() bool {
		return func() bool { return b.countWaiting(bson.D{{Key: "reason", Value: "parked"}}) == n }
	}

	stacktest.Eventually(t, "one envelope is parked", held(1))
	noise := make([]byte, 200_000)
	if _, err := rand.Read(noise); err != nil {
		t.Fatal(err)
	}
	if err := b.box.Append(t.Context(), event.New(event.Aggregate{Type: "order", ID: "big"}, "Placed", event.Bytes("", noise))); err != nil {
		t.Fatal(err)
	}

	stacktest.Eventually(t, "the large envelope is a dead letter", func() bool {
		return b.countLetters(bson.D{{Key: "topic", Value: small}}) == 1
	})

	stacktest.Eventually(t, "two envelopes are parked", held(2))
	stacktest.CreateTopic(t, missing, 1)
	read := *b
	read.topic = missing
	read.consume(2)
}
