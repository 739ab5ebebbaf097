package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/inbox/mongostore"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

func TestEachEffectHappensOnceInTheOrderOfItsKey(t *testing.T) {
	t.Parallel()
	for mode, n := range map[consumer.Mode]int{consumer.Transactional: 100, consumer.Claimed: 20} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 2)
			k.publish(newMessages(10, n)...)
			// The producer sends all messages again.
			k.publish(newMessages(10, n)...)
			c := k.newConsumer(consumer.WithMode(mode))
			addHandler(t, c, "counted", k.insertInto("effects"))
			stop := k.start(c)

			k.waitCount("effects", n)
			k.waitUntil("all offsets", func(context.Context) bool { return sumOffsets(k.readCommitted(2)) == int64(2*n) })
			stop()
			k.checkOnce("effects", n)
		})
	}
}

func sumOffsets(offsets []int64) int64 {
	n := int64(0)
	for _, o := range offsets {
		n += max(o, 0)
	}
	return n
}

// A redelivery by Kafka: the offsets are lost and everything comes again.
func TestRedeliveryHasNoEffectAndIsCommitted(t *testing.T) {
	t.Parallel()
	k := newKit(t, 2)
	n := 100
	k.publish(newMessages(7, n)...)
	stats := &counts{}
	c := k.newConsumer(consumer.WithCommitInterval(-1), consumer.WithTelemetry(stats))
	addHandler(t, c, "counted", k.insertInto("effects"))

	// The first one never commits: its member is cut off from the group.
	ctx, cancel := context.WithCancel(t.Context())
	lost := k.newConsumer(consumer.WithCommitInterval(-1), consumer.WithTransport(uncommitted{k.kafka}))
	addHandler(t, lost, "counted", k.insertInto("effects"))
	done := make(chan error, 1)
	go func() { done <- lost.Run(ctx) }()
	k.waitCount("effects", n)
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if got := sumOffsets(k.readCommitted(2)); got != 0 {
		t.Fatalf("offsets %d were committed", got)
	}

	stop := k.start(c)
	// There are more duplicates if the group rebalances.
	k.waitUntil("duplicates", func(context.Context) bool { return stats.duplicates.Load() >= int64(n) })
	stop()

	if got := stats.handled.Load(); got != 0 {
		t.Errorf("%d were handled again", got)
	}
	k.checkOnce("effects", n)
	if got := sumOffsets(k.readCommitted(2)); got != int64(n) {
		t.Errorf("%d offsets were committed at the stop, of %d", got, n)
	}
}

// uncommitted loses all commits.
type uncommitted struct{ transport.Transport }

func (u uncommitted) Join(ctx context.Context, group string, topics []string, s transport.Session) error {
	return u.Transport.Join(ctx, group, topics, uncommittedSession{s})
}

type uncommittedSession struct{ transport.Session }

func (u uncommittedSession) Serve(ctx context.Context, g transport.Generation) error {
	return u.Session.Serve(ctx, uncommittedGeneration{g})
}

type uncommittedGeneration struct{ transport.Generation }

func (uncommittedGeneration) Commit(context.Context, map[transport.TopicPartition]transport.GroupOffset) error {
	return transport.ErrGenerationOver
}

// counts counts.
type counts struct {
	telemetry.Discard
	handled, duplicates, dropped, failed atomic.Int64
	held, maxHeld, heldBytes             atomic.Int64
	commits, assigned, unknown           atomic.Int64
	database                             atomic.Int64
}

func (c *counts) Measure(m telemetry.Measurement) {
	switch m.Metric {
	case telemetry.Handled:
		c.handled.Add(m.N)
	case telemetry.Duplicates:
		c.duplicates.Add(m.N)
	case telemetry.Discarded:
		c.dropped.Add(m.N)
	case telemetry.Unknown:
		c.unknown.Add(m.N)
	case telemetry.Failed:
		c.failed.Add(m.N)
	case telemetry.Assigned:
		c.assigned.Add(1)
	case telemetry.Committed:
		if m.Reason == "ok" {
			c.commits.Add(1)
		}
	case telemetry.Held:
		c.held.Store(m.N)
		c.maxHeld.Store(max(c.maxHeld.Load(), m.N))
	case telemetry.HeldBytes:
		c.heldBytes.Store(m.N)
	case telemetry.Suspended:
		if m.Reason == "database" {
			c.database.Add(m.N)
		}
	default:
		// No test reads the other figures.
	}
}

