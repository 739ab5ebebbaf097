package consumer_test

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/memory"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/consumer/topics"
)

// troubled is the surroundings of a consumer, in memory. The parts that have an error fail.
type troubled struct {
	*changing
	*memory.Inbox
	waiting setaside.Store

	fault   error // of the transport
	publish error
	attach  error
	pass    error

	add, first, requested, discarded error
	requests                         []setaside.Request

	opts    []consumer.Option
	handler consumer.HandlerFunc
	started func(c *consumer.Consumer)
}

func (x *troubled) Waiting() setaside.Store { return troubledStore{x.waiting, x} }

func (x *troubled) Attach(ctx context.Context, name, topic string, number int32, log inbox.Log) (inbox.Generation, error) {
	if x.attach != nil {
		return inbox.Generation{}, x.attach
	}
	return x.Inbox.Attach(ctx, name, topic, number, log)
}

func (x *troubled) Pass(ctx context.Context, list []inbox.Entry) error {
	if x.pass != nil {
		return x.pass
	}
	return x.Inbox.Pass(ctx, list)
}

// Join reports the fault before it joins.
func (x *troubled) Join(ctx context.Context, group string, topics []string, session transport.Session) error {
	if x.fault != nil {
		session.Fault(x.fault)
	}
	return session.Serve(ctx, x.changing)
}

func (x *troubled) Publish(context.Context, string, []transport.Record) error { return x.publish }

// troubledStore is the store of x for messages that are set aside.
type troubledStore struct {
	setaside.Store
	x *troubled
}

func (s troubledStore) Add(ctx context.Context, wait time.Duration, messages ...*setaside.Message) error {
	if s.x.add != nil {
		return s.x.add
	}
	return s.Store.Add(ctx, wait, messages...)
}

func (s troubledStore) First(ctx context.Context, place setaside.Place, queue setaside.Digest) (*setaside.Message, error) {
	if s.x.first != nil {
		return nil, s.x.first
	}
	return s.Store.First(ctx, place, queue)
}

func (s troubledStore) Requested(context.Context, string) ([]setaside.Request, error) {
	return s.x.requests, s.x.requested
}

func (s troubledStore) Discarded(context.Context, setaside.Queue) ([]setaside.Message, error) {
	return nil, s.x.discarded
}

// setAside lets the first attempt fail, and the second one follow soon.
func (x *troubled) setAside() {
	x.handler = func(context.Context, *consumer.Message) error { return errWanted }
	x.opts = append(x.opts, consumer.WithRetry(consumer.Retry{Quick: []time.Duration{-1}, Min: time.Millisecond, Max: time.Millisecond}))
}

// giveUp lets the handler give up each message.
func (x *troubled) giveUp() {
	x.handler = func(context.Context, *consumer.Message) error { return consumer.Reject(errWanted) }
}

