package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

var errAway = errors.New("the carrier does not respond")

// soon is a Retry with short waits and without attempts in place.
var soon = consumer.Retry{Quick: []time.Duration{-1}, Min: 50 * time.Millisecond, Max: 200 * time.Millisecond}

// dependent is a handler that needs another service. It fails while the service is away.
type dependent struct {
	away     atomic.Bool
	attempts atomic.Int64
	next     consumer.HandlerFunc
}

func (d *dependent) Handle(ctx context.Context, m *consumer.Message) error {
	d.attempts.Add(1)
	if d.away.Load() {
		return errAway
	}
	return d.next(ctx, m)
}

// suspensions counts the reports of suspensions.
type suspensions struct{ began, over atomic.Int64 }

func (s *suspensions) hookOption(k *kit) consumer.Option {
	return consumer.WithErrorHook(func(_ context.Context, err error) {
		if e, ok := errors.AsType[*consumer.SuspendedError](err); ok {
			if e.Over {
				s.over.Add(1)
			} else {
				s.began.Add(1)
			}
			k.logError(err)
		}
	})
}

// untilSettled waits until no message is set aside and all offsets are committed, and checks that there is no dead letter.
func (k *kit) untilSettled(partitions, n int) {
	k.Helper()
	k.waitUntil("no message to be set aside", func(ctx context.Context) bool {
		left, err := k.db.Collection(setaside.DefaultCollection).CountDocuments(ctx, bson.D{})
		return err == nil && left == 0
	})
	k.waitUntil("all offsets", func(context.Context) bool { return sumOffsets(k.readCommitted(partitions)) == int64(n) })
	if got := k.countDocuments(deadletter.DefaultCollection); got != 0 {
		k.Errorf("dead letters: got %d, want none", got)
	}
}

func TestAnOutageOfAnotherServiceSlowsTheConsumerDownAndMakesNoDeadLetter(t *testing.T) {
	t.Parallel()
	k := newKit(t, 2)
	const keys, n = 60, 180
	slow := soon
	slow.Outage = 5
	d := &dependent{next: k.insertInto("effects")}
	d.away.Store(true)
	s := &suspensions{}
	c := k.newConsumer(consumer.WithRetry(slow), s.hookOption(k), consumer.WithConcurrency(8))
	if err := c.Handle("counted", consumer.Func(d.Handle, "counted")); err != nil {
		t.Fatal(err)
	}
	k.publish(newMessages(keys, n)...)
	k.start(c)

	k.waitUntil("the suspension", func(context.Context) bool { return s.began.Load() > 0 })
	// Some lanes were in an attempt when the handler was suspended.
	most := slow.Outage + 8
	before := d.attempts.Load()
	k.waitUntil("three attempts of the suspended handler", func(context.Context) bool { return d.attempts.Load() >= before+3 })
	// A lane that fails while the handler is suspended leaves its message in Kafka. The later messages of a key that is set
	// aside follow it, tried or not.
	var waiting []string
	if err := k.db.Collection(setaside.DefaultCollection).Distinct(k.context(), "q", bson.D{}).Decode(&waiting); err != nil {
		t.Fatal(err)
	}
	if len(waiting) > most {
		t.Errorf("keys that are set aside: got %d, want at most %d", len(waiting), most)
	}
	if got := sumOffsets(k.readCommitted(2)); got > int64(most*n/keys) {
		t.Errorf("committed offsets: got %d, want at most %d", got, most*n/keys)
	}

	d.away.Store(false)
	k.waitCount("effects", n)
	k.untilSettled(2, n)
	k.checkOnce("effects", n)
	k.waitUntil("the end of the suspension", func(context.Context) bool { return s.over.Load() > 0 })
}

// The workers of a handler take turns with its keys.
func TestAKeyWithManyWaitingMessagesStopsNoRetryOfOtherKeys(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	const n = 300
	var failed sync.Map
	effects, retried := k.insertInto("effects"), make(chan struct{})
	c := k.newConsumer(consumer.WithRetry(soon), consumer.WithConcurrency(4))
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		if _, again := failed.LoadOrStore(string(m.Key), true); !again {
			return errAway
		}
		select {
		case <-retried:
		case <-time.After(20 * time.Millisecond):
		}
		return effects(ctx, m)
	})

	hot := make([]*consumer.Message, n)
	for i := range hot {
		hot[i] = newMessage("hot", "counted", fmt.Sprint(i))
	}
	k.publish(hot...)
	k.start(c)
	k.waitCount("effects", 3)
	k.publish(newMessage("rare", "counted", "0"))
	k.waitUntil("the retry of the other key", func(ctx context.Context) bool {
		found, err := k.db.Collection("effects").CountDocuments(ctx, bson.D{{Key: "key", Value: "rare"}})
		return err == nil && found == 1
	})
	if handled := k.countDocuments("effects"); handled > n/2 {
		t.Errorf("messages that were handled at the first retry of the other key: got %d of %d", handled, n+1)
	}
	close(retried)
	k.waitCount("effects", n+1)
	k.checkOnce("effects", n+1)
}