func TestKeysRunInParallelAndEachInOrder(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	keys := []string{}
	lanes := map[int32]bool{}
	for i := 0; len(keys) < 4; i++ {
		key := fmt.Sprint("k", i)
		if l := inbox.Lane([]byte(key), 0); !lanes[l] {
			lanes[l] = true
			keys = append(keys, key)
		}
	}

	for _, key := range keys {
		k.publish(newMessage(key, "counted", "0"), newMessage(key, "counted", "1"))
	}

	// in contains a function for each key. The function counts the key as running, once.
	in := map[string]func(){}
	var some sync.WaitGroup
	some.Add(len(keys))
	for _, key := range keys {
		in[key] = sync.OnceFunc(some.Done)
	}
	all := make(chan struct{})
	go func() { some.Wait(); close(all) }()

	var at sync.Map
	effects := k.insertInto("effects")
	c := k.newConsumer(consumer.WithConcurrency(4), consumer.WithMode(consumer.AtLeastOnce))
	addHandler(t, c, "*", func(ctx context.Context, m *consumer.Message) error {
		if _, there := at.LoadOrStore(string(m.Key), true); there {
			return fmt.Errorf("two of key %s at once", m.Key)
		}
		defer at.Delete(string(m.Key))

		if string(m.Value) == "0" {
			in[string(m.Key)]()
			// Each handler waits for all keys. If they ran one after another, the test would fail.
			select {
			case <-all:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return effects(ctx, m)
	}, withTries(1))

	k.start(c)
	k.waitCount("effects", 8)
	k.checkOnce("effects", 8)
}

func TestSeveralHandlersOfAMessageEachHaveAFateOfTheirOwn(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	dead := newDisposed()

	c := k.newConsumer(consumer.WithDisposer(dead), withTries(2))
	addHandler(t, c, "order.*", k.insertInto("first"))
	addHandlerAs(t, c, "all", "*", k.insertInto("second"))
	addHandlerAs(t, c, "bad", "order.placed", func(context.Context, *consumer.Message) error { return errWanted })
	addHandler(t, c, "other", k.insertInto("never"))

	k.publish(newMessage("a", "order.placed", "0"), newMessage("a", "order.paid", "1"))
	k.start(c)
	k.waitCount("first", 2)
	k.waitCount("second", 2)
	k.waitFor("the dead letter", dead.more)
	k.waitUntil("offsets", func(context.Context) bool { return sumOffsets(k.readCommitted(1)) == 2 })

	got := dead.listAll()
	if len(got) != 1 || got[0].handler != "bad" || got[0].verdict.Action != consumer.ActDeadLetter || !errors.Is(got[0].cause, errWanted) {
		t.Errorf("disposed: %+v", got)
	}
	if n := k.countDocuments("never"); n != 0 {
		t.Errorf("a handler of another type ran %d times", n)
	}
}

func TestOneFailingMessageOfABatchMeetsItsPolicyAlone(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	n := 50
	dead := newDisposed()
	c := k.newConsumer(consumer.WithDisposer(dead), withTries(3))

	var attempts atomic.Int64
	effects := k.insertInto("effects")
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		if err := effects(ctx, m); err != nil {
			return err
		}
		if string(m.Value) == "20" {
			attempts.Store(int64(m.Attempt))
			return errWanted
		}
		return nil
	})

	k.publish(newMessages(1, n)...)
	stop := k.start(c)
	k.waitCount("effects", n-1)
	k.waitUntil("offsets", func(context.Context) bool { return sumOffsets(k.readCommitted(1)) == int64(n) })
	stop()

	got := dead.listAll()
	if len(got) != 1 || string(got[0].m.Value) != "20" || attempts.Load() != 3 {
		t.Errorf("%d dead letters, %d attempts", len(got), attempts.Load())
	}
	if n := k.countDocuments("effects"); n != 49 {
		t.Errorf("%d effects", n)
	}
}

