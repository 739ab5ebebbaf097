package saga_test

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/consuming"
	"github.com/outrelay/outrelay/internal/service/sagas"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/internal/service/transport/kafkago"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/saga"
)

// patience returns the time limit for a test on a busy machine.
func patience() time.Duration { return 3*time.Minute + time.Duration(*load)*50*time.Millisecond }

// node is a member of the group: a consumer with two sagas and a plain handler for the same
// messages.
type node struct {
	*testing.T
	consumer *consumer.Consumer
	stop     func()
}

// newSteps defines a saga that relies on the consumer for order and for handling each message once.
func newSteps(name string, last int) *saga.Saga[ledger] {
	s := saga.Define[ledger](name, saga.WithIDs(saga.Int32IDs), saga.WithTombstone(time.Hour))
	saga.StartOrOn(s, newType[int64]("Step"), func(_ context.Context, in *saga.Instance[ledger], n int64) error {
		in.State.Steps = append(in.State.Steps, n)
		in.Emit(event.New(event.Aggregate{Type: name, ID: in.ID()}, "Stepped", event.Bytes("text/plain", in.Message().Value)))
		if int(n) == last {
			in.Complete()
		}

		return nil
	})

	return s
}

func newNode(t *testing.T, db, topic, group string, last int) *node {
	t.Helper()
	p := placeIn(t, stacktest.Client(t).Database(db))
	kafka, err := kafkago.New(transport.Config{
		Brokers: stacktest.Brokers(t), SessionTimeout: 20 * time.Second, HeartbeatInterval: 100 * time.Millisecond,
		RebalanceTimeout: 20 * time.Second, JoinBackoff: 100 * time.Millisecond, MaxWait: 100 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	c, err := consumer.New(group, p.db, consumer.WithTopics(topic), consumer.WithMode(consumer.Transactional),
		consumer.WithCommitInterval(50*time.Millisecond),
		consumer.WithErrorHook(func(_ context.Context, err error) {
			if t.Context().Err() == nil {
				t.Log(err)
			}
		}),
		consumer.WithSurroundings(consuming.Surroundings{Transport: kafka}))
	if err != nil {
		t.Fatal(err)
	}

	for _, err := range []error{
		c.Handle("ledgers", handlerOf(t, newSteps("ledgers", last), p.box)),
		c.Handle("copies", handlerOf(t, newSteps("copies", last), p.box)),
		c.Handle("plain", consumer.Func(func(ctx context.Context, m *consumer.Message) error {
			_, err := p.db.Collection("plain").InsertOne(ctx, bson.D{{Key: "message", Value: m.ID}})
			return err
		}, "Step")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}

	return &node{T: t, consumer: c}
}

// start runs the node until it is stopped, or until the test ends.
func (n *node) start() {
	ctx, cancel := context.WithCancel(context.WithoutCancel(n.Context()))
	done := make(chan error, 1)
	go func() { done <- n.consumer.Run(ctx) }()
	n.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				n.Errorf("Run: %v", err)
			}
		case <-time.After(patience()):
			n.Error("Run does not end")
		}
	})

	n.Cleanup(n.stop)
}

// The partitions of the topic move between the two members of a group. Every saga and every handler
// handles every message once, in the order of its key, although each was published twice.
func TestAGroupTakesEveryStepOnceInOrder(t *testing.T) {
	t.Parallel()
	perSaga, sagas := chooseSize()
	p := newPlace(t)
	topic, group := stacktest.Topic(t, 4), stacktest.Name(t)
	publisher, err := kafkago.New(transport.Config{Brokers: stacktest.Brokers(t)})
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(publisher.Close)
	publish := func(from, to int) {
		t.Helper()
		var ms []transport.Record
		for n := from; n <= to; n++ {
			for id := range sagas {
				text, number := strconv.Itoa(id), strconv.Itoa(n)
				ms = append(ms, transport.Record{Key: []byte(text), Value: []byte(number), Headers: []event.Header{
					{Key: "id", Value: []byte(text + "-" + number)}, {Key: "type", Value: []byte("Step")}, {Key: saga.HeaderID, Value: []byte(text)},
				}})
			}
		}

		for range 2 {
			if err := publisher.Publish(t.Context(), topic, ms); err != nil {
				t.Fatal(err)
			}
		}
	}

	count := func(collection string, filter bson.D) int {
		t.Helper()
		n, err := p.db.Collection(collection).CountDocuments(t.Context(), filter)
		if err != nil {
			t.Fatal(err)
		}

		return int(n)
	}

	first, second := newNode(t, p.db.Name(), topic, group, perSaga), newNode(t, p.db.Name(), topic, group, perSaga)
	publish(1, perSaga/2)
	began := time.Now()
	first.start()
	stacktest.Eventually(t, "the first node begins", func() bool { return count("ledgers", bson.D{}) > 0 })
	second.start()
	publish(perSaga/2+1, perSaga)
	stacktest.Eventually(t, "half of all is done", func() bool { return count("plain", bson.D{}) >= sagas*perSaga/2 })
	first.stop()
	done := bson.D{{Key: "completedAt", Value: bson.D{{Key: "$exists", Value: true}}}}
	stacktest.Eventually(t, "all is done", func() bool {
		return count("ledgers", done) == sagas && count("copies", done) == sagas && count("plain", bson.D{}) == sagas*perSaga
	})
	t.Logf("%d steps of %d sagas, twice over, on two nodes in %s", sagas*perSaga, sagas, time.Since(began).Round(time.Millisecond))
	second.stop()

	envelopes, err := p.listEnvelopes(t.Context())
	if err != nil || len(envelopes) != 2*sagas*perSaga {
		t.Errorf("%d events of %d steps of two sagas, %v", len(envelopes), sagas*perSaga, err)
	}

	next := map[string]int{}
	for _, e := range envelopes {
		key := e.Lookup("aggregatetype").StringValue() + e.Lookup("aggregateid").StringValue()
		next[key]++
		if n := e.Lookup("payload").StringValue(); strconv.Itoa(next[key]) != n {
			t.Fatalf("step %s of %s comes as number %d", n, key, next[key])
		}
	}

	if n := count("plain", bson.D{}); n != sagas*perSaga {
		t.Errorf("the plain handler has run %d times, want %d", n, sagas*perSaga)
	}
}

// The label of the server makes the consumer's transaction start again.
func TestAConflictHasTheLabelOfTheServer(t *testing.T) {
	t.Parallel()
	labelled := mongo.CommandError{Code: 112, Labels: []string{"TransientTransactionError"}}
	err := sagas.NewConflict("s", sagas.Record{ID: "a"}, labelled)
	if e, ok := errors.AsType[mongo.LabeledError](err); !ok || !e.HasErrorLabel("TransientTransactionError") || !errors.Is(err, saga.ErrConflict) {
		t.Errorf("%v is not transient", err)
	}
}
