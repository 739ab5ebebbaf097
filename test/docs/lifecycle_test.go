//go:build unix

package docs

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/test/generated"
	"github.com/outrelay/outrelay/test/kit"
)

// lifecycleBlocks are the documents and records of docs/lifecycle.md in their order, with the title above each.
var lifecycleBlocks = []struct{ name, title string }{
	{"appended", "shop.outbox"},
	{"record", "Kafka"},
	{"parked", "outrelay.outrelay_waiting"},
	{"dead", "outrelay.outrelay_letters"},
	{"queued", "outrelay.outrelay_waiting"},
	{"requeued", "outrelay.outrelay_letters"},
	{"requeued record", "Kafka"},
	{"scheduled", "shop.outbox"},
	{"claimed", "outrelay.outrelay_claims"},
	{"handled", "shop.inbox"},
	{"set aside", "shop.inbox_waiting"},
	{"given up", "shop.inbox_dead"},
}

// A run with real servers makes the documents of docs/lifecycle.md: one event is appended, sent, parked, buried, requeued,
// scheduled, claimed and handled. Ids, times and names are replaced, so that each run makes the same page.
func TestLifecyclePageIsGenerated(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Types: []string{"order"}, Partitions: 1})
	s.SetConfig("watcher", "orders")
	s.SetConfig("topics.allow", []string{s.TopicOf("order"), s.TopicOf("refund")})
	// The consumer and the relay would otherwise create these collections in the transactions that the test looks at.
	if code, out, errOut := s.RunCommand("setup", "--yes"); code != 0 {
		t.Fatalf("setup: exit code %d\n%s%s", code, out, errOut)
	}

	l := &life{t: t, s: s, shown: map[string]string{}, names: newNames(s), inserted: map[string]chan bson.Raw{}}
	l.follow(s.Client.Database(s.State.Name()).Collection(s.State.Prefix() + "waiting"))
	l.follow(s.Client.Database(s.State.Name()).Collection(s.State.Prefix() + "claims"))
	l.follow(s.DB.Collection("inbox_waiting"))
	s.StartRelay().WaitTookOver()
	l.topics = s.ReadTopics()

	l.deliver()
	l.park()
	l.bury()
	l.schedule()
	l.handle()

	var names []string
	titles := map[string]string{}
	for _, b := range lifecycleBlocks {
		names = append(names, b.name)
		titles[b.name] = b.title
		if l.shown[b.name] == "" {
			t.Fatalf("the run has no document %q", b.name)
		}
	}
	generated.CheckBlocks(t, "docs/lifecycle.md", names, func(name string) string {
		return "\n```js\n// " + titles[name] + "\n" + l.shown[name] + "\n```\n\n"
	})
}

// life is the run whose documents the page shows.
type life struct {
	t      *testing.T
	s      *kit.Scene
	topics *kit.Topics
	names  *names
	first  string            // id of the first event
	shown  map[string]string // the formatted documents by the name of their block

	inserted map[string]chan bson.Raw // new documents by the name of their collection
}

type order struct {
	ID    string `json:"id" bson:"_id"`
	Cents int    `json:"cents" bson:"cents"`
}

var orderPlaced = event.Type[order]{Aggregate: "order", Name: "OrderPlaced"}

// append commits an order and an event in one transaction, as a service does.
func (l *life) append(id string, ev event.Event) {
	l.t.Helper()
	box, err := outbox.New(l.s.DB)
	if err != nil {
		l.t.Fatal(err)
	}
	err = box.Transaction(l.t.Context(), func(ctx context.Context) error {
		if _, err := l.s.DB.Collection("orders").InsertOne(ctx, order{ID: id, Cents: 4200}); err != nil {
			return err
		}
		return box.Append(ctx, ev)
	})
	if err != nil {
		l.t.Fatal(err)
	}
}

// show stores the only document of a collection that matches, as soon as there is one. opts can select fields.
func (l *life) show(name string, collection *mongo.Collection, filter bson.D, opts ...options.Lister[options.FindOneOptions]) bson.Raw {
	l.t.Helper()
	var found bson.Raw
	stacktest.Eventually(l.t, "a document for "+name, func() bool {
		var err error
		// The commands of the page read what is committed by a majority.
		found, err = mongodb.Majority(collection).FindOne(l.t.Context(), filter, opts...).Raw()
		return err == nil
	})
	l.shown[name] = l.names.formatDocument(found)
	return found
}

// showRecord stores the record of an event with this value of the header outrelay-delivery.
func (l *life) showRecord(name string, id event.ID, delivery string) {
	l.t.Helper()
	rec := l.topics.WaitForRecord(name, func(rec *kit.Record) bool {
		return rec.Header("id") == id.String() && rec.Header("outrelay-delivery") == delivery
	})
	l.shown[name] = l.names.formatRecord(rec)
}

// follow collects the documents that are inserted into a collection, also if they are soon changed or removed.
func (l *life) follow(collection *mongo.Collection) {
	l.t.Helper()
	documents := make(chan bson.Raw, 100)
	l.inserted[collection.Name()] = documents
	inserts := mongo.Pipeline{{{Key: "$match", Value: bson.D{{Key: "operationType", Value: "insert"}}}}}
	stream, err := collection.Watch(l.t.Context(), inserts, options.ChangeStream().SetMaxAwaitTime(200*time.Millisecond))
	if err != nil {
		l.t.Fatal(err)
	}

	done := make(chan struct{})
	go func() {
		defer close(done)
		for stream.Next(l.t.Context()) {
			documents <- bson.Raw(slices.Clone(stream.Current.Lookup("fullDocument").Document()))
		}
		_ = stream.Close(context.WithoutCancel(l.t.Context()))
	}()
	l.t.Cleanup(func() { <-done })
}

