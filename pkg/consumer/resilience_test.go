package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/inbox"
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
		c := k.consumer(consumer.WithObserver(stats))
		handle(t, c, "counted", k.effects("effects"))
		return c
	}
	all := numbered(keys, rounds*each)
	k.start(member())
	k.publish(all[:each]...)
	k.untilCount("effects", 1)
	for r := 1; r < rounds; r += 2 {
		before := stats.assigned.Load()
		stop := k.start(member())
		k.publish(all[r*each : (r+1)*each]...)
		k.until("a rebalance", func(context.Context) bool { return stats.assigned.Load() >= before+2 })
		if r+1 < rounds {
			k.publish(all[(r+1)*each : (r+2)*each]...)
		}
		stop()
	}
	k.untilCount("effects", rounds*each)
	k.until("all offsets", func(context.Context) bool { return sum(k.committed(4)) == int64(rounds*each) })
	k.once("effects", rounds*each)
}

// blocked is a handler that waits for a release at one value, and tells when it got there.
type blocked struct {
	value            string
	reached, release chan struct{}
	next             consumer.Handler
	hits             atomic.Int64
}

func newBlocked(value string, next consumer.Handler) *blocked {
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
	return b.next.Handle(ctx, m)
}

// Whatever the mode is, nothing is committed past a message that is not finished, though later ones are.
func TestCommitModesNeverCommitPastAGap(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		mode   consumer.CommitMode
		itself bool
	}{
		"each":     {consumer.CommitEach(), true},
		"count":    {consumer.CommitCount(5), true},
		"interval": {consumer.CommitInterval(30 * time.Millisecond), true},
		"drain":    {consumer.CommitOnDrain(), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			b := newBlocked("stop", k.effects("effects"))
			stats := &counts{}
			cons := k.consumer(consumer.Commits(c.mode), consumer.Batch(1), consumer.WithObserver(stats))
			if err := cons.Handle("*", b); err != nil {
				t.Fatal(err)
			}
			ms := numbered(20, 40)
			ms[10] = msg("alone", "counted", "stop")
			k.publish(ms...)
			stop := k.start(cons)
			k.await("the gap", b.reached)
			alone := inbox.Lane([]byte("alone"), 0)
			others := 0
			for i, m := range ms {
				if i < 10 || inbox.Lane(m.Key, 0) != alone {
					others++
				}
			}
			k.untilCount("effects", others)
			if c.itself {
				k.until("what is before the gap", func(context.Context) bool { return k.committed(1)[0] > 10-5 })
			}
			if err := cons.Commit(k.context()); err != nil {
				t.Error(err)
			}
			if got := k.committed(1)[0]; got != 10 {
				t.Errorf("offset %d is committed while message 10 is not finished", got)
			}
			close(b.release)
			k.untilCount("effects", 40)
			if c.itself {
				k.until("the next offsets", func(context.Context) bool { return k.committed(1)[0] > 40-5 })
			}
			stop()
			if got := k.committed(1)[0]; got != 40 {
				t.Errorf("offset %d is committed after the stop", got)
			}
		})
	}
}

