package memory_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/memory"
	"github.com/outrelay/outrelay/internal/service/consuming"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
)

// exit is a consumer of one topic. Its handler fails for values that begin with "bad" and collects
// the others.
type exit struct {
	*world
	*consumer.Consumer
	topic string
	calls chan string
}

func newExit(t *testing.T, opts ...consumer.Option) *exit {
	t.Helper()
	w := newWorld(t)
	w.broker.CreateTopic("in", 1)
	e := &exit{world: w, topic: "in", calls: make(chan string, 10_000)}
	e.Consumer = e.newMember(w.inbox, opts...)
	return e
}

func (e *exit) newMember(x consuming.Inbox, opts ...consumer.Option) *consumer.Consumer {
	e.Helper()
	c, err := consumer.New("g", nil, append([]consumer.Option{
		consumer.WithTopics("in"), withSurroundings(consuming.Surroundings{Transport: e.broker, Inbox: x, Transact: e.db.Transaction}),
		consumer.WithCommitCount(1),
		consumer.WithErrorHook(func(_ context.Context, err error) {
			if e.Context().Err() == nil {
				e.Log(err)
			}
		}),
	}, opts...)...)
	e.mustSucceed(err)
	return c
}

func (e *exit) runMember(opts ...consumer.HandlerOption) {
	e.Helper()
	e.mustSucceed(e.Handle("h", consumer.Func(func(_ context.Context, m *consumer.Message) error {
		if strings.HasPrefix(string(m.Value), "bad") {
			return errors.New("bad message")
		}
		e.calls <- string(m.Value)
		return nil
	}, "A"), opts...))
	e.start("consumer", e.Run)
}

// put writes a record of type A with additional headers, given as names and values.
func (e *exit) put(topic, key, value string, headers ...string) {
	e.Helper()
	m := transport.Record{Key: []byte(key), Value: []byte(value), Headers: []event.Header{{Key: "type", Value: []byte("A")}}}
	for i := 0; i < len(headers); i += 2 {
		m.Headers = append(m.Headers, event.Header{Key: headers[i], Value: []byte(headers[i+1])})
	}
	e.mustSucceed(e.broker.Publish(e.context(), topic, []transport.Record{m}))
}

// waitPassed waits until all offsets of the topic are committed. It returns the handled values and the
// dead letters.
func (e *exit) waitPassed() (handled []string, letters []deadletter.Letter) {
	e.Helper()
	ctx, cancel := context.WithTimeout(e.Context(), 20*time.Second)
	defer cancel()
	e.mustSucceed(e.broker.AwaitCommitted(ctx, "g", e.topic))
	for {
		select {
		case v := <-e.calls:
			handled = append(handled, v)
		default:
			return handled, e.listLetters()
		}
	}
}

// noQuick moves a failed message to a retry topic at once.
var noQuick = consumer.WithRetry(consumer.Retry{Quick: []time.Duration{-1}})

var toLetters = consumer.WithRetry(consumer.NoRetry())

func TestALongIdentityDoesNotBlockItsPartition(t *testing.T) {
	t.Parallel()
	e := newExit(t, toLetters)
	long := strings.Repeat("x", 1100)
	e.put("in", "k", "long id", "id", long)
	e.put("in", "k", "long namespace", "id", "1", "outrelay-ns", long[:600])
	e.put("in", "k", "long key", "id", "2", consumer.HeaderDedupKey, long)
	e.put("in", "k", "long key again", "id", "3", consumer.HeaderDedupKey, long)
	e.put("in", "k", "long source", "ce_id", "4", "ce_source", long, "ce_specversion", "1.0")
	e.put("in", "k", "good", "id", "5")
	e.runMember()
	handled, letters := e.waitPassed()
	if got := strings.Join(handled, ", "); got != "long key, long source, good" {
		t.Errorf("handled: %s", got)
	}

	if len(letters) != 2 {
		t.Fatalf("%d letters", len(letters))
	}

	for _, l := range letters {
		if l.Class != deadletter.ClassMalformed || !strings.Contains(l.Reason, "at most 1024") || len(l.ID.Message) > 100 || len(l.Reason) > 500 {
			t.Errorf("letter %s: class %s, %s", l.ID, l.Class, l.Reason)
		}
	}
}

