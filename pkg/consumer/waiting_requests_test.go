package consumer_test

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/setasidetest"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// waitsForever is a Retry with which a message is set aside at once, and is not tried again during a test.
var waitsForever = consumer.Retry{Quick: []time.Duration{-1}, Min: time.Hour, Max: time.Hour}

func (k *kit) newWaitingDesk() *setaside.Desk {
	return setaside.NewDesk(k.db, setaside.DefaultCollection)
}

// requestRetry lets an operator retry the messages of a key.
func (k *kit) requestRetry(key string, want int64) {
	k.Helper()
	if n, err := k.newWaitingDesk().Retry(k.context(), setaside.Query{Group: k.group, Handler: "counted", Key: key}); n != want || err != nil {
		k.Fatalf("messages of key %s to retry: got %d (%v), want %d", key, n, err, want)
	}
}

func TestARetryThatAnOperatorRequestsIsMadeAtOnce(t *testing.T) {
	t.Parallel()
	for name, outage := range map[string]int{"running": 50, "suspended": 2} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			var attempts atomic.Int64
			var repaired atomic.Bool
			effects := k.insertInto("effects")
			retry := waitsForever
			retry.Outage = outage
			c := k.newConsumer(consumer.WithRetry(retry), consumer.WithConcurrency(1))
			addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
				attempts.Add(1)
				if !repaired.Load() {
					return errWanted
				}
				return effects(ctx, m)
			})
			k.publish(newMessages(2, 2)...)
			k.start(c)
			k.waitCount(setaside.DefaultCollection, 2)

			// An attempt that fails ends the request: there is one, and not one every two seconds.
			k.requestRetry("key00", 1)
			k.waitUntil("the third attempt", func(context.Context) bool { return attempts.Load() >= 3 })
			k.waitUntil("the end of the request", func(ctx context.Context) bool {
				list, err := setaside.New(k.db, setaside.DefaultCollection).Requested(ctx, k.group)
				return err == nil && len(list) == 0
			})
			if n := attempts.Load(); n != 3 {
				t.Errorf("attempts: got %d, want 3", n)
			}

			repaired.Store(true)
			k.requestRetry("key00", 1)
			k.waitCount("effects", 1)
			k.requestRetry("key01", 1)
			k.waitCount("effects", 2)
			k.untilNoneWaits()
			k.publish(newMessages(4, 4)...)
			k.waitUntil("new messages, because the handler goes on", func(context.Context) bool { return k.readCommitted(1)[0] == 6 })
		})
	}
}

func TestADiscardedMessageBecomesADeadLetterAndItsKeyGoesOn(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	effects := k.insertInto("effects")
	c := k.newConsumer(consumer.WithRetry(waitsForever))
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		if string(m.Value) == "0" {
			return errWanted
		}
		return effects(ctx, m)
	})
	k.publish(newMessages(1, 3)...)
	k.start(c)
	k.waitCount(setaside.DefaultCollection, 3)

	// A handler that no member has.
	gone := setasidetest.NewMessage("a", 0, 7, 1)
	gone.Place = setaside.Place{Handler: k.group + "/gone", Topic: k.topic}
	if err := setaside.New(k.db, setaside.DefaultCollection).Add(k.context(), time.Hour, gone); err != nil {
		t.Fatal(err)
	}
	if n, err := k.newWaitingDesk().Discard(k.context(), setaside.Query{Group: k.group, IDs: []string{k.topic + "/0@0", k.topic + "/0@7"}}, "ann"); n != 2 || err != nil {
		t.Fatalf("messages to discard: got %d (%v), want 2", n, err)
	}

	k.untilLetters(2)
	k.waitCount("effects", 2)
	k.untilNoneWaits()
	if got, want := k.readValues("effects"), []string{"1", "2"}; !slices.Equal(got, want) {
		t.Errorf("the handler got %q, want %q", got, want)
	}

	handlers := map[string]bool{}
	for letter, err := range k.newDesk().List(k.context(), deadletter.Query{Class: deadletter.ClassSkipped}) {
		if err != nil {
			t.Fatal(err)
		}
		handlers[letter.ID.Handler] = true
		if letter.Attempts != 1 || letter.ID.Topic != k.topic || !strings.HasPrefix(letter.Reason, "ann has discarded the message") {
			t.Errorf("unexpected letter %+v", letter)
		}
	}
	if len(handlers) != 2 || !handlers["gone"] || !handlers["counted"] {
		t.Errorf("handlers of the letters: got %v", handlers)
	}

	// The letter is requeued like others.
	k.requeue(deadletter.Query{Handler: "counted"}, deadletter.RequeueOptions{Edit: func(l *deadletter.Letter) error {
		l.Value = []byte("repaired")
		return nil
	}}, 1)
	k.waitCount("effects", 3)
}