// In an outage, a member that joins and a member that starts again set one key aside, not as many as suspend a handler.
func TestMembersThatStartInAnOutageSetOneKeyAside(t *testing.T) {
	t.Parallel()
	k := newKit(t, 4)
	const keys, n, lanes = 100, 200, 8
	// The waits are long, so that no second probe adds a key.
	rule := consumer.Retry{Quick: []time.Duration{-1}, Min: 20 * time.Second, Max: 20 * time.Second, Outage: 5}
	d := &dependent{next: k.insertInto("effects")}
	d.away.Store(true)
	start := func() (stop func()) {
		s := &suspensions{}
		c := k.newConsumer(consumer.WithRetry(rule), s.hookOption(k), consumer.WithConcurrency(lanes))
		if err := c.Handle("counted", consumer.Func(d.Handle, "counted")); err != nil {
			t.Fatal(err)
		}
		stop = k.start(c)
		if d.away.Load() {
			k.waitUntil("the suspension", func(context.Context) bool { return s.began.Load() > 0 })
		}
		return stop
	}
	countKeys := func() int {
		var waiting []bson.RawValue
		if err := k.db.Collection(setaside.DefaultCollection).Distinct(k.context(), "q", bson.D{}).Decode(&waiting); err != nil {
			t.Fatal(err)
		}
		return len(waiting)
	}

	k.publish(newMessages(keys, n)...)
	// After the stop, the lanes that had begun have finished.
	start()()
	before, at := countKeys(), time.Now()
	if before < rule.Outage || before > rule.Outage+lanes {
		t.Errorf("keys that the first member has set aside: got %d, want %d to %d", before, rule.Outage, rule.Outage+lanes)
	}

	started := 0
	check := func(name string) {
		started++
		// A probe follows each wait, which may be 20 % shorter.
		most := before + started + int(time.Since(at)/(16*time.Second))
		if got := countKeys(); got > most {
			t.Errorf("keys that are set aside after %s: got %d, want at most %d", name, got, most)
		}
	}
	stopFirst := start()
	check("a restart")
	stopSecond := start()
	check("a second member")
	stopFirst()
	stopSecond()
	start()()
	check("another restart")

	d.away.Store(false)
	start()
	k.waitCount("effects", n)
	k.untilSettled(4, n)
	k.checkOnce("effects", n)
}

// A handler with many bad messages starts as fast as another: the first good message shows that there is no outage.
func TestManyBadMessagesDoNotHoldUpAHandlerThatStarts(t *testing.T) {
	t.Parallel()
	k := newKit(t, 2)
	const bad, good = 12, 40
	rule := consumer.Retry{Quick: []time.Duration{-1}, Min: time.Hour, Max: time.Hour, Outage: 3}
	effects := k.insertInto("effects")
	start := func() (stop func()) {
		c := k.newConsumer(consumer.WithRetry(rule))
		addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
			if strings.HasPrefix(string(m.Key), "bad") {
				return errAway
			}
			return effects(ctx, m)
		})
		return k.start(c)
	}

	stop := start()
	for i := range bad {
		k.publish(newMessage(fmt.Sprint("good", i), "counted", "1"), newMessage(fmt.Sprint("bad", i), "counted", "1"))
		k.waitCount("effects", i+1)
		k.waitCount(setaside.DefaultCollection, i+1)
	}
	stop()

	k.publish(newMessages(good, good)...)
	start()
	k.waitCount("effects", bad+good)
	if got := k.countDocuments(setaside.DefaultCollection); got != bad {
		t.Errorf("messages that are set aside: got %d, want the %d bad ones", got, bad)
	}
}

