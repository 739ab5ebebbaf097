package consumer_test

import (
	"context"
	"maps"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/inbox"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// readCauses returns the causes of the events in the outbox, by the aggregate id of the event.
func (k *kit) readCauses() map[string]event.Cause {
	k.Helper()
	cur, err := k.db.Collection("outbox").Find(k.context(), bson.D{})
	if err != nil {
		k.Fatal(err)
	}
	var docs []struct {
		About   string `bson:"aggregateid"`
		Headers []struct {
			K string
			V []byte
		}
	}
	if err := cur.All(k.context(), &docs); err != nil {
		k.Fatal(err)
	}

	causes := map[string]event.Cause{}
	for _, doc := range docs {
		var cause event.Cause
		for _, header := range doc.Headers {
			switch header.K {
			case "correlation-id":
				cause.CorrelationID = string(header.V)
			case "causation-id":
				cause.CausationID = string(header.V)
			}
		}
		causes[doc.About] = cause
	}
	return causes
}

func (k *kit) checkCauses(want map[string]event.Cause) {
	k.Helper()
	k.waitUntil("the events of the handlers", func(context.Context) bool { return len(k.readCauses()) == len(want) })
	if got := k.readCauses(); !maps.Equal(got, want) {
		k.Errorf("causes %+v\nwant %+v", got, want)
	}
}

func TestEventsOfAHandlerHaveTheCauseOfItsMessage(t *testing.T) {
	t.Parallel()
	for _, mode := range []consumer.Mode{consumer.Transactional, consumer.Claimed, consumer.AtLeastOnceInTransaction} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			box, err := outbox.New(k.db)
			if err != nil {
				t.Fatal(err)
			}
			in, err := inbox.New(k.db)
			if err != nil {
				t.Fatal(err)
			}
			first, later, foreign := newMessage("first", "ordered", "1"), newMessage("later", "ordered", "2"), newMessage("foreign", "ordered", "3")
			later.SetHeader(event.HeaderCorrelationID, []byte("conversation"))
			foreign.SetHeader("ce_correlationid", []byte("of CloudEvents"))
			k.publish(first, later, foreign)

			c := k.newConsumer(consumer.WithMode(mode))
			addHandler(t, c, "ordered", func(ctx context.Context, m *consumer.Message) error {
				effect := func(ctx context.Context) error {
					follow := func(id string, opts ...event.Option) event.Event {
						return event.New(event.Aggregate{Type: "parcel", ID: id + " of " + string(m.Key)}, "Packed", event.Payload{}, opts...)
					}
					return box.Append(ctx, follow("plain"), follow("own", event.WithCause(event.Cause{CorrelationID: "own", CausationID: "mine"})))
				}
				return in.Once(ctx, inbox.Key{Scope: "parcels", ID: string(m.Key)}, effect)
			})
			k.start(c)

			own := event.Cause{CorrelationID: "own", CausationID: "mine"}
			k.checkCauses(map[string]event.Cause{
				"plain of first":   {CorrelationID: "first/ordered/1", CausationID: "first/ordered/1"},
				"plain of later":   {CorrelationID: "conversation", CausationID: "later/ordered/2"},
				"plain of foreign": {CorrelationID: "of CloudEvents", CausationID: "foreign/ordered/3"},
				"own of first":     own, "own of later": own, "own of foreign": own,
			})
		})
	}
}

// The messages of a batch share what is the same for all of them.
func TestABatchHasTheCauseThatItsMessagesShare(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	box, err := outbox.New(k.db)
	if err != nil {
		t.Fatal(err)
	}
	messages := newMessages(1, 40)
	for _, m := range messages {
		m.SetHeader(event.HeaderCorrelationID, []byte("conversation"))
	}
	k.publish(messages...)

	c := k.newConsumer()
	batch := consumer.Batch(20, func(ctx context.Context, ms []*consumer.Message) error {
		kind := "one"
		if len(ms) > 1 {
			kind = "many"
		}
		last := ms[len(ms)-1]
		return box.Append(ctx, event.New(event.Aggregate{Type: "t", ID: kind + " up to " + last.ID}, "Counted", event.Payload{}),
			event.New(event.Aggregate{Type: "t", ID: "of " + last.ID}, "Counted", event.Payload{}, event.WithCause(last.Cause())))
	}, "counted")
	if err := c.Handle("batches", batch); err != nil {
		t.Fatal(err)
	}
	k.start(c)

	k.waitUntil("the last message", func(context.Context) bool {
		_, ok := k.readCauses()["of key00/counted/39"]
		return ok
	})
	causes, large := k.readCauses(), 0
	for about, cause := range causes {
		if cause.CorrelationID != "conversation" {
			t.Errorf("%s has the cause %+v", about, cause)
		}
		switch about[:3] {
		case "man":
			large++
			if cause.CausationID != "" {
				t.Errorf("a batch of several messages has the cause %+v", cause)
			}
		case "one":
			if want := about[len("one up to "):]; cause.CausationID != want {
				t.Errorf("%s has the cause %+v", about, cause)
			}
		case "of ":
			if cause.CausationID != about[3:] {
				t.Errorf("%s has the cause %+v", about, cause)
			}
		}
	}
	if large == 0 {
		t.Errorf("no batch had several messages: %+v", causes)
	}
}