// Transactions leave markers in the log, and aborted ones records that nobody may see.
func TestTransactionsLeaveHolesThatOffsetsPass(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	cl, err := kgo.NewClient(kgo.SeedBrokers(k.cfg.Brokers...), kgo.TransactionalID(stacktest.Name(t)), kgo.DefaultProduceTopic(k.topic),
		kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.TransactionTimeout(30*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	ctx := k.context()
	n := 0
	for round := range 6 {
		if err := cl.BeginTransaction(); err != nil {
			t.Fatal(err)
		}
		commit := kgo.TransactionEndTry(round%2 == 0)
		for range 5 {
			value := "aborted"
			if commit {
				value = fmt.Sprint(n)
				n++
			}
			cl.Produce(ctx, &kgo.Record{Key: []byte("a"), Value: []byte(value), Headers: []kgo.RecordHeader{{Key: "type", Value: []byte("counted")}}}, nil)
		}
		if err := cl.Flush(ctx); err != nil {
			t.Fatal(err)
		}
		if err := cl.EndTransaction(ctx, commit); err != nil {
			t.Fatal(err)
		}
	}
	c := k.consumer()
	handle(t, c, "counted", k.effects("effects"))
	k.start(c)
	k.untilCount("effects", n)
	// 30 records and 6 markers: the last offset passes the last marker, although nothing is ever fetched there.
	k.until("all offsets", func(context.Context) bool { return k.committed(1)[0] == 36 })
	k.once("effects", n)
}

func TestDatabaseAwayPausesAndLosesNothing(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	k := newKit(t, 2, options.Client().SetAppName(app))
	n := 120
	stats := &counts{}
	dead := newDisposed()
	c := k.consumer(consumer.WithObserver(stats), consumer.WithDisposer(dead), consumer.OnFailure(tries(1)), consumer.Buffer(20, 1<<20))
	handle(t, c, "counted", k.effects("effects"))
	k.publish(numbered(8, n/2)...)
	k.start(c)
	k.untilCount("effects", n/2)
	off := stacktest.FailCommand(t, app, "alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"find", "aggregate", "insert", "update", "commitTransaction"}}, {Key: "errorCode", Value: 11600}, {Key: "closeConnection", Value: false},
	})
	more := numbered(8, n)[n/2:]
	k.publish(more...)
	k.until("the outage to be noticed", func(context.Context) bool { return stats.database.Load() > 0 })
	before := sum(k.committed(2))
	if before > int64(n/2) {
		t.Errorf("%d offsets are committed", before)
	}
	off()
	k.untilCount("effects", n)
	k.until("all offsets", func(context.Context) bool { return sum(k.committed(2)) == int64(n) })
	k.once("effects", n)
	if got := dead.all(); len(got) > 0 || stats.failed.Load() > 0 {
		t.Errorf("%d attempts were spent, %d messages disposed of", stats.failed.Load(), len(got))
	}
	if held := stats.maxHeld.Load(); held > int64(2*(20+n)) {
		t.Errorf("%d messages were held", held)
	}
}

// What cannot get better ends the Run: a server without transactions, and a topic that was created anew where that is to halt.
func TestWhatCannotBeWaitedOutEndsTheRun(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	k.publish(numbered(1, 3)...)
	standalone := func(ctx context.Context, fn func(ctx context.Context) error) error {
		return fmt.Errorf("%w: %w", outbox.ErrStandalone, fn(ctx))
	}
	for _, opts := range [][]consumer.Option{{}, {consumer.Exactly(inbox.None), consumer.InTransaction()}} {
		c := k.consumer(append(opts, consumer.Transactions(standalone))...)
		handle(t, c, "*", func(context.Context, *consumer.Message) error { return errWanted })
		if err := c.Run(k.context()); !errors.Is(err, outbox.ErrStandalone) {
			t.Errorf("Run: %v", err)
		}
	}
	halt := recreated{k.inbox()}
	c := k.consumer(consumer.WithInbox(halt))
	handle(t, c, "*", nop)
	var re *inbox.RecreatedError
	if err := c.Run(k.context()); !errors.As(err, &re) {
		t.Errorf("Run: %v", err)
	}
	if got := k.committed(1)[0]; got > 0 {
		t.Errorf("offset %d is committed", got)
	}
}

func (k *kit) inbox() *inbox.Inbox {
	k.Helper()
	x, err := inbox.New(k.db)
	if err != nil {
		k.Fatal(err)
	}
	return x
}

// recreated says of every topic that it was created anew, and halts.
type recreated struct{ *inbox.Inbox }

func (recreated) Attach(_ context.Context, consumer, topic string, part int32, end int64, _ int32) (inbox.Generation, error) {
	return inbox.Generation{}, &inbox.RecreatedError{Consumer: consumer, Topic: topic, Partition: part, Watermark: 100, End: end}
}

func TestPauseHoldsNothingInMemory(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	n := 60
	stats := &counts{}
	b := newBlocked("3", k.effects("effects"))
	c := k.consumer(consumer.WithObserver(stats), consumer.Batch(4))
	if err := c.Handle("counted", b); err != nil {
		t.Fatal(err)
	}
	k.publish(numbered(1, n)...)
	k.start(c)
	k.await("the message", b.reached)
	c.Pause()
	if !c.Paused() {
		t.Error("not paused")
	}
	close(b.release)
	k.until("an empty memory", func(context.Context) bool { return stats.held.Load() == 0 && stats.heldBytes.Load() == 0 })
	done := k.count("effects")
	if done >= n {
		t.Fatalf("all %d are handled: the pause came too late", n)
	}
	k.until("the commit of what is finished", func(context.Context) bool { return k.committed(1)[0] == int64(done) })
	k.publish(msg("key00", "counted", fmt.Sprint(n)))
	c.Resume()
	k.untilCount("effects", n+1)
	k.until("all offsets", func(context.Context) bool { return k.committed(1)[0] == int64(n+1) })
	k.once("effects", n+1)
}

func TestStopFinishesWhatIsInFlight(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	b := newBlocked("0", k.effects("effects"))
	c := k.consumer(consumer.Commits(consumer.CommitOnDrain()), consumer.Batch(1))
	if err := c.Handle("counted", b); err != nil {
		t.Fatal(err)
	}
	k.publish(numbered(1, 5)...)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	k.await("the message", b.reached)
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
	if got := k.committed(1)[0]; got != int64(k.count("effects")) || got < 1 {
		t.Errorf("offset %d, %d effects", got, k.count("effects"))
	}
	k.start(c) // it runs again
	k.untilCount("effects", 5)
	k.once("effects", 5)
}

func TestStopAbandonsWhatDoesNotEndInTime(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	b := newBlocked("2", k.effects("effects"))
	abandoned := make(chan struct{}, 10)
	c := k.consumer(consumer.Drain(50*time.Millisecond), consumer.Batch(1), consumer.OnError(func(_ context.Context, err error) {
		if errors.Is(err, consumer.ErrAbandoned) {
			abandoned <- struct{}{}
		}
	}))
	if err := c.Handle("counted", b); err != nil {
		t.Fatal(err)
	}
	k.publish(numbered(1, 5)...)
	stop := k.start(c)
	k.await("the message", b.reached)
	stop()
	k.await("the report", abandoned)
	if got := k.committed(1)[0]; got != 2 {
		t.Errorf("offset %d is committed", got)
	}
	close(b.release)
	k.start(c)
	k.untilCount("effects", 5)
	k.once("effects", 5)
}

// cooling lets a lane wait.
type cooling struct {
	d      time.Duration
	action consumer.Action
}

func (c cooling) Decide(error, *consumer.Message, consumer.Attempts) consumer.Verdict {
	return consumer.Verdict{Action: c.action, Delay: c.d}
}

func TestACoolingLaneDoesNotBlockOthers(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	effects := k.effects("effects")
	c := k.consumer(consumer.Concurrency(1), consumer.OnFailure(cooling{time.Hour, consumer.RetryAfter}))
	handle(t, c, "*", func(ctx context.Context, m *consumer.Message) error {
		if string(m.Key) == "bad" {
			return errWanted
		}
		return effects(ctx, m)
	})
	lane, n := inbox.Lane([]byte("bad"), 0), 0
	ms := []*consumer.Message{msg("bad", "counted", "0")}
	for _, m := range numbered(20, 60) {
		if inbox.Lane(m.Key, 0) != lane {
			ms = append(ms, m)
			n++
		}
	}
	k.publish(ms...)
	stop := k.start(c)
	k.untilCount("effects", n)
	k.once("effects", n)
	stop() // at once, though the lane has an hour to wait
	if got := k.committed(1)[0]; got > 0 {
		t.Errorf("offset %d is committed past the one that waits", got)
	}
}

// What waits in a lane behind a message that is interrupted must not go first: the watermark would pass that one.
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
			c := k.consumer(consumer.Batch(1), consumer.WithObserver(stats), consumer.OnFailure(cooling{time.Hour, consumer.RetryAfter}))
			effects := k.effects("effects")
			handle(t, c, "*", func(ctx context.Context, m *consumer.Message) error {
				if string(m.Value) == "3" && !healed.Load() {
					failed <- struct{}{}
					return errWanted
				}
				return effects(ctx, m)
			})
			k.publish(numbered(1, 30)...)
			stop := k.start(c)
			k.await("the failure", failed)
			k.until("the rest to wait", func(context.Context) bool { return stats.held.Load() == 27 })
			interrupt(c, stop)
			k.until("an empty memory", func(context.Context) bool { return stats.held.Load() == 0 })
			healed.Store(true)
			if name == "pause" {
				c.Resume()
			} else {
				k.start(c)
			}
			k.untilCount("effects", 30)
			k.once("effects", 30)
		})
	}
}