// The offset of a dead letter passes only after it was written.
func TestOffsetPassesAfterTheDeadLetterIsWritten(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	dead := newDisposed()
	dead.setError(errWanted)
	rejected := make(chan struct{}, 1000)
	c := k.newConsumer(consumer.WithDisposer(dead), withTries(1), consumer.WithErrorHook(func(_ context.Context, err error) {
		if errors.Is(err, errWanted) {
			rejected <- struct{}{}
		}
	}))

	addHandler(t, c, "bad", func(context.Context, *consumer.Message) error { return errors.New("broken") })
	addHandler(t, c, "counted", k.insertInto("effects"))
	k.publish(newMessage("a", "bad", "0"), newMessage("b", "counted", "0"))
	k.start(c)

	k.waitCount("effects", 1)
	for range 2 {
		k.waitFor("a rejected dead letter", rejected)
	}
	if got := k.readCommitted(1)[0]; got > 0 {
		t.Fatalf("offset %d was committed before the dead letter was written", got)
	}

	dead.setError(nil)
	k.waitFor("the dead letter", dead.more)
	k.waitUntil("offsets", func(context.Context) bool { return k.readCommitted(1)[0] == 2 })
}

func TestPanicIsAnErrorLikeOthers(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	dead := newDisposed()

	c := k.newConsumer(consumer.WithDisposer(dead), withTries(2))
	addHandler(t, c, "bad", func(context.Context, *consumer.Message) error { panic("at the disco") })
	addHandler(t, c, "counted", k.insertInto("effects"))

	k.publish(newMessage("a", "bad", "0"), newMessage("a", "counted", "0"))
	k.start(c)
	k.waitCount("effects", 1)
	k.waitFor("the dead letter", dead.more)

	var p *consumer.PanicError
	if got := dead.listAll(); !errors.As(got[0].cause, &p) || fmt.Sprint(p.Value) != "at the disco" || !strings.Contains(string(p.Stack), "consumer_test") {
		t.Errorf("cause: %v", got[0].cause)
	}
}

func TestUnknownTypeAndPoisonAreDeadLetters(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	dead := newDisposed()
	c := k.newConsumer(consumer.WithDisposer(dead))
	addHandler(t, c, "counted", k.insertInto("effects"))

	bad := newMessage("a", "counted", "x")
	bad.Headers = append(bad.Headers, event.Header{Key: "outrelay-delivery", Value: []byte("many")})
	k.publish(newMessage("a", "unknown.name", "1"), bad, newMessage("a", "counted", "0"))

	k.start(c)
	k.waitCount("effects", 1)
	k.waitFor("the first", dead.more)
	k.waitFor("the second", dead.more)
	k.waitUntil("offsets", func(context.Context) bool { return k.readCommitted(1)[0] == 3 })

	var parked, poison bool
	for _, d := range dead.listAll() {
		switch {
		case d.verdict.Reason == deadletter.ClassUnknown && errors.Is(d.cause, consumer.ErrNoHandler) && d.m.Name == "unknown.name" && d.handler == "":
			parked = true
		case d.verdict.Action == consumer.ActDeadLetter && errors.Is(d.cause, consumer.ErrMalformed) && string(d.m.Value) == "x":
			poison = true
		}
	}

	if !parked || !poison {
		t.Errorf("disposed: %+v", dead.listAll())
	}
}

func TestSkippedTypesPass(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	dead := newDisposed()
	stats := &counts{}
	c := k.newConsumer(consumer.WithDisposer(dead), consumer.WithTelemetry(stats), consumer.WithSkip("unknown.*"), consumer.WithSkip("known"))
	handled := make(chan string, 10)
	// A skipped type that has a handler is not skipped.
	addHandler(t, c, "known", func(_ context.Context, m *consumer.Message) error {
		handled <- m.Name
		return nil
	})
	k.publish(newMessage("a", "unknown.name", "1"), newMessage("a", "known", "2"), newMessage("a", "unknown", "3"))
	k.start(c)
	k.waitUntil("offsets", func(context.Context) bool { return k.readCommitted(1)[0] == 3 })

	discarded := map[string]bool{}
	for _, d := range dead.listAll() {
		discarded[d.m.Name] = d.verdict.Action == consumer.ActDiscard
	}
	if want := map[string]bool{"unknown.name": true, "unknown": false}; !maps.Equal(discarded, want) || len(handled) != 1 || stats.unknown.Load() != 2 {
		t.Errorf("discarded %v, want %v; handled %d, unknown %d", discarded, want, len(handled), stats.unknown.Load())
	}
	if _, err := consumer.New("g", k.db, consumer.WithBrokers("b:1"), consumer.WithTopics("t"), consumer.WithSkip("")); err == nil || !strings.Contains(err.Error(), "WithSkip") {
		t.Errorf("an empty name: %v", err)
	}
}