// The outbox rejects events that are too long or too large.
func TestAFaultEventThatIsNotLegalDoesNotBlockItsPartition(t *testing.T) {
	t.Parallel()
	e := newExit(t)
	e.Consumer = e.newMember(e.inbox, toLetters, consumer.WithDeadLetters(deadletter.WithNotification(e.box)))
	typ := strings.Repeat("T", 4101)
	e.mustSucceed(e.Handle(typ, consumer.Func(func(context.Context, *consumer.Message) error { return errors.New("no") }, typ)))
	m := transport.Record{Key: []byte("k"), Value: []byte("x"), Headers: []event.Header{{Key: "type", Value: []byte(typ)}, {Key: "id", Value: []byte("1")}}}
	e.mustSucceed(e.broker.Publish(e.context(), "in", []transport.Record{m}))
	e.put("in", strings.Repeat("k", 5000), "bad key", "id", "2")
	e.put("in", "k", "bad"+strings.Repeat("x", 700_000), "id", "3")
	e.put("in", "k", "bad", "id", strings.Repeat("i", 1010))
	e.put("in", "k", "good", "id", "5")
	e.runMember()
	handled, letters := e.waitPassed()
	if len(handled) != 1 || len(letters) != 4 {
		t.Errorf("handled %q, %d letters", handled, len(letters))
	}

	notified, err := e.broker.Await(e.context(), "outbox.event."+deadletter.Notified.Aggregate, 4)
	e.mustSucceed(err)
	if len(notified) != 4 {
		t.Errorf("%d notifications, want 4", len(notified))
	}
}

func TestARedactorThatFailsDoesNotBlockItsPartition(t *testing.T) {
	t.Parallel()
	e := newExit(t, toLetters, consumer.WithDeadLetters(deadletter.WithRedaction(func(_ context.Context, l *deadletter.Letter) error {
		switch string(l.Value) {
		case "bad panic":
			panic("in a redactor")
		case "bad error":
			return errors.New("the redactor fails")
		}
		return nil
	})))

	e.put("in", "secret key", "bad panic", "id", "1", "secret", "header")
	e.put("in", "secret key", "bad error", "id", "2", "secret", "header")
	e.put("in", "k", "bad", "id", "3")
	e.put("in", "k", "good", "id", "4")
	e.runMember()
	handled, letters := e.waitPassed()
	if len(handled) != 1 || len(letters) != 3 {
		t.Fatalf("handled %q, %d letters", handled, len(letters))
	}

	// A letter contains no part that the redactor has not processed.
	for _, l := range letters[:2] {
		if l.Key != nil || l.Value != nil || l.Headers != nil || l.History != nil || !strings.Contains(l.Reason, "the record is at in/0@") || l.Class != deadletter.ClassHandler {
			t.Errorf("%+v", l)
		}
	}

	if string(letters[2].Value) != "bad" {
		t.Errorf("%+v", letters[2])
	}
}

func TestARetryTopicThatCannotBeIsADeadLetter(t *testing.T) {
	t.Parallel()
	e := newExit(t)
	e.broker.Inject(func(topic string, _ *transport.Record) memory.Fault {
		if strings.HasPrefix(topic, "in.g.retry") {
			return memory.Fault{Err: fmt.Errorf("in.g.retry.1: %w", kafka.MessageSizeTooLarge)}
		}
		return memory.Fault{}
	})

	e.put("in", "k", "bad", "id", "1")
	e.put("in", "k", "good", "id", "2")
	e.runMember(noQuick, consumer.WithRetryTopics(time.Second))
	if handled, letters := e.waitPassed(); len(handled) != 1 || len(letters) != 1 {
		t.Errorf("handled %q, %d letters", handled, len(letters))
	}
}

// A writer of the topic can neither block a lane, nor remove the retries of a message, nor redirect
// them.
func TestControlHeadersOfStrangersAreIgnored(t *testing.T) {
	t.Parallel()
	never := "9999999999999"
	for name, headers := range map[string][]string{
		"due, by its old name":        {"retry-due", never},
		"due":                         {record.HeaderRetryDue, never},
		"due of the handler":          {record.HeaderRetryDue, never, record.HeaderOnly, "g/h"},
		"deadline of another meaning": {"deliver-by", "2020-01-01T00:00:00Z"},
		"expiry of no CloudEvent":     {"ce_expirytime", "2020-01-01T00:00:00Z"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newExit(t)
			e.put("in", "k", "held", append([]string{"id", "1"}, headers...)...)
			e.put("in", "k", "good", "id", "2")
			e.runMember()
			if handled, letters := e.waitPassed(); len(handled) != 2 || len(letters) != 0 {
				t.Errorf("handled %q, letters %+v", handled, letters)
			}
		})
	}

	for name, headers := range map[string][]string{
		"origin, by its old name": {"retry-origin", "secret/0/0"},
		"origin":                  {record.HeaderRetryOrigin, "secret/0/0"},
		"origin of the handler":   {record.HeaderRetryOrigin, "secret/0/0", record.HeaderOnly, "g/h"},
		"attempt":                 {record.HeaderAttempt, "9223372036854775807"},
		"kept headers":            {"retry-keep-outrelay-retry-origin", "secret/0/0", "retry-keep-id", "another"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newExit(t)
			e.put("in", "k", "bad", append([]string{"id", "1"}, headers...)...)
			e.put("in", "k", "good", "id", "2")
			e.runMember(noQuick, consumer.WithRetryTopics(10*time.Millisecond))
			e.waitPassed()
			e.topic = "in.g.retry.1"
			e.waitPassed()
			letters := e.listLetters()
			if len(letters) != 1 || letters[0].ID.Topic != "in" || letters[0].Attempts != 2 || letters[0].ID.Message != "1" {
				t.Errorf("letters %+v", letters)
			}

			if topics := strings.Join(e.broker.Topics(), " "); strings.Contains(topics, "secret") {
				t.Errorf("topics %s", topics)
			}
		})
	}
}