func TestAPolicyMayPauseTheConsumer(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	var failing atomic.Bool
	failing.Store(true)
	c := k.consumer(consumer.OnFailure(cooling{300 * time.Millisecond, consumer.PauseConsumer}))
	effects := k.effects("effects")
	handle(t, c, "*", func(ctx context.Context, m *consumer.Message) error {
		if failing.CompareAndSwap(true, false) {
			return errWanted
		}
		return effects(ctx, m)
	})
	k.publish(numbered(3, 30)...)
	k.start(c)
	k.untilCount("effects", 30)
	k.once("effects", 30)
}

func TestHandlersHaveLimitedTimeAndNumber(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	dead := newDisposed()
	c := k.consumer(consumer.WithDisposer(dead), consumer.OnFailure(tries(1)))
	handle(t, c, "slow", func(ctx context.Context, _ *consumer.Message) error {
		<-ctx.Done()
		return ctx.Err()
	}, consumer.Timeout(50*time.Millisecond))
	var at, most atomic.Int64
	effects := k.effects("effects")
	handle(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		most.Store(max(most.Load(), at.Add(1)))
		defer at.Add(-1)
		return effects(ctx, m)
	}, consumer.Limit(1), consumer.Exactly(inbox.None))
	k.publish(msg("a", "slow", "0"))
	k.publish(numbered(8, 40)...)
	k.start(c)
	k.untilCount("effects", 40)
	k.await("the dead letter", dead.more)
	var late *consumer.TimeoutError
	if err := dead.all()[0].cause; !errors.As(err, &late) || !errors.Is(err, context.DeadlineExceeded) || late.After != 50*time.Millisecond {
		t.Errorf("cause: %v", err)
	}
	if most.Load() != 1 {
		t.Errorf("%d at once", most.Load())
	}
}

