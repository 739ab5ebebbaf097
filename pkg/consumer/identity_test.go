package consumer_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
)

// relayRecord returns the record that a relay sends for the event of an outbox.
func (k *kit) relayRecord(db, coll string, ev event.Event) transport.Record {
	k.Helper()
	preset, err := routing.NewPreset(routing.PresetConfig{})
	if err != nil {
		k.Fatal(err)
	}
	raw, err := bson.Marshal(ev)
	if err != nil {
		k.Fatal(err)
	}

	var v envelope.View
	if err := envelope.Parse(raw, &v); err != nil {
		k.Fatal(err)
	}
	var rec record.Record
	if err := preset.Filler().Fill(&v, &routing.Meta{DB: []byte(db), Coll: []byte(coll)}, routing.Target{}, &rec); err != nil {
		k.Fatal(err)
	}
	r := transport.Record{Key: rec.Key, Value: rec.Value}
	for _, h := range rec.Headers {
		r.Headers = append(r.Headers, event.Header{Key: string(h.Key), Value: h.Value})
	}
	return r
}

// An id is unique in its collection. Two services use the ids of orders as ids of their events, and a third one writes its records
// without a relay. A handler that takes all of them gets all of them, and each of them once.
func TestEqualIDsOfDifferentOriginsAreDifferentMessages(t *testing.T) {
	t.Parallel()
	for _, mode := range []consumer.Mode{consumer.Transactional, consumer.Claimed} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			parcels, foreign := stacktest.Topic(t, 1), stacktest.Topic(t, 1)
			insert := k.insertInto("effects")
			c := k.newConsumer(consumer.WithTopics(parcels, foreign), consumer.WithMode(mode))
			addHandlerAs(t, c, "both", "*", insert)
			k.start(c)

			placed := event.New(event.Aggregate{Type: "order", ID: "o-1"}, "OrderPlaced", event.Payload{}, event.WithID("o-1"))
			packed := event.New(event.Aggregate{Type: "parcel", ID: "o-1"}, "ParcelPacked", event.Payload{}, event.WithID("o-1"))
			other := transport.Record{Key: []byte("o-1"), Headers: []event.Header{{Key: "id", Value: []byte("o-1")}, {Key: "type", Value: []byte("X")}}}
			for topic, r := range map[string]transport.Record{
				k.topic: k.relayRecord("shop", "outbox", placed), parcels: k.relayRecord("shipping", "outbox", packed), foreign: other,
			} {
				// Each one is sent twice.
				if err := k.kafka.Publish(k.context(), topic, []transport.Record{r, r}); err != nil {
					t.Fatal(err)
				}
			}
			// The event of one collection in two topics is one message.
			if err := k.kafka.Publish(k.context(), parcels, []transport.Record{k.relayRecord("shop", "outbox", placed)}); err != nil {
				t.Fatal(err)
			}
			for topic, n := range map[string]int64{k.topic: 2, parcels: 3, foreign: 2} {
				k.waitUntil("the offset of "+topic, func(context.Context) bool { return k.committedOf(topic, 1)[0] == n })
			}
			if n := k.countDocuments("effects"); n != 3 {
				t.Errorf("%d effects of 3 messages with one id", n)
			}
		})
	}
}

// Different ids are different messages, also if one of them looks like the identity of another one.
func TestDifferentIDsAreDifferentMessages(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.newConsumer()
	addHandler(t, c, "*", k.insertInto("effects"))
	k.start(c)

	const uuid = "0194fdc2-fa2f-7fcc-841d-3dd8cd8d5f9b"
	long := strings.Repeat("x", 2000)
	newEvent := func(id string, opts ...event.Option) event.Event {
		return event.New(event.Aggregate{Type: "order", ID: "1"}, "counted", event.Payload{}, append(opts, event.WithID(id))...)
	}
	for _, ev := range []event.Event{
		newEvent("1", event.WithDedupKey("key")), newEvent("dedup:key"), newEvent(uuid), newEvent("string:" + uuid),
		newEvent("string:string:" + uuid), newEvent("2", event.WithDedupKey(long)),
		newEvent(fmt.Sprintf("sha256:%x", sha256.Sum256([]byte("dedup:"+long)))),
	} {
		r := k.relayRecord("shop", "outbox", ev)
		if err := k.kafka.Publish(k.context(), k.topic, []transport.Record{r, r}); err != nil {
			t.Fatal(err)
		}
	}
	k.waitUntil("the offset", func(context.Context) bool { return k.readCommitted(1)[0] == 14 })
	if n := k.countDocuments("effects"); n != 7 {
		t.Errorf("%d effects of 7 messages", n)
	}
}

// A message without a namespace keeps its identity in retry topics: the topic of its first record.
func TestAForeignMessageKeepsItsIdentityInRetryTopics(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	k.deleteAtEnd(k.topic + "." + k.group + ".retry.1")
	failed := make(chan struct{}, 10)
	insert := k.insertInto("effects")
	c := k.newConsumer(consumer.WithRetryTopics(100 * time.Millisecond))
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		if m.Topic == k.topic {
			// A transaction may run often.
			retry.Signal(failed)
			return errWanted
		}
		return insert(ctx, m)
	})

	k.start(c)
	k.publish(newMessage("a", "counted", "0"))
	k.waitFor("the failure", failed)
	k.waitCount("effects", 1)
	marker := bson.D{{Key: "_id.n", Value: "topic " + k.topic}, {Key: "_id.i", Value: "a/counted/0"}}
	if n, err := k.db.Collection("inbox").CountDocuments(k.context(), marker); err != nil || n != 1 {
		t.Errorf("%d markers with the first topic, %v", n, err)
	}
}

// Messages with one id that are given up leave a letter each, whatever the reason.
func TestEachMessageThatIsGivenUpLeavesALetter(t *testing.T) {
	t.Parallel()

	for name, c := range map[string]struct {
		mode consumer.Mode
		typ  string
	}{
		"rejected":                {consumer.Transactional, "counted"},
		"rejected, at least once": {consumer.AtLeastOnce, "counted"},
		"unknown":                 {consumer.AtLeastOnce, "another"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 2)
			cons := k.newConsumer(consumer.WithMode(c.mode))
			addHandler(t, cons, "counted", func(context.Context, *consumer.Message) error { return consumer.Reject(errWanted) })
			want := 0
			for i := range 6 {
				m := newMessage(fmt.Sprint("key", i), c.typ, "0")
				// For some producers, the id is that of an entity.
				m.SetHeader("id", []byte("article 7"))
				k.publish(m)
				want++
			}
			k.start(cons)
			k.waitUntil("the offsets", func(context.Context) bool { return sumOffsets(k.readCommitted(2)) == 6 })
			if n, err := k.newDesk().Count(k.context(), deadletter.Query{Messages: []string{"article 7"}}); err != nil || int(n) != want {
				t.Errorf("%d letters of %d messages, %v", n, want, err)
			}
		})
	}
}