func TestBadMessagesThatAreSetAsideDoNotSuspendTheHandler(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	rule := soon
	rule.Outage = 3
	effects := k.insertInto("effects")
	var retries atomic.Int64
	c := k.newConsumer(consumer.WithRetry(rule))
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		if strings.HasPrefix(string(m.Key), "bad") {
			retries.Add(1)
			return errAway
		}
		return effects(ctx, m)
	})
	k.start(c)

	// A good message between them shows that there is no outage.
	const bad = 5
	for i := range bad {
		k.publish(newMessage(fmt.Sprint("bad", i), "counted", "1"), newMessage(fmt.Sprint("good", i), "counted", "1"))
		k.waitCount("effects", i+1)
		k.waitCount(setaside.DefaultCollection, i+1)
	}

	// A quiet hour: only bad messages are tried.
	before := retries.Load()
	k.waitUntil("several retries of each bad message", func(context.Context) bool { return retries.Load() >= before+4*bad })
	if h := c.Status().Handlers; len(h) != 1 || h[0].Suspended {
		t.Errorf("the bad messages suspended the handler: %+v", h)
	}
	k.publish(newMessage("good", "counted", "2"))
	k.waitCount("effects", bad+1)
}

func TestAFailedMessageHoldsUpItsKeyAloneAndKeepsItsOrder(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	const keys, n = 20, 200
	var broken atomic.Bool
	broken.Store(true)
	effects := k.insertInto("effects")
	c := k.newConsumer(consumer.WithRetry(soon))
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		if string(m.Key) == "key03" && string(m.Value) == "2" && broken.Load() {
			return errAway
		}
		return effects(ctx, m)
	})
	k.publish(newMessages(keys, n)...)
	k.start(c)

	// All offsets pass, because eight messages of the key wait in the database.
	k.waitCount("effects", n-8)
	k.waitUntil("all offsets", func(context.Context) bool { return sumOffsets(k.readCommitted(1)) == n })
	if got := k.countDocuments("effects"); got != n-8 {
		t.Errorf("effects while the message fails: got %d, want %d", got, n-8)
	}
	if got := k.countDocuments(setaside.DefaultCollection); got != 8 {
		t.Errorf("messages that are set aside: got %d, want 8", got)
	}

	broken.Store(false)
	k.waitCount("effects", n)
	k.untilSettled(1, n)
	k.checkOnce("effects", n)
}

func TestMessagesThatWaitSurviveACrashAndARedelivery(t *testing.T) {
	t.Parallel()
	k := newKit(t, 2)
	const keys, n = 6, 60
	effects := k.insertInto("effects")
	first := k.newConsumer(consumer.WithRetry(soon), consumer.WithTransport(uncommitted{k.kafka}))
	addHandlerAs(t, first, "effects", "counted", func(ctx context.Context, m *consumer.Message) error {
		if (string(m.Key) == "key01" || string(m.Key) == "key04") && string(m.Value) == "3" {
			return errAway
		}
		return effects(ctx, m)
	})
	k.publish(newMessages(keys, n)...)
	stop := k.start(first)
	k.waitUntil("the messages to be set aside", func(context.Context) bool { return k.countDocuments(setaside.DefaultCollection) == 14 })
	k.waitCount("effects", n-14)
	stop()

	// Everything is delivered again, also the messages that wait.
	second := k.newConsumer(consumer.WithRetry(soon))
	addHandlerAs(t, second, "effects", "counted", effects)
	k.start(second)
	k.waitCount("effects", n)
	k.untilSettled(2, n)
	k.checkOnce("effects", n)
}

func TestMessagesThatWaitMoveWithTheirPartition(t *testing.T) {
	t.Parallel()
	k := newKit(t, 4)
	const keys, n = 16, 160
	var away atomic.Bool
	away.Store(true)
	effects := k.insertInto("effects")
	stats := &counts{}
	member := func() *consumer.Consumer {
		c := k.newConsumer(consumer.WithRetry(soon), consumer.WithTelemetry(stats))
		addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
			if string(m.Value) == "4" && away.Load() {
				return errAway
			}
			return effects(ctx, m)
		})
		return c
	}

	k.start(member())
	k.publish(newMessages(keys, n)...)
	k.waitUntil("every key to wait", func(context.Context) bool { return k.countDocuments(setaside.DefaultCollection) == keys*6 })
	before := stats.assigned.Load()
	stop := k.start(member())
	k.waitUntil("a rebalance", func(context.Context) bool { return stats.assigned.Load() >= before+2 })
	away.Store(false)
	k.waitCount("effects", n/2)
	stop()
	k.waitCount("effects", n)
	k.untilSettled(4, n)
	k.checkOnce("effects", n)
}