// showInserted stores the next document that was inserted into a followed collection and for which matches returns true.
func (l *life) showInserted(name, collection string, matches func(bson.Raw) bool) {
	l.t.Helper()
	timeout := time.After(kit.Patience)
	for {
		select {
		case document := <-l.inserted[collection]:
			if matches(document) {
				l.shown[name] = l.names.formatDocument(document)
				return
			}
		case <-timeout:
			l.t.Fatalf("no document for %s in %s", name, collection)
		}
	}
}

// deliver appends an event and waits for its record.
func (l *life) deliver() {
	placed := orderPlaced.New("o-17", order{ID: "o-17", Cents: 4200})
	l.first = placed.ID().String()
	l.append("o-17", placed)
	l.show("appended", l.s.Outbox(), byID(placed))
	l.showRecord("record", placed.ID(), "")
}

// park appends an event whose topic does not exist, and creates the topic when the event waits.
func (l *life) park() {
	refunded := event.Type[order]{Aggregate: "refund", Name: "RefundRequested"}.New("o-17", order{ID: "o-17", Cents: 4200})
	l.append("r-1", refunded)
	l.show("parked", l.s.State.Collection("waiting"), bson.D{{Key: "reason", Value: "parked"}})
	l.s.CreateTopic("refund", 1, 1)
	kit.ReadTopics(l.t, l.s.Brokers, l.s.TopicOf("refund")).WaitForRecord("the refund", func(rec *kit.Record) bool { return rec.Header("id") == refunded.ID().String() })
	stacktest.Eventually(l.t, "nothing waits", func() bool { return l.s.CountHeld() == 0 })
}

// bury appends an event whose topic is not allowed, and requeues its dead letter to another topic.
func (l *life) bury() {
	gift := event.Type[order]{Aggregate: "gift", Name: "GiftWrapped"}.New("o-17", order{ID: "o-17", Cents: 4200})
	l.append("g-1", gift)
	letters := l.s.State.Collection("letters")
	letter := l.show("dead", letters, bson.D{})

	code, out, errOut := l.s.RunCommand("dead", "edit", letter.Lookup("_id").StringValue(), "--version", "0", "--topic", l.s.TopicOf("order"), "--actor", "ann", "--yes")
	if code != 0 {
		l.t.Fatalf("dead edit: exit code %d\n%s%s", code, out, errOut)
	}
	l.showInserted("queued", "outrelay_waiting", func(document bson.Raw) bool { return document.Lookup("reason").StringValue() == "queued" })
	l.showRecord("requeued record", gift.ID(), "1")
	l.show("requeued", letters, bson.D{}, options.FindOne().SetProjection(bson.D{{Key: "class", Value: 1}, {Key: "requeued", Value: 1}}))
}

// schedule appends an event that is due in an hour, and one that is due soon.
func (l *life) schedule() {
	later := orderPlaced.New("o-18", order{ID: "o-18", Cents: 900}, event.WithDueAt(time.Now().Add(time.Hour)))
	l.append("o-18", later)
	l.show("scheduled", l.s.Outbox(), byID(later))

	soon := orderPlaced.New("o-19", order{ID: "o-19", Cents: 900}, event.WithDueAt(time.Now().Add(2*time.Second)))
	l.append("o-19", soon)
	l.showInserted("claimed", "outrelay_claims", func(bson.Raw) bool { return true })
	l.topics.WaitForRecord("the scheduled event", func(rec *kit.Record) bool { return rec.Header("id") == soon.ID().String() })
	stacktest.Eventually(l.t, "no claim and no envelope of the sent event", func() bool {
		return l.s.CountState("claims", bson.D{}) == 0 && l.s.CountOutbox(byID(soon)) == 0
	})
}

// handle runs a consumer that handles the first order, and one handler each that fails and that rejects it.
func (l *life) handle() {
	c, err := consumer.New("shipping", l.s.DB, consumer.WithBrokers(l.s.Brokers...), consumer.WithTopics(l.s.TopicOf("order")))
	if err != nil {
		l.t.Fatal(err)
	}

	handle := func(name string, result error, opts ...consumer.HandlerOption) {
		l.t.Helper()
		err := c.Handle(name, consumer.For(orderPlaced, func(_ context.Context, _ *consumer.Message, placed order) error {
			if placed.ID != "o-17" {
				return nil
			}
			return result
		}), opts...)
		if err != nil {
			l.t.Fatal(err)
		}
	}

	handle("pack", nil)
	handle("notify", errors.New("mail server: connection refused"))
	handle("charge", consumer.Reject(errors.New("the card has expired")))

	ctx, stop := context.WithCancel(l.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	defer func() {
		stop()
		if err := <-ended; err != nil {
			l.t.Errorf("the consumer ended: %v", err)
		}
	}()
	l.show("handled", l.s.DB.Collection("inbox"), bson.D{{Key: "_id.c", Value: bson.Regex{Pattern: "pack"}}, {Key: "_id.i", Value: l.first}})
	l.showInserted("set aside", "inbox_waiting", func(bson.Raw) bool { return true })
	l.show("given up", l.s.DB.Collection("inbox_dead"), bson.D{})
}

func byID(ev event.Event) bson.D {
	raw, err := ev.MarshalBSON()
	if err != nil {
		panic(fmt.Sprintf("encoding an event: %v", err))
	}
	return bson.D{{Key: "_id", Value: bson.Raw(raw).Lookup("_id")}}
}
