package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	mongoevent "go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
)

func TestMembersShareTheRateOfAHandler(t *testing.T) {
	t.Parallel()
	var reservations atomic.Int64
	monitor := options.Client().SetMonitor(&mongoevent.CommandMonitor{Started: func(_ context.Context, e *mongoevent.CommandStartedEvent) {
		if coll, ok := e.Command.Lookup(e.CommandName).StringValueOK(); ok && coll == "inbox_rates" {
			reservations.Add(1)
		}
	}})
	k := newKit(t, 4, monitor)
	const n, perSecond, burst = 120, 40, 6
	k.publish(newMessages(24, n)...)

	var mu sync.Mutex
	first := map[string]time.Time{} // of each message; a repeated transaction needs no further call of the rate
	insert := k.insertInto("effects")
	began := time.Now()
	for range 2 {
		c := k.newConsumer(consumer.WithRate(consumer.Rate{PerSecond: perSecond, Burst: burst}))
		addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
			mu.Lock()
			if first[m.ID].IsZero() {
				first[m.ID] = time.Now()
			}
			mu.Unlock()
			return insert(ctx, m)
		})
		k.start(c)
	}
	k.waitCount("effects", n)
	k.checkOnce("effects", n)

	mu.Lock()
	defer mu.Unlock()
	for i, at := range slices.SortedFunc(maps.Values(first), time.Time.Compare) {
		// The limit may have a burst before it.
		if earliest := began.Add(time.Duration(i+1-burst) * time.Second / perSecond); at.Before(earliest) {
			t.Fatalf("message %d was handled after %v, which is too early by %v", i, at.Sub(began), earliest.Sub(at))
		}
	}
	// A reservation has ten calls.
	if got := reservations.Load(); got < n/10 || got > n/2 {
		t.Errorf("%d reservations for %d messages", got, n)
	}
}

func TestARateDelaysOnlyItsHandler(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.newConsumer()
	addHandler(t, c, "slow", k.insertInto("slow"), consumer.WithRate(consumer.Rate{PerSecond: 0.001}))
	addHandler(t, c, "fast", k.insertInto("fast"))
	for i := range 10 {
		k.publish(newMessage("a", "slow", fmt.Sprint(i)), newMessage("a", "fast", fmt.Sprint(i)))
	}
	stop := k.start(c)
	k.waitCount("fast", 10)
	k.checkOnce("fast", 10)
	k.waitCount("slow", 1)
	k.waitUntil("the wait in Status", func(context.Context) bool {
		for _, h := range c.Status().Handlers {
			if h.Name == "slow" && h.RateWaiting == 1 {
				return true
			}
		}
		return false
	})
	if n := k.countDocuments("slow"); n != 1 {
		t.Errorf("%d messages of the limited handler, want 1", n)
	}

	// The wait does not hold up a stop, and the message that waited is handled later.
	stop()
	later := k.newConsumer()
	addHandler(t, later, "slow", k.insertInto("slow"))
	addHandler(t, later, "fast", k.insertInto("fast"))
	k.start(later)
	k.waitCount("slow", 10)
	k.checkOnce("slow", 10)
	k.checkOnce("fast", 10)
}

// Handlers without a limit keep all lane slots busy. A handler with a rate gets as many slots as its calls need.
func TestARateDoesNotStarveAmongBusyHandlers(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.newConsumer(consumer.WithConcurrency(1), consumer.WithMode(consumer.AtLeastOnce))
	const n, busyMessages = 60, 4000
	var busy, limited, busyAtEnd atomic.Int64
	addHandler(t, c, "busy", func(context.Context, *consumer.Message) error {
		busy.Add(1)
		<-time.After(10 * time.Millisecond)
		return nil
	})
	addHandler(t, c, "limited", func(context.Context, *consumer.Message) error {
		if limited.Add(1) == n {
			busyAtEnd.Store(busy.Load())
		}
		return nil
	}, consumer.WithRate(consumer.Rate{PerSecond: 50, Burst: 5}))

	var messages []*consumer.Message
	for i := range busyMessages {
		key := fmt.Sprint("key", i%64)
		if i%10 == 0 && i/10 < n {
			messages = append(messages, newMessage(key, "limited", fmt.Sprint(i)))
		}
		messages = append(messages, newMessage(key, "busy", fmt.Sprint(i)))
	}
	k.publish(messages...)
	k.start(c)
	k.waitUntil("the limited messages", func(context.Context) bool { return limited.Load() == n })
	if got := busyAtEnd.Load(); got > 500 {
		t.Errorf("%d busy messages were handled before the last of %d limited ones", got, n)
	}
}

