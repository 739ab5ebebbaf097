package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/inbox/mongostore"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Two members; one comes and goes while messages are written.
func TestRebalancesUnderLoadLoseAndDoubleNothing(t *testing.T) {
	t.Parallel()
	k := newKit(t, 4)
	rounds, each := 6, 60
	keys := 12
	stats := &counts{}
	member := func() *consumer.Consumer {
		c := k.newConsumer(consumer.WithTelemetry(stats))
		addHandler(t, c, "counted", k.insertInto("effects"))
		return c
	}

	all := newMessages(keys, rounds*each)
	k.start(member())
	k.publish(all[:each]...)
	k.waitCount("effects", 1)
	for r := 1; r < rounds; r += 2 {
		before := stats.assigned.Load()
		stop := k.start(member())
		k.publish(all[r*each : (r+1)*each]...)
		k.waitUntil("a rebalance", func(context.Context) bool { return stats.assigned.Load() >= before+2 })
		if r+1 < rounds {
			k.publish(all[(r+1)*each : (r+2)*each]...)
		}
		stop()
	}

	k.waitCount("effects", rounds*each)
	k.waitUntil("all offsets", func(context.Context) bool { return sumOffsets(k.readCommitted(4)) == int64(rounds*each) })
	k.checkOnce("effects", rounds*each)
}

// blocked is a handler that waits for a release at one value, and signals when it is there.
type blocked struct {
	value            string
	reached, release chan struct{}
	next             consumer.HandlerFunc
	hits             atomic.Int64
}

func newBlocked(value string, next consumer.HandlerFunc) *blocked {
	return &blocked{value: value, reached: make(chan struct{}, 100), release: make(chan struct{}), next: next}
}