func TestASuspendedHandlerDoesNotHoldUpTheOthers(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	const keys, n = 12, 120
	d := &dependent{next: k.insertInto("dependent")}
	d.away.Store(true)
	slow := soon
	slow.Outage = 2
	c := k.newConsumer(consumer.WithRetry(slow), consumer.WithBufferedRecords(20))
	if err := c.Handle("dependent", consumer.Func(d.Handle, "counted")); err != nil {
		t.Fatal(err)
	}
	addHandlerAs(t, c, "independent", "counted", k.insertInto("independent"))
	k.publish(newMessages(keys, n)...)
	k.start(c)

	k.waitCount("independent", n)
	k.checkOnce("independent", n)
	d.away.Store(false)
	k.waitCount("dependent", n)
	k.untilSettled(1, n)
	k.checkOnce("dependent", n)
}

func TestAMessageThatFailsForTooLongIsADeadLetterAndItsKeyGoesOn(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	short := soon
	short.GiveUpAfter = time.Second
	effects := k.insertInto("effects")
	c := k.newConsumer(consumer.WithRetry(short))
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		if string(m.Value) == "1" {
			return errAway
		}
		return effects(ctx, m)
	})
	k.publish(newMessages(1, 4)...)
	k.start(c)
	k.waitCount("effects", 3)

	var l deadletter.Letter
	if err := k.db.Collection(deadletter.DefaultCollection).FindOne(k.context(), bson.D{}).Decode(&l); err != nil {
		t.Fatal(err)
	}
	if l.Class != deadletter.ClassHandler || l.Attempts < 2 || len(l.History) < 2 {
		t.Fatalf("dead letter: class %q after %d attempts: %+v", l.Class, l.Attempts, l.History)
	}
	if took := l.History[len(l.History)-1].At.Sub(l.History[0].At); took < 900*time.Millisecond {
		t.Errorf("dead letter: given up after %v", took)
	}
	if got := k.countDocuments(setaside.DefaultCollection); got != 0 {
		t.Errorf("messages that are set aside: got %d, want none", got)
	}
}

func TestNoMoreMessagesThanAllowedAreSetAside(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	const n = 40
	few := soon
	few.MaxWaiting = 3
	few.Outage = -1
	d := &dependent{next: k.insertInto("effects")}
	d.away.Store(true)
	c := k.newConsumer(consumer.WithRetry(few), consumer.WithConcurrency(2))
	if err := c.Handle("counted", consumer.Func(d.Handle, "counted")); err != nil {
		t.Fatal(err)
	}

	k.publish(newMessages(20, n)...)
	k.start(c)
	k.waitUntil("many attempts", func(context.Context) bool { return d.attempts.Load() > 60 })
	// Two lanes may have checked the limit at the same moment.
	if got := k.countDocuments(setaside.DefaultCollection); got < 3 || got > 5 {
		t.Errorf("messages that are set aside: got %d, want 3", got)
	}

	d.away.Store(false)
	k.waitCount("effects", n)
	k.untilSettled(1, n)
	k.checkOnce("effects", n)
}

func TestAHandlerDecidesAboutItsMessage(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	effects := k.insertInto("effects")
	var mu sync.Mutex
	attempts := map[string][]int{}
	var suspendedAt, after atomic.Int64
	c := k.newConsumer(consumer.WithSharedTransaction(1))
	addHandler(t, c, "*", func(ctx context.Context, m *consumer.Message) error {
		mu.Lock()
		attempts[m.Name] = append(attempts[m.Name], m.Attempt)
		tries := len(attempts[m.Name])
		mu.Unlock()

		if err := effects(ctx, m); err != nil {
			return err
		}
		switch {
		case m.Name == "reject":
			return consumer.Reject(errAway)
		case m.Name == "discard":
			return consumer.Discard(errAway)
		case m.Name == "retry" && tries < 3:
			return consumer.RetryIn(20*time.Millisecond, nil)
		case m.Name == "suspend" && tries == 1:
			suspendedAt.Store(time.Now().UnixMilli())
			return consumer.Suspend(time.Second, errAway)
		case m.Name == "suspend":
			after.Store(time.Now().UnixMilli())
		}
		return nil
	})
	k.publish(newMessage("a", "reject", "0"), newMessage("b", "discard", "0"), newMessage("c", "retry", "0"))
	k.start(c)
	k.waitCount("effects", 1)
	k.waitUntil("a dead letter", func(context.Context) bool { return k.countDocuments(deadletter.DefaultCollection) == 1 })
	k.waitUntil("all offsets", func(context.Context) bool { return sumOffsets(k.readCommitted(1)) == 3 })

	k.publish(newMessage("d", "suspend", "0"))
	k.waitUntil("the suspension", func(context.Context) bool { return suspendedAt.Load() > 0 })
	k.publish(newMessage("e", "plain", "0"))
	k.waitCount("effects", 3)

	mu.Lock()
	defer mu.Unlock()
	for name, want := range map[string][]int{"reject": {1}, "discard": {1}, "retry": {1, 1, 1}, "suspend": {1, 1}, "plain": {1}} {
		if !slices.Equal(attempts[name], want) {
			t.Errorf("%s: got the attempts %v, want %v", name, attempts[name], want)
		}
	}
	if took := after.Load() - suspendedAt.Load(); took < 1000 {
		t.Errorf("the suspension of one second took %d ms", took)
	}

	var l deadletter.Letter
	if err := k.db.Collection(deadletter.DefaultCollection).FindOne(k.context(), bson.D{}).Decode(&l); err != nil {
		t.Fatal(err)
	}
	if l.Class != deadletter.ClassRejected || l.Name != "reject" {
		t.Errorf("dead letter: got class %q and type %q, want %q and reject", l.Class, l.Name, deadletter.ClassRejected)
	}
}