// Lanes that wait for a call take turns with lanes whose reservation fails. None of them has a response of MongoDB.
func TestAnOutageOfTheRateIsReportedOnce(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	var failed, began, ended, handled atomic.Int64
	monitor := &mongoevent.CommandMonitor{Failed: func(_ context.Context, e *mongoevent.CommandFailedEvent) {
		if e.CommandName == "findAndModify" {
			failed.Add(1)
		}
	}}
	k := newKit(t, 1, options.Client().SetAppName(app).SetMonitor(monitor))
	c := k.newConsumer(consumer.WithMode(consumer.AtLeastOnce), consumer.WithErrorHook(func(_ context.Context, err error) {
		if outage, ok := errors.AsType[*consumer.OutageError](err); ok && outage.Over {
			ended.Add(1)
		} else if ok {
			began.Add(1)
		}
	}))
	addHandler(t, c, "counted", func(context.Context, *consumer.Message) error {
		handled.Add(1)
		return nil
	}, consumer.WithRate(consumer.Rate{PerSecond: 0.01}))

	badValue := bson.D{
		{Key: "failCommands", Value: bson.A{"findAndModify"}},
		{Key: "errorCode", Value: 2},
		{Key: "blockConnection", Value: true},
		{Key: "blockTimeMS", Value: 500},
	}
	_, off := stacktest.FailAlways(t, app, badValue)
	k.publish(newMessages(3, 3)...)
	k.start(c)
	k.waitUntil("failed reservations", func(context.Context) bool { return failed.Load() >= 8 })
	if n := ended.Load(); n != 0 {
		t.Errorf("the end of the outage was reported %d times before it", n)
	}
	off()

	// The other lanes wait for calls that come much later.
	k.waitUntil("the end of the outage", func(context.Context) bool { return ended.Load() > 0 })
	if began.Load() != 1 || ended.Load() != 1 || handled.Load() > 1 {
		t.Errorf("%d outages, %d ends, %d messages, want 1, 1 and at most 1", began.Load(), ended.Load(), handled.Load())
	}
}

// A lane that stops to wait must not take its call with it: the next one would have to wait for all calls that were lost.
func TestAPauseLosesNoCallsOfARate(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.newConsumer()
	addHandler(t, c, "counted", k.insertInto("effects"), consumer.WithRate(consumer.Rate{PerSecond: 1}))
	k.publish(newMessages(16, 64)...)
	k.start(c)
	k.waitCount("effects", 1)

	untilLanesWait := func() {
		k.waitUntil("lanes that wait", func(context.Context) bool { return c.Status().Handlers[0].RateWaiting > 4 })
	}
	for range 10 {
		untilLanesWait()
		c.Pause()
		k.waitUntil("the lanes to stop", func(context.Context) bool { return c.Status().Handlers[0].RateWaiting == 0 })
		c.Resume()
	}
	untilLanesWait()
	handled, began := k.countDocuments("effects"), time.Now()
	k.waitCount("effects", handled+1)
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("the next call came after %v", took)
	}
}

func TestAHigherRateHoldsAtOnce(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	k.publish(newMessages(16, 64)...)
	insert := k.insertInto("effects")
	start := func(perSecond float64) (*consumer.Consumer, func()) {
		c := k.newConsumer()
		addHandler(t, c, "counted", insert, consumer.WithRate(consumer.Rate{PerSecond: perSecond}))
		return c, k.start(c)
	}

	c, stop := start(0.01)
	k.waitUntil("a lane that waits", func(context.Context) bool { return c.Status().Handlers[0].RateWaiting > 0 })
	stop()
	began := time.Now()
	start(100)
	k.waitCount("effects", 64)
	if took := time.Since(began); took > 90*time.Second {
		t.Errorf("the messages were handled after %v", took)
	}
	k.checkOnce("effects", 64)
}

// Without MongoDB, the handler waits, also if it needs MongoDB for nothing else.
func TestAHandlerWaitsWhileItsRateCannotBeRead(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	k := newKit(t, 1, options.Client().SetAppName(app))
	var handled atomic.Int64
	c := k.newConsumer(consumer.WithMode(consumer.AtLeastOnce))
	addHandler(t, c, "counted", func(context.Context, *consumer.Message) error {
		handled.Add(1)
		return nil
	}, consumer.WithRate(consumer.Rate{PerSecond: 1000}))
	reached, off := stacktest.FailAlways(t, app, bson.D{{Key: "failCommands", Value: bson.A{"findAndModify"}}, {Key: "errorCode", Value: 91}})
	k.publish(newMessages(2, 4)...)
	k.start(c)
	reached()

	if n := handled.Load(); n != 0 {
		t.Errorf("%d messages were handled without a reservation", n)
	}
	off()
	k.waitUntil("the messages", func(context.Context) bool { return handled.Load() == 4 })
}

func TestARateThatCannotBeIsRejected(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	for _, perSecond := range []float64{2e6, math.NaN(), math.Inf(1)} {
		err := k.newConsumer().Handle("h", consumer.Func(nop, "*"), consumer.WithRate(consumer.Rate{PerSecond: perSecond}))
		if err == nil || !strings.Contains(err.Error(), "WithRate") {
			t.Errorf("%v per second: %v", perSecond, err)
		}
	}
}