func (b *blocked) Handle(ctx context.Context, m *consumer.Message) error {
	if string(m.Value) == b.value {
		b.hits.Add(1)
		b.reached <- struct{}{}
		select {
		case <-b.release:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return b.next(ctx, m)
}

func TestDatabaseAwayPausesAndLosesNothing(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	k := newKit(t, 2, options.Client().SetAppName(app))
	n := 120
	stats := &counts{}
	dead := newDisposed()
	c := k.newConsumer(consumer.WithTelemetry(stats), consumer.WithDisposer(dead), withTries(1))
	addHandler(t, c, "counted", k.insertInto("effects"))
	k.publish(newMessages(8, n/2)...)
	k.start(c)
	k.waitCount("effects", n/2)
	off := stacktest.FailCommand(t, app, "alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"find", "aggregate", "insert", "update", "commitTransaction"}}, {Key: "errorCode", Value: 11600}, {Key: "closeConnection", Value: false},
	})

	more := newMessages(8, n)[n/2:]
	k.publish(more...)
	k.waitUntil("the outage to be noticed", func(context.Context) bool { return stats.database.Load() > 0 })
	before := sumOffsets(k.readCommitted(2))
	if before > int64(n/2) {
		t.Errorf("%d offsets are committed", before)
	}

	off()
	k.waitCount("effects", n)
	k.waitUntil("all offsets", func(context.Context) bool { return sumOffsets(k.readCommitted(2)) == int64(n) })
	k.checkOnce("effects", n)
	if got := dead.listAll(); len(got) > 0 || stats.failed.Load() > 0 {
		t.Errorf("%d attempts were spent, %d messages disposed of", stats.failed.Load(), len(got))
	}
}

// A problem that cannot pass ends Run: a server without transactions, and a recreated topic if the option is to halt.
func TestPermanentErrorsEndTheRun(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	k.publish(newMessages(1, 3)...)
	standalone := func(ctx context.Context, fn func(ctx context.Context) error) error {
		return fmt.Errorf("%w: %w", outbox.ErrStandalone, fn(ctx))
	}

	for _, opts := range [][]consumer.Option{{}, {consumer.WithMode(consumer.AtLeastOnceInTransaction)}} {
		c := k.newConsumer(append(opts, consumer.Transactions(standalone))...)
		addHandler(t, c, "*", func(context.Context, *consumer.Message) error { return errWanted })
		if err := c.Run(k.context()); !errors.Is(err, outbox.ErrStandalone) {
			t.Errorf("Run: %v", err)
		}
	}

	halt := recreated{k.openInbox()}
	c := k.newConsumer(consumer.WithInbox(halt))
	addHandler(t, c, "*", nop)
	if err := c.Run(k.context()); !errors.Is(err, consumer.ErrGap) {
		t.Errorf("Run: %v", err)
	}
	if got := k.readCommitted(1)[0]; got > 0 {
		t.Errorf("offset %d is committed", got)
	}
}

func (k *kit) openInbox() *inbox.Inbox {
	k.Helper()
	x, err := mongostore.Open(k.db, inbox.Settings{})
	if err != nil {
		k.Fatal(err)
	}
	return x
}

// recreated reports every topic as recreated, and halts.
type recreated struct{ *inbox.Inbox }

func (recreated) Attach(context.Context, string, string, int32, inbox.Log) (inbox.Generation, error) {
	return inbox.Generation{}, inbox.ErrRecreated
}

func TestPauseHoldsNothingInMemory(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	n := 60
	stats := &counts{}
	b := newBlocked("3", k.insertInto("effects"))
	c := k.newConsumer(consumer.WithTelemetry(stats), consumer.WithSharedTransaction(4))
	if err := c.Handle("counted", consumer.Func(b.Handle, "counted")); err != nil {
		t.Fatal(err)
	}

	k.publish(newMessages(1, n)...)
	k.start(c)
	k.waitFor("the message", b.reached)
	c.Pause()
	close(b.release)
	k.waitUntil("an empty memory", func(context.Context) bool { return stats.held.Load() == 0 && stats.heldBytes.Load() == 0 })
	done := k.countDocuments("effects")
	if done >= n {
		t.Fatalf("all %d are handled: the pause came too late", n)
	}

	k.waitUntil("the commit of the finished messages", func(context.Context) bool { return k.readCommitted(1)[0] == int64(done) })
	k.publish(newMessage("key00", "counted", fmt.Sprint(n)))
	c.Resume()
	k.waitCount("effects", n+1)
	k.waitUntil("all offsets", func(context.Context) bool { return k.readCommitted(1)[0] == int64(n+1) })
	k.checkOnce("effects", n+1)
}

func TestStopFinishesMessagesInFlight(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	b := newBlocked("0", k.insertInto("effects"))
	c := k.newConsumer(consumer.WithCommitInterval(-1), consumer.WithSharedTransaction(1))
	if err := c.Handle("counted", consumer.Func(b.Handle, "counted")); err != nil {
		t.Fatal(err)
	}

	k.publish(newMessages(1, 5)...)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	k.waitFor("the message", b.reached)
	if err := c.Run(t.Context()); !errors.Is(err, consumer.ErrRunning) {
		t.Errorf("a second Run: %v", err)
	}

	cancel()
	select {
	case err := <-done:
		t.Fatalf("Run ended with a message in flight: %v", err)
	case <-time.After(100 * time.Millisecond):
	}

	close(b.release)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if got := k.readCommitted(1)[0]; got != int64(k.countDocuments("effects")) || got < 1 {
		t.Errorf("offset %d, %d effects", got, k.countDocuments("effects"))
	}

	k.start(c) // it runs again
	k.waitCount("effects", 5)
	k.checkOnce("effects", 5)
}

func TestStopAbandonsHandlersThatDoNotEndInTime(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	b := newBlocked("2", k.insertInto("effects"))
	abandoned := make(chan struct{}, 10)
	c := k.newConsumer(consumer.WithDrain(50*time.Millisecond), consumer.WithSharedTransaction(1), consumer.WithErrorHook(func(_ context.Context, err error) {
		if errors.Is(err, consumer.ErrAbandoned) {
			abandoned <- struct{}{}
		}
	}))
	if err := c.Handle("counted", consumer.Func(b.Handle, "counted")); err != nil {
		t.Fatal(err)
	}

	k.publish(newMessages(1, 5)...)
	stop := k.start(c)
	k.waitFor("the message", b.reached)
	stop()
	k.waitFor("the report", abandoned)
	if got := k.readCommitted(1)[0]; got != 2 {
		t.Errorf("offset %d is committed", got)
	}

	close(b.release)
	k.start(c)
	k.waitCount("effects", 5)
	k.checkOnce("effects", 5)
}

func TestACoolingLaneDoesNotBlockOthers(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	effects := k.insertInto("effects")
	c := k.newConsumer(consumer.WithConcurrency(1), consumer.WithRetry(consumer.Retry{Quick: []time.Duration{time.Hour}}))
	addHandler(t, c, "*", func(ctx context.Context, m *consumer.Message) error {
		if string(m.Key) == "bad" {
			return errWanted
		}
		return effects(ctx, m)
	})

	lane, n := inbox.Lane([]byte("bad"), 0), 0
	ms := []*consumer.Message{newMessage("bad", "counted", "0")}
	for _, m := range newMessages(20, 60) {
		if inbox.Lane(m.Key, 0) != lane {
			ms = append(ms, m)
			n++
		}
	}

	k.publish(ms...)
	stop := k.start(c)
	k.waitCount("effects", n)
	k.checkOnce("effects", n)
	// The consumer ends at once, although the lane has an hour to wait.
	stop()
	if got := k.readCommitted(1)[0]; got > 0 {
		t.Errorf("offset %d is committed past the waiting message", got)
	}
}

// Messages in a lane after an interrupted message must not be handled first, because the watermark would pass
// that message.
func TestNothingOfALanePassesAnInterruptedMessage(t *testing.T) {
	t.Parallel()
	for name, interrupt := range map[string]func(c *consumer.Consumer, stop func()){
		"stop":  func(_ *consumer.Consumer, stop func()) { stop() },
		"pause": func(c *consumer.Consumer, _ func()) { c.Pause() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			stats := &counts{}
			failed := make(chan struct{}, 10)
			var healed atomic.Bool
			c := k.newConsumer(consumer.WithSharedTransaction(1), consumer.WithTelemetry(stats), consumer.WithRetry(consumer.Retry{Quick: []time.Duration{time.Hour}}))

			effects := k.insertInto("effects")
			addHandler(t, c, "*", func(ctx context.Context, m *consumer.Message) error {
				if string(m.Value) == "3" && !healed.Load() {
					failed <- struct{}{}
					return errWanted
				}
				return effects(ctx, m)
			})

			k.publish(newMessages(1, 30)...)
			stop := k.start(c)
			k.waitFor("the failure", failed)
			k.waitUntil("the rest to wait", func(context.Context) bool { return stats.held.Load() == 27 })

			interrupt(c, stop)
			k.waitUntil("an empty memory", func(context.Context) bool { return stats.held.Load() == 0 })

			healed.Store(true)
			if name == "pause" {
				c.Resume()
			} else {
				k.start(c)
			}

			k.waitCount("effects", 30)
			k.checkOnce("effects", 30)
		})
	}
}