// A stop waits for the message in progress, not for a queue that an operator has discarded, and no member loads such a queue at once.
func TestADiscardedQueueHoldsUpNoStop(t *testing.T) {
	t.Parallel()
	const n = 500
	var most atomic.Int64 // documents of the largest response
	countDocuments := options.Client().SetMonitor(&event.CommandMonitor{Succeeded: func(_ context.Context, e *event.CommandSucceededEvent) {
		var reply struct {
			Cursor struct {
				NS         string     `bson:"ns"`
				FirstBatch []bson.Raw `bson:"firstBatch"`
				NextBatch  []bson.Raw `bson:"nextBatch"`
			} `bson:"cursor"`
		}
		// Other replies have no cursor.
		if bson.Unmarshal(e.Reply, &reply) == nil && strings.HasSuffix(reply.Cursor.NS, "."+setaside.DefaultCollection) {
			read := int64(len(reply.Cursor.FirstBatch) + len(reply.Cursor.NextBatch))
			most.Store(max(most.Load(), read))
		}
	}})
	quiet := consumer.WithErrorHook(func(context.Context, error) {})
	k := newKit(t, 1)
	member := newKitOf(k, countDocuments)

	var list []*setaside.Message
	for i := range n {
		message := setasidetest.NewMessage("a", 0, int64(i), 1)
		message.Place = setaside.Place{Handler: k.group + "/counted", Topic: k.topic}
		message.ID = setaside.MessageID(message.Place, 0, message.Offset, "")
		list = append(list, message)
	}
	if err := setaside.New(k.db, setaside.DefaultCollection).Add(k.context(), time.Hour, list...); err != nil {
		t.Fatal(err)
	}
	if got, err := k.newWaitingDesk().Discard(k.context(), setaside.Query{Group: k.group}, "ann"); got != n || err != nil {
		t.Fatalf("messages to discard: got %d (%v), want %d", got, err, n)
	}

	// The room retries the queue as well, so it finds a suspended handler.
	c := member.newConsumer(quiet, consumer.WithRetry(waitsForever))
	addHandler(t, c, "counted", k.insertInto("effects"))
	c.PauseHandler("counted")
	stop := member.start(c)
	k.waitCount(deadletter.DefaultCollection, 1)
	stop()
	if letters := k.countDocuments(deadletter.DefaultCollection); letters > n/2 {
		t.Errorf("%d messages were given up before Run ended", letters)
	}

	again := member.newConsumer(quiet, consumer.WithRetry(waitsForever))
	addHandler(t, again, "counted", k.insertInto("effects"))
	member.start(again)
	k.untilNoneWaits()
	k.untilLetters(n)
	if most.Load() > 100 {
		t.Errorf("documents of one response: got %d, want at most 100", most.Load())
	}
}

// A message may be given up twice, for example after its offset was reset. Its notification exists then. The hook gets no message
// whose dead letter was rolled back.
func TestADiscardedMessageWhoseNotificationExistsIsGivenUp(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	box, err := outbox.New(k.db)
	if err != nil {
		t.Fatal(err)
	}
	var failures, calls atomic.Int64
	failing := consumer.Transactions(func(ctx context.Context, fn func(ctx context.Context) error) error {
		return box.Transaction(ctx, func(ctx context.Context) error {
			err := fn(ctx)
			if err == nil && failures.Add(-1) >= 0 {
				err = errFlaky
			}
			return err
		})
	})
	c := k.newConsumer(failing, consumer.WithDeadLetters(deadletter.WithNotification(box)), consumer.WithGivenUpHook(func(consumer.GivenUp) { calls.Add(1) }))
	addHandler(t, c, "counted", k.insertInto("effects"))
	k.publish(newMessages(1, 1)...)
	k.start(c)
	k.waitCount("effects", 1)

	discarded := setasidetest.NewMessage("a", 0, 7, 1)
	discarded.Place = setaside.Place{Handler: k.group + "/gone", Topic: k.topic}
	for round := range int64(2) {
		failures.Store(1)
		if err := setaside.New(k.db, setaside.DefaultCollection).Add(k.context(), time.Hour, discarded); err != nil {
			t.Fatal(err)
		}
		if n, err := k.newWaitingDesk().Discard(k.context(), setaside.Query{Group: k.group}, "ann"); n != 1 || err != nil {
			t.Fatalf("messages to discard: got %d (%v), want 1", n, err)
		}
		k.untilNoneWaits()
		k.waitUntil("the hook", func(context.Context) bool { return calls.Load() > round })
		if n := calls.Load(); n != round+1 {
			t.Errorf("calls of the hook after %d dead letters: got %d", round+1, n)
		}
	}
	if n := k.countDocuments("outbox"); n != 1 {
		t.Errorf("notifications: got %d, want 1", n)
	}
}