// newUnreachableList returns a list of topics in a database that does not respond.
func newUnreachableList(t *testing.T) *topics.List {
	t.Helper()
	client, err := mongo.Connect(options.Client().ApplyURI("mongodb://127.0.0.1:1/").SetServerSelectionTimeout(10 * time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Disconnect(context.Background()) })
	list, err := topics.New(client.Database("unreachable"), "group")
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// Each kind of trouble has another line, with the place as attributes. No line promises that something is tried again that is not.
func TestEachTroubleHasALineOfItsOwn(t *testing.T) {
	t.Parallel()
	place := map[string]any{"topic": "log", "partition": 0.0}
	ofHandler := map[string]any{"topic": "log", "partition": 0.0, "handler": "counted"}
	ofLetter := map[string]any{"topic": "log", "partition": 0.0, "offset": 0.0, "handler": "counted"}

	for name, c := range map[string]struct {
		prepare func(t *testing.T, x *troubled)
		message string
		attrs   map[string]any
	}{
		"records that retention has removed": {func(_ *testing.T, x *troubled) {
			x.append("a")
			x.append("a")
			x.retain(1)
		}, "records are missing in the partition; the consumer goes on after them", map[string]any{"topic": "log", "partition": 0.0, "offset": 0.0, "next": 1.0}},
		"a position that cannot be found": {
			func(_ *testing.T, x *troubled) { x.noLog = errWanted },
			"cannot find the position of the group; the partition waits", place,
		},
		"an inbox with another process": {
			func(_ *testing.T, x *troubled) { x.attach = inbox.ErrStale },
			"cannot use the messages in memory: another run of a member has begun with the partition; they are fetched again", ofHandler,
		},
		"a span that panics at its end": {
			func(_ *testing.T, x *troubled) { x.opts = append(x.opts, consumer.WithTelemetry(panicking{})) },
			"cannot end the span of an attempt; the outcome of the attempt counts", ofHandler,
		},
		"a decoder that is away": {func(_ *testing.T, x *troubled) {
			x.opts = append(x.opts, consumer.WithDecoder(func(context.Context, *consumer.Message) error { return codec.ErrUnavailable }))
		}, "cannot use the decoder; the partition reads nothing further", place},

		"a letter that is not stored": {func(_ *testing.T, x *troubled) {
			gone := newDisposed()
			gone.setError(errWanted)
			x.opts = append(x.opts, consumer.WithDisposer(gone))
			x.giveUp()
		}, "cannot move a message that was given up or waits for its retry; it is tried again", ofHandler},
		"a watermark that does not move": {
			func(_ *testing.T, x *troubled) { x.pass = errWanted; x.giveUp() },
			"cannot record in the inbox that a message was moved; it is tried again", ofHandler,
		},
		"a place without a watermark": {
			func(_ *testing.T, x *troubled) { x.pass = inbox.ErrInvalid; x.giveUp() },
			"cannot record in the inbox that a message was moved; its offset passes", ofHandler,
		},
		"a letter whose topic may not be written": {func(_ *testing.T, x *troubled) {
			x.publish = kafkawire.TopicAuthorizationFailed
			x.opts = append(x.opts, consumer.WithDeadLetters(deadletter.WithTopic("")))
			x.giveUp()
		}, "cannot copy the dead letter to its topic; it is stored without the copy", ofLetter},
		"a letter without its content": {func(_ *testing.T, x *troubled) {
			x.opts = append(x.opts, consumer.WithDeadLetters(deadletter.WithRedaction(func(context.Context, *deadletter.Letter) error { return errWanted })))
			x.giveUp()
		}, "cannot keep the content of the dead letter, or its notification; the letter is stored", ofLetter},

		"a message that cannot be set aside": {
			func(_ *testing.T, x *troubled) { x.add = errWanted; x.setAside() },
			"cannot set a message aside; it is tried again", ofHandler,
		},
		"a retry that cannot be read": {
			func(_ *testing.T, x *troubled) { x.first = errWanted; x.setAside() },
			"cannot read a message that is set aside; it is read again", ofHandler,
		},
		"requests that cannot be read": {
			func(_ *testing.T, x *troubled) { x.requested = errWanted },
			"cannot read the requests of operators; they are read again", nil,
		},
		"a discard that cannot be read": {func(_ *testing.T, x *troubled) {
			x.discarded = errWanted
			x.requests = []setaside.Request{{Queue: setaside.Queue{Place: setaside.Place{Handler: "group/counted", Topic: "log"}}, Discards: 1}}
		}, "cannot read the messages that an operator discarded; they are read again", place},
		"a list of topics that cannot be read": {func(t *testing.T, x *troubled) {
			t.Helper()
			x.opts = append(x.opts, consumer.WithTopicList(newUnreachableList(t)))
		}, "cannot read the list of topics; it is read again", nil},

		"missing topics": {
			func(_ *testing.T, x *troubled) { x.fault = &transport.MissingTopicsError{Topics: []string{"missing"}} },
			"waiting for topics: they do not exist yet, or the Kafka login may not read them",
			map[string]any{"topics": []any{"missing"}},
		},
		"unused retry topics": {
			func(_ *testing.T, x *troubled) { x.fault = &transport.UnusedTopicsError{Topics: []string{"unused"}} },
			"no handler uses these retry topics; they are read until they are deleted",
			map[string]any{"topics": []any{"unused"}},
		},
		"another fault of Kafka": {
			func(_ *testing.T, x *troubled) { x.fault = errWanted },
			"a request to Kafka failed; it is repeated", nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := memory.NewDB()
			box, err := memory.NewInbox(db)
			if err != nil {
				t.Fatal(err)
			}
			x := &troubled{changing: &changing{}, Inbox: box, waiting: box.Waiting(), handler: nop}
			c.prepare(t, x)

			book := &logbook{}
			cons, err := consumer.New("group", nil, append([]consumer.Option{
				consumer.WithTransport(x), consumer.WithTopics("log"), consumer.WithCommitCount(1), consumer.WithInbox(x),
				consumer.Transactions(db.Transaction), consumer.WithLogger(slog.New(slog.NewJSONHandler(book, nil))),
			}, x.opts...)...)
			if err != nil {
				t.Fatal(err)
			}
			addHandler(t, cons, "counted", x.handler)
			x.append("a")
			startConsumer(t, cons)
			if x.started != nil {
				x.started(cons)
			}

			stacktest.Eventually(t, "the line", func() bool { return book.find(t, c.message) != nil }, func() any { return book.read() })
			line := book.find(t, c.message)
			for field, want := range c.attrs {
				if fmt.Sprint(line[field]) != fmt.Sprint(want) {
					t.Errorf("%s: got %v, want %v in %v", field, line[field], want, line)
				}
			}
			if line["level"] != "WARN" || line["msg"] != c.message || line["group"] != "group" {
				t.Errorf("line: got %v", line)
			}
		})
	}
}

// A message that becomes a dead letter because no handler takes its type is a line at Error, like other dead letters: the first one of
// a type at once, and later ones as one line a minute.
func TestALetterOfAnUnknownTypeIsALineAtError(t *testing.T) {
	t.Parallel()
	log, book, gone := &changing{}, &logbook{}, newDisposed()
	for range 3 {
		log.append("a")
	}
	c := newLogConsumer(t, log, consumer.WithDisposer(gone), consumer.WithErrorHook(nil), consumer.WithLogger(slog.New(slog.NewJSONHandler(book, nil))))
	addHandler(t, c, "another", nop)
	startConsumer(t, c)
	log.waitCommitted(t, 3)

	const message = "message is given up; it is a dead letter now"
	line := book.find(t, message)
	for field, want := range map[string]any{
		"level": "ERROR", "group": "group", "topic": "log", "partition": 0.0, "offset": 0.0, "type": "counted", "class": "unknown", "letters": 1.0,
	} {
		if line[field] != want {
			t.Errorf("%s: got %v, want %v in %v", field, line[field], want, line)
		}
	}
	if n := book.count(t, message); n != 1 || len(gone.listAll()) != 3 {
		t.Errorf("%d lines for %d letters, want 1 for 3", n, len(gone.listAll()))
	}
}