// Each message of such a type becomes a dead letter, and the type is reported once in a minute, with the fix.
func TestATypeWithoutAHandlerIsReportedOnce(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	var mu sync.Mutex
	var reports []string
	c := k.newConsumer(consumer.WithSkip("boring"), consumer.WithErrorHook(func(_ context.Context, err error) {
		if errors.Is(err, consumer.ErrNoHandler) {
			mu.Lock()
			defer mu.Unlock()
			reports = append(reports, err.Error())
		}
	}))
	addHandler(t, c, "known", nop)
	k.publish(newMessage("a", "stranger", "1"), newMessage("a", "stranger", "2"), newMessage("a", "boring", "3"), newMessage("b", "other", "4"))
	k.start(c)
	k.waitUntil("offsets", func(context.Context) bool { return k.readCommitted(1)[0] == 4 })

	mu.Lock()
	defer mu.Unlock()
	all := strings.Join(reports, " ")
	if len(reports) != 2 || !strings.Contains(all, `WithSkip("other")`) || !strings.Contains(all, `WithSkip("stranger")`) {
		t.Errorf("reports: %q", reports)
	}
	if n := k.countDocuments(deadletter.DefaultCollection); n != 3 {
		t.Errorf("%d dead letters, want 3", n)
	}
}

func TestTombstonesAndMissingIDs(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	got := make(chan *consumer.Message, 10)
	c := k.newConsumer()
	addHandler(t, c, "*", func(_ context.Context, m *consumer.Message) error {
		got <- m
		return nil
	}, consumer.WithSharedTransaction(1))

	k.publish(
		&consumer.Message{Key: []byte("a"), Headers: []event.Header{{Key: "id", Value: []byte("x")}}},
		&consumer.Message{Key: []byte("a"), Value: []byte{}},
	)
	k.start(c)

	var list []*consumer.Message
	for range 2 {
		select {
		case m := <-got:
			list = append(list, m)
		case <-k.context().Done():
			t.Fatal("no message")
		}
	}

	if m := list[0]; !m.Tombstone() || m.ID != "x" {
		t.Errorf("%+v", m)
	}
	if m := list[1]; m.Tombstone() || m.ID != fmt.Sprintf("%s/0/1@%d", k.topic, m.Time.UnixMilli()) || m.Attempt != 1 || m.Group != k.group {
		t.Errorf("%+v", m)
	}
}

// Events that a handler appends go to the outbox in its transaction: once for each message, and not at all for a failed
// attempt.
func TestEventsOfAHandlerLeaveWithItsEffect(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	box, err := outbox.New(k.db)
	if err != nil {
		t.Fatal(err)
	}

	k.newCollection("outbox")
	n := 20
	var failures atomic.Int64
	c := k.newConsumer(withTries(3))
	effects := k.insertInto("effects")
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		if err := errors.Join(effects(ctx, m), box.Append(ctx, event.New(event.Aggregate{Type: "response", ID: string(m.Key)}, "Answered", event.Document(bson.D{{Key: "to", Value: m.ID}})))); err != nil {
			return err
		}
		if string(m.Value) == "2" && failures.Add(1) < 3 {
			return errWanted
		}
		return nil
	})

	k.publish(newMessages(2, n)...)
	k.publish(newMessages(2, n)...)
	k.start(c)
	k.waitUntil("all offsets", func(context.Context) bool { return k.readCommitted(1)[0] == int64(2*n) })

	k.checkOnce("effects", n)
	if got := k.countDocuments("outbox"); got != n {
		t.Errorf("%d events of %d messages", got, n)
	}
}

// If one handler has marked a message, it is not marked for the other handler. A handler may query the inbox itself.
func TestAHandlerMayAskTheInboxForItsOwnMessage(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	x, err := mongostore.Open(k.db, inbox.Settings{})
	if err != nil {
		t.Fatal(err)
	}

	c := k.newConsumer(consumer.WithInbox(x))
	effects := k.insertInto("effects")
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		return x.Once(ctx, inbox.Entry{Key: inbox.Key{Consumer: k.group + "/counted", ID: m.ID}}, func(ctx context.Context) error { return effects(ctx, m) }, inbox.OnceConfig{})
	})

	k.publish(newMessages(1, 3)...)
	k.start(c)
	k.waitCount("effects", 3)
	k.checkOnce("effects", 3)
}
