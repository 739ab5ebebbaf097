package process_test

import (
	"crypto/rand"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/pkg/event"
)

// TestN15_AnExceptionForOneTopicDoesNotHideTheOthers: an owner wrote an envelope of two topics down as parked for one of
// them, and died before it had sent it to the other. Neither the stream nor a sweep sends an envelope that has a state.
func TestN15_AnExceptionForOneTopicDoesNotHideTheOthers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		swept bool
	}{{"stream", false}, {"sweep", true}} {
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

			b.halfSent("second", other, c.swept)
			b.start(rules)
			for _, topic := range []string{other, b.topic} {
				read := *b
				read.topic = topic
				read.consume(2)
			}
		})
	}
}

// newSealField returns the field that proves that a relay or an operator wrote the state of a document.
func (b *bundle) newSealField() bson.E {
	b.t.Helper()
	seal, err := outboxes.NewRegistry(b.state.Collection("collections")).Seal(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	return bson.E{Key: "seal", Value: seal}
}

// halfSent leaves an envelope as an owner does that dies when it has written down that it waits for one topic.
func (b *bundle) halfSent(id, topic string, swept bool) {
	b.t.Helper()
	ctx, outbox := b.t.Context(), b.db.Collection("outbox")
	cs, err := outbox.Watch(ctx, mongo.Pipeline{})
	if err != nil {
		b.t.Fatal(err)
	}
	defer cs.Close(ctx)
	b.append(1, event.WithID(id))
	if !cs.Next(ctx) {
		b.t.Fatal(cs.Err())
	}

	pos := cs.Current.Lookup("_id", "_data").StringValue()
	watcher := bson.D{{Key: "$addToSet", Value: bson.D{{Key: "dirty", Value: b.db.Name() + ".outbox"}}}}
	if swept {
		var ts, to bson.Timestamp
		ts.T, ts.I = cs.Current.Lookup("fullDocument", "ts").Timestamp()
		to.T, to.I = cs.Current.Lookup("clusterTime").Timestamp()
		pos = outboxes.PosAt(ts)
		watcher = append(watcher, bson.E{Key: "$set", Value: bson.D{{Key: "gap", Value: lease.Gap{
			Reason: "history_lost", From: bson.Timestamp{T: ts.T - 1}, To: to, Since: time.Now(), Cursor: bson.Timestamp{T: ts.T - 1},
		}}}})
	}
	if _, err := outbox.UpdateOne(ctx, bson.D{{Key: "_id", Value: id}}, bson.D{{Key: "$set", Value: bson.D{
		{Key: "state", Value: "parked"},
		{Key: "pos", Value: pos},
		{Key: "pending", Value: bson.A{topic}},
		{Key: "origin", Value: outboxes.OriginStream},
		{Key: "attempts", Value: 0},
		{Key: "key", Value: "0"},
		b.newSealField(),
	}}}); err != nil {
		b.t.Fatal(err)
	}
	if _, err := b.state.Collection("watchers").UpdateOne(ctx, bson.D{}, watcher); err != nil {
		b.t.Fatal(err)
	}
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
		return func() bool {
			got, err := b.db.Collection("outbox").CountDocuments(t.Context(), bson.D{{Key: "state", Value: "parked"}})
			return err == nil && got == n
		}
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
		n, err := b.db.Collection("outbox_dead").CountDocuments(t.Context(), bson.D{{Key: "topic", Value: small}})
		return err == nil && n == 1
	})

	stacktest.Eventually(t, "two envelopes are parked", held(2))
	stacktest.CreateTopic(t, missing, 1)
	read := *b
	read.topic = missing
	read.consume(2)
}