func TestMessagesOfEveryModeCanWait(t *testing.T) {
	t.Parallel()
	for name, opts := range map[string][]consumer.HandlerOption{
		"claimed":                           {consumer.WithMode(consumer.Claimed)},
		"at least once":                     {consumer.WithMode(consumer.AtLeastOnce)},
		"at least once, in the transaction": {consumer.WithMode(consumer.AtLeastOnceInTransaction)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			const n = 12

			effects := k.insertInto("effects")
			var failed atomic.Int64
			c := k.newConsumer(consumer.WithRetry(soon))
			addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
				if string(m.Value) == "1" && failed.Add(1) <= 6 {
					return errAway
				}
				return effects(ctx, m)
			}, opts...)

			k.publish(newMessages(2, n)...)
			k.start(c)

			k.waitCount("effects", n)
			k.untilSettled(1, n)
			k.checkOnce("effects", n)
		})
	}
}

func TestUnorderedMessagesDoNotHoldUpTheirKey(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	unordered := soon
	unordered.Unordered = true
	var broken atomic.Bool
	broken.Store(true)
	effects := k.insertInto("effects")
	c := k.newConsumer(consumer.WithRetryFor(consumer.ErrorIs(errAway), unordered))
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		if string(m.Value) == "1" && broken.Load() {
			return fmt.Errorf("packing: %w", errAway)
		}
		return effects(ctx, m)
	})

	k.publish(newMessages(1, 5)...)
	k.start(c)
	k.waitCount("effects", 4)
	broken.Store(false)
	k.waitCount("effects", 5)
	k.untilSettled(1, 5)
}

func TestAHandlerIsPausedAndResumedAlone(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.newConsumer()
	addHandlerAs(t, c, "paused", "*", k.insertInto("effects"))
	addHandlerAs(t, c, "other", "*", k.insertInto("others"))
	if c.PauseHandler("unknown") || !c.PauseHandler("paused") {
		t.Error("PauseHandler: got a wrong result, want true for a registered handler")
	}
	k.publish(newMessages(4, 8)...)
	k.start(c)
	k.waitCount("others", 8)
	// Pause and Resume are about the whole consumer.
	c.Pause()
	c.Resume()
	k.waitUntil("the messages to be set aside", func(context.Context) bool { return k.countDocuments(setaside.DefaultCollection) == 8 })
	if got := k.countDocuments("effects"); got != 0 {
		t.Errorf("effects of a paused handler: got %d, want none", got)
	}

	c.ResumeHandler("paused")
	k.waitCount("effects", 8)
	k.untilSettled(1, 8)
	k.checkOnce("effects", 8)
}