func TestBatchHandlersGetALaneTogether(t *testing.T) {
	t.Parallel()
	for _, mode := range []inbox.Mode{inbox.Optimistic, inbox.None} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			dead := newDisposed()
			c := k.consumer(consumer.WithDisposer(dead), consumer.OnFailure(tries(1)), consumer.Exactly(mode))
			var mu sync.Mutex
			var sizes []int
			coll := k.collection("effects")
			err := c.HandleBatch("counted", func(ctx context.Context, ms []*consumer.Message) error {
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
			}, consumer.Batch(5))
			if err != nil {
				t.Fatal(err)
			}
			k.publish(numbered(1, 30)...)
			k.start(c)
			k.untilCount("effects", 29)
			k.until("all offsets", func(context.Context) bool { return k.committed(1)[0] == 30 })
			mu.Lock()
			defer mu.Unlock()
			largest := 0
			for _, n := range sizes {
				largest = max(largest, n)
			}
			if largest < 2 || largest > 5 {
				t.Errorf("batches of %v", sizes)
			}
			if got := dead.all(); len(got) != 1 || string(got[0].m.Value) != "7" {
				t.Errorf("%d dead letters", len(got))
			}
		})
	}
}

// N29: a topic that was created anew begins a new generation of the watermarks, or it would be refused for ever.
func TestN29_RecreatedTopicIsNotRefused(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.consumer()
	handle(t, c, "counted", k.effects("effects"))
	k.publish(numbered(3, 30)...)
	stop := k.start(c)
	k.untilCount("effects", 30)
	stop()
	adm, done := k.admin()
	defer done()
	if res, err := adm.DeleteTopics(k.context(), k.topic); err != nil || res.Error() != nil {
		t.Fatal(err, res.Error())
	}
	k.until("the topic's end", func(ctx context.Context) bool {
		_, err := adm.CreateTopic(ctx, 1, 1, nil, k.topic)
		return err == nil
	})
	k.until("the new topic", func(ctx context.Context) bool {
		return k.kafka.Publish(ctx, k.topic, []*consumer.Message{msg("new", "counted", "0")}) == nil
	})
	k.start(c)
	k.untilCount("effects", 31)
}