// A due time that is later than any policy allows is ignored.
func TestARetryIsNotHeldForever(t *testing.T) {
	t.Parallel()
	e := newExit(t, noQuick, consumer.WithRetryTopics(time.Second))
	e.broker.CreateTopic("in.g.retry.1", 1)
	e.put("in.g.retry.1", "k", "held", "id", "1", record.HeaderOnly, "g/h", record.HeaderRetryDue, "9999999999999", record.HeaderRetryOrigin, "in/0/0")
	e.topic = "in.g.retry.1"
	e.runMember()
	if handled, _ := e.waitPassed(); len(handled) != 1 {
		t.Errorf("handled %q", handled)
	}
}

// If a handler was renamed, or exists only in newer members, its retries are kept although other
// unknown messages are skipped.
func TestRetriesOfAnotherHandlerAreKept(t *testing.T) {
	t.Parallel()
	e := newExit(t, consumer.WithSkip("unknown"))
	e.put("in", "k", "retry", "id", "1", record.HeaderOnly, "g/old")
	e.put("in", "k", "foreign", "id", "2", record.HeaderOnly, "another/h")
	m := transport.Record{Key: []byte("k"), Headers: []event.Header{{Key: "type", Value: []byte("unknown")}, {Key: "id", Value: []byte("3")}}}
	e.mustSucceed(e.broker.Publish(e.context(), "in", []transport.Record{m}))
	e.runMember()
	_, letters := e.waitPassed()
	if len(letters) != 1 || letters[0].ID.Handler != "old" || letters[0].Class != deadletter.ClassUnknown {
		t.Errorf("letters %+v", letters)
	}
}

// CloudEvents are unique by source and id.
func TestEventsOfTwoSourcesWithEqualIDsHaveTheirEffects(t *testing.T) {
	t.Parallel()
	e := newExit(t)
	for _, source := range []string{"/a", "/b", "/a"} {
		e.put("in", "k", "binary", "ce_id", "1", "ce_source", source, "ce_specversion", "1.0")
		e.put("in", "k", fmt.Sprintf(`{"specversion":"1.0","id":"2","source":%q,"type":"A","data":"structured"}`, source), "content-type", "application/cloudevents+json")
	}

	e.runMember()
	if handled, letters := e.waitPassed(); len(handled) != 4 || len(letters) != 0 {
		t.Errorf("handled %q, letters %+v", handled, letters)
	}
}

// The mode AtLeastOnce runs the handler for every delivery and stores nothing.
func TestAtLeastOnceStoresNothing(t *testing.T) {
	t.Parallel()
	e := newExit(t, consumer.WithMode(consumer.AtLeastOnce))
	for range 2 {
		e.put("in", "k", "x", "id", "1", "type", "A")
	}

	e.runMember()
	if handled, letters := e.waitPassed(); len(handled) != 2 || len(letters) != 0 {
		t.Errorf("handled %q, letters %+v", handled, letters)
	}
	if n, err := e.inbox.Counts(e.context()); n.Markers != 0 || err != nil {
		t.Errorf("%d markers, %v", n.Markers, err)
	}
}

// crashing is an inbox whose process dies once, after a message was moved and before its watermark
// moves.
type crashing struct {
	*memory.Inbox
	dies func()
}

func (x *crashing) Pass(context.Context, []inbox.Entry) error {
	x.dies()
	return errors.New("the process dies here")
}

// A record without an id that was moved, and is read again after a crash, has its effect once,
// because the copy contains its place.
func TestARecordWithoutAnIDHasItsEffectOnceWhereverItIsMoved(t *testing.T) {
	t.Parallel()
	e := newExit(t)
	e.broker.CreateTopic("in.g.retry.1", 1)
	died, effects := make(chan struct{}), make(chan string, 100)
	policy := consumer.WithRetryTopics(10 * time.Millisecond)
	member := func(x consuming.Inbox, fails bool) *consumer.Consumer {
		c := e.newMember(x, noQuick, policy)
		e.mustSucceed(c.Handle("h", consumer.Func(func(_ context.Context, m *consumer.Message) error {
			if fails {
				return errors.New("not yet")
			}

			effects <- m.Topic
			return nil
		}, "A")))

		return c
	}

	e.put("in", "k", "x")
	dies := sync.OnceFunc(func() { close(died) })
	stop := e.start("dying", member(&crashing{e.inbox, dies}, true).Run)
	<-died
	stop()
	next, err := memory.NewInbox(e.db)
	e.mustSucceed(err)
	e.start("next", member(next, false).Run)
	e.waitPassed()
	e.topic = "in.g.retry.1"
	e.waitPassed()
	if len(effects) != 1 {
		t.Errorf("%d effects", len(effects))
	}
}