func TestResumeEndsTheSuspensionOfAHandler(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	stubborn := consumer.NoRetry()
	stubborn.Then = consumer.ThenSuspend
	d := &dependent{next: k.insertInto("effects")}
	d.away.Store(true)
	s := &suspensions{}
	c := k.newConsumer(consumer.WithRetry(stubborn), s.hookOption(k), consumer.WithConcurrency(1))
	if err := c.Handle("counted", consumer.Func(d.Handle, "counted")); err != nil {
		t.Fatal(err)
	}

	k.publish(newMessages(3, 9)...)
	k.start(c)
	k.waitUntil("the suspension", func(context.Context) bool { return s.began.Load() > 0 })
	d.away.Store(false)
	if got := d.attempts.Load(); got != 1 {
		t.Errorf("attempts of a suspended handler: got %d, want 1", got)
	}

	if c.ResumeHandler("unknown") || !c.ResumeHandler("counted") {
		t.Error("ResumeHandler: got a wrong result, want true for a registered handler")
	}
	k.waitCount("effects", 9)
	k.untilSettled(1, 9)
	k.checkOnce("effects", 9)
}

// stranger joins another group, so that its member has partitions that another member has too, like a previous owner
// before it learns of the rebalance.
type stranger struct{ transport.Transport }

func (s stranger) Join(ctx context.Context, group string, topics []string, session transport.Session) error {
	return s.Transport.Join(ctx, group+"-previous", topics, session)
}

func TestTwoOwnersOfAPartitionKeepTheOrderOfItsKeys(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	const keys, n = 12, 240
	hasty := consumer.Retry{Quick: []time.Duration{-1}, Min: time.Millisecond, Max: 10 * time.Millisecond, Outage: -1}
	effects := k.insertInto("effects")
	for name, transport := range map[string]transport.Transport{"owner": k.kafka, "previous": stranger{k.kafka}} {
		c := k.newConsumer(consumer.WithRetry(hasty), consumer.WithTransport(transport), consumer.WithSharedTransaction(8))
		var attempts atomic.Int64
		addHandlerAs(t, c, "effects", "counted", func(ctx context.Context, m *consumer.Message) error {
			// Each member fails at other messages.
			if i := attempts.Add(1); i%3 == int64(len(name)%3) {
				return errAway
			}
			return effects(ctx, m)
		})
		k.start(c)
	}

	all := newMessages(keys, n)
	for i := 0; i < n; i += 40 {
		k.publish(all[i : i+40]...)
		k.waitCount("effects", i+20)
	}

	k.waitCount("effects", n)
	k.waitUntil("no message to be set aside", func(context.Context) bool { return k.countDocuments(setaside.DefaultCollection) == 0 })
	k.checkOnce("effects", n)
}

func TestAMessageThatWasHandledIsNotSetAsideEvenWithoutItsMark(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	const n = 6
	var broken atomic.Bool
	broken.Store(true)
	effects := k.insertInto("effects")
	member := func(opts ...consumer.Option) *consumer.Consumer {
		c := k.newConsumer(append(opts, consumer.WithRetry(soon))...)
		addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
			if string(m.Value) == "3" && broken.Load() {
				return errAway
			}
			return effects(ctx, m)
		})
		return c
	}
	k.publish(newMessages(1, n)...)
	stop := k.start(member(consumer.WithTransport(uncommitted{k.kafka})))
	k.waitUntil("the messages to be set aside", func(context.Context) bool { return k.countDocuments(setaside.DefaultCollection) == 3 })
	stop()

	// The retention of the marks is over. The watermarks stay.
	if _, err := k.db.Collection("inbox").DeleteMany(k.context(), bson.D{}); err != nil {
		t.Fatal(err)
	}
	k.start(member())
	k.waitUntil("all offsets", func(context.Context) bool { return sumOffsets(k.readCommitted(1)) == n })
	if got := k.countDocuments(setaside.DefaultCollection); got != 3 {
		t.Errorf("messages that are set aside after the redelivery: got %d, want 3", got)
	}
	broken.Store(false)
	k.waitCount("effects", n)
	k.untilSettled(1, n)
	k.checkOnce("effects", n)
}

func TestMessagesOfAHandlerThatIsNoMoreAreReported(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	first := k.newConsumer(consumer.WithRetry(soon))
	addHandlerAs(t, first, "old", "counted", func(context.Context, *consumer.Message) error { return errAway })
	k.publish(newMessages(1, 1)...)
	stop := k.start(first)
	k.waitUntil("the message to be set aside", func(context.Context) bool { return k.countDocuments(setaside.DefaultCollection) == 1 })
	stop()

	reported := make(chan struct{}, 10)
	second := k.newConsumer(consumer.WithErrorHook(func(_ context.Context, err error) {
		if errors.Is(err, consumer.ErrNoHandler) && strings.Contains(err.Error(), `"old"`) {
			reported <- struct{}{}
		}
	}))
	addHandlerAs(t, second, "new", "counted", nop)
	k.start(second)
	k.waitFor("the report", reported)
}