func TestHandlersHaveLimitedTimeAndNumber(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	dead := newDisposed()
	c := k.newConsumer(consumer.WithDisposer(dead), withTries(1))
	addHandler(t, c, "slow", func(ctx context.Context, _ *consumer.Message) error {
		<-ctx.Done()
		return ctx.Err()
	}, consumer.WithTimeout(50*time.Millisecond))

	var at, most atomic.Int64
	effects := k.insertInto("effects")
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		most.Store(max(most.Load(), at.Add(1)))
		defer at.Add(-1)
		return effects(ctx, m)
	}, consumer.WithLimit(1), consumer.WithMode(consumer.AtLeastOnce))

	k.publish(newMessage("a", "slow", "0"))
	k.publish(newMessages(8, 40)...)
	k.start(c)
	k.waitCount("effects", 40)
	k.waitFor("the dead letter", dead.more)
	var late *consumer.TimeoutError
	if err := dead.listAll()[0].cause; !errors.As(err, &late) || !errors.Is(err, context.DeadlineExceeded) || late.After != 50*time.Millisecond {
		t.Errorf("cause: %v", err)
	}
	if most.Load() != 1 {
		t.Errorf("%d at once", most.Load())
	}
}

func TestBatchHandlersGetALaneTogether(t *testing.T) {
	t.Parallel()
	for _, mode := range []consumer.Mode{consumer.Transactional, consumer.AtLeastOnce} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			dead := newDisposed()

			c := k.newConsumer(consumer.WithDisposer(dead), withTries(1), consumer.WithMode(mode))
			var mu sync.Mutex
			var sizes []int

			coll := k.newCollection("effects")
			err := c.Handle("counted", consumer.Batch(5, func(ctx context.Context, ms []*consumer.Message) error {
				var docs []any
				for _, m := range ms {
					if string(m.Value) == "7" {
						return errWanted
					}
					docs = append(docs, bson.D{{Key: "id", Value: m.ID}, {Key: "key", Value: string(m.Key)}, {Key: "value", Value: string(m.Value)}})
				}
				mu.Lock()
				sizes = append(sizes, len(ms))
				mu.Unlock()
				_, err := coll.InsertMany(ctx, docs)
				return err
			}, "counted"))
			if err != nil {
				t.Fatal(err)
			}

			k.publish(newMessages(1, 30)...)
			k.start(c)
			k.waitCount("effects", 29)
			k.waitUntil("all offsets", func(context.Context) bool { return k.readCommitted(1)[0] == 30 })

			mu.Lock()
			defer mu.Unlock()
			largest := 0
			for _, n := range sizes {
				largest = max(largest, n)
			}
			if largest < 2 || largest > 5 {
				t.Errorf("batches of %v", sizes)
			}

			if got := dead.listAll(); len(got) != 1 || string(got[0].m.Value) != "7" {
				t.Errorf("%d dead letters", len(got))
			}
		})
	}
}