func (k *kit) admin() (*kadm.Client, func()) {
	k.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(k.cfg.Brokers...))
	if err != nil {
		k.Fatal(err)
	}
	return kadm.NewClient(cl), cl.Close
}

// N29: contiguous is what was fetched: what retention removed is passed, loudly, or stops the consumer.
func TestN29_OffsetsThatRetentionRemovedArePassed(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	k.publish(numbered(1, 10)...)
	gaps := make(chan struct{}, 10)
	c := k.consumer(consumer.Commits(consumer.CommitEach()), consumer.Batch(1), consumer.OnError(func(_ context.Context, err error) {
		var gap *consumer.RangeError
		if errors.As(err, &gap) && gap.Offset == 10 && gap.Start == 20 {
			gaps <- struct{}{}
		}
	}))
	handle(t, c, "counted", k.effects("effects"))
	stop := k.start(c)
	k.until("the offset", func(context.Context) bool { return k.committed(1)[0] == 10 })
	stop()
	k.publish(numbered(1, 15)...)
	adm, done := k.admin()
	defer done()
	offsets := kadm.Offsets{}
	offsets.AddOffset(k.topic, 0, 20, -1)
	if _, err := adm.DeleteRecords(k.context(), offsets); err != nil {
		t.Fatal(err)
	}
	halting := k.consumer(consumer.HaltOnGap())
	handle(t, halting, "counted", k.effects("effects"))
	var gap *consumer.RangeError
	if err := halting.Run(k.context()); !errors.As(err, &gap) || gap.Start != 20 {
		t.Errorf("Run: %v", err)
	}
	k.start(c)
	k.await("the report", gaps)
	k.until("the offset", func(context.Context) bool { return k.committed(1)[0] == 25 })
}

// A letter that was requeued for one handler is no business of the others.
func TestN18_LettersOfOneHandlerAreForItAlone(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.consumer()
	handle(t, c, "*", k.effects("one"), consumer.Named("one"))
	handle(t, c, "*", k.effects("two"), consumer.Named("two"))
	only := func(to string) *consumer.Message {
		m := msg("a", "counted", "0")
		m.SetHeader("id", []byte(to))
		m.Headers = append(m.Headers, consumer.Header{Key: "outrelay-only", Value: []byte(to)})
		return m
	}
	k.publish(only(k.group+"/one"), only("another/two"), msg("a", "counted", "1"))
	k.start(c)
	k.until("all offsets", func(context.Context) bool { return k.committed(1)[0] == 3 })
	if one, two := k.count("one"), k.count("two"); one != 2 || two != 1 {
		t.Errorf("%d and %d", one, two)
	}
}

func TestMemoryIsBoundedWhileAHandlerHangs(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	stats := &counts{}
	release := make(chan struct{})
	reached := make(chan struct{}, 1000)
	c := k.consumer(consumer.Buffer(50, 4<<10), consumer.MaxAhead(100), consumer.Batch(1), consumer.WithObserver(stats))
	handle(t, c, "counted", func(ctx context.Context, _ *consumer.Message) error {
		reached <- struct{}{}
		select {
		case <-release:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}, consumer.Exactly(inbox.None))
	n := 600
	all := numbered(20, n)
	for i := 0; i < n; i += 20 { // a batch is never taken in by parts
		k.publish(all[i : i+20]...)
	}
	k.start(c)
	k.await("a message", reached)
	k.until("a full buffer", func(context.Context) bool { return stats.heldBytes.Load() >= 4<<10 || stats.held.Load() >= 50 })
	close(release)
	k.until("all offsets", func(context.Context) bool { return k.committed(1)[0] == int64(n) })
	if got := stats.handled.Load(); got != int64(n) {
		t.Errorf("%d of %d were handled", got, n)
	}
	if got := stats.maxHeld.Load(); got > 150 {
		t.Errorf("%d messages were held at once", got)
	}
}
