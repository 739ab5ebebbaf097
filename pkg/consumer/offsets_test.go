package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

// In every mode, nothing is committed past an unfinished message, although later ones are finished.
func TestCommitModesNeverCommitPastAGap(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		mode   []consumer.Option
		itself bool
	}{
		"each":     {[]consumer.Option{consumer.WithCommitInterval(-1), consumer.WithCommitCount(1)}, true},
		"count":    {[]consumer.Option{consumer.WithCommitCount(5), consumer.WithCommitInterval(-1)}, true},
		"interval": {[]consumer.Option{consumer.WithCommitInterval(30 * time.Millisecond), consumer.WithCommitCount(-1)}, true},
		"drain":    {[]consumer.Option{consumer.WithCommitInterval(-1)}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			b := newBlocked("stop", k.insertInto("effects"))
			stats := &counts{}

			cons := k.newConsumer(append(c.mode, consumer.WithSharedTransaction(1), consumer.WithTelemetry(stats))...)
			if err := cons.Handle("*", consumer.Func(b.Handle, "*")); err != nil {
				t.Fatal(err)
			}

			ms := newMessages(20, 40)
			ms[10] = newMessage("alone", "counted", "stop")
			k.publish(ms...)
			stop := k.start(cons)
			k.waitFor("the gap", b.reached)

			alone := inbox.Lane([]byte("alone"), 0)
			others := 0
			for i, m := range ms {
				if i < 10 || inbox.Lane(m.Key, 0) != alone {
					others++
				}
			}

			k.waitCount("effects", others)
			if c.itself {
				k.waitUntil("the messages before the gap", func(context.Context) bool { return k.readCommitted(1)[0] > 10-5 })
			}
			k.waitUntil("all others are handled", func(context.Context) bool { return stats.handled.Load() >= int64(others) })

			var got int64
			// A message is finished just after its effect.
			k.waitUntil("all before the gap", func(ctx context.Context) bool {
				if err := cons.Commit(ctx); err != nil {
					t.Error(err)
				}
				got = k.readCommitted(1)[0]
				return got >= 10
			})

			if got != 10 {
				t.Errorf("offset %d is committed while message 10 is not finished", got)
			}

			close(b.release)
			k.waitCount("effects", 40)
			if c.itself {
				k.waitUntil("the next offsets", func(context.Context) bool { return k.readCommitted(1)[0] > 40-5 })
			}

			stop()
			if got := k.readCommitted(1)[0]; got != 40 {
				t.Errorf("offset %d is committed after the stop", got)
			}
		})
	}
}

// Transactions leave markers in the log, and aborted transactions leave records that no consumer
// may see.
func TestTransactionsLeaveHolesThatOffsetsPass(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]consumer.Option{"by time": consumer.WithCommitInterval(0), "by count": consumer.WithCommitCount(1)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testHolesOfTransactions(t, mode)
		})
	}
}

func testHolesOfTransactions(t *testing.T, mode consumer.Option) {
	t.Helper()
	k := newKit(t, 1)
	cl, err := kgo.NewClient(kgo.SeedBrokers(k.cfg.Brokers...), kgo.TransactionalID(stacktest.Name(t)), kgo.DefaultProduceTopic(k.topic),
		kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.TransactionTimeout(30*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	ctx := k.context()
	n := 0
	write := func(round int) {
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
	for round := range 6 {
		write(round)
	}

	c := k.newConsumer(mode)
	addHandler(t, c, "counted", k.insertInto("effects"))
	k.start(c)
	k.waitCount("effects", n)
	// 30 records and 6 markers: the last offset passes the last marker, although nothing is ever fetched there.
	k.waitUntil("all offsets", func(context.Context) bool { return k.readCommitted(1)[0] == 36 })

	// The same when no message has been finished since.
	write(7)
	k.waitUntil("offsets without a message", func(context.Context) bool { return k.readCommitted(1)[0] == 42 })
	k.checkOnce("effects", n)
}

// Two producers write to one partition in turns, and the last one to begin aborts first.
func TestRecordsOfAbortedTransactionsAreNeverHandled(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	ctx := k.context()
	producer := func() *kgo.Client {
		cl, err := kgo.NewClient(kgo.SeedBrokers(k.cfg.Brokers...), kgo.TransactionalID(stacktest.Name(t)), kgo.DefaultProduceTopic(k.topic),
			kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.TransactionTimeout(30*time.Second))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(cl.Close)
		return cl
	}
	write := func(cl *kgo.Client, value string) {
		t.Helper()
		r := &kgo.Record{Key: []byte("a"), Value: []byte(value), Headers: []kgo.RecordHeader{{Key: "type", Value: []byte("counted")}}}
		if err := cl.ProduceSync(ctx, r).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}

	first, second := producer(), producer()
	must(first.BeginTransaction())
	write(first, "aborted by the first, 0")
	must(second.BeginTransaction())
	write(second, "aborted by the second")
	write(first, "aborted by the first, 1")
	must(second.EndTransaction(ctx, kgo.TryAbort))
	adm, done := k.newAdmin()
	defer done()
	k.waitUntil("the marker of the second transaction", func(ctx context.Context) bool {
		ends, err := adm.ListEndOffsets(ctx, k.topic)
		end, ok := ends.Lookup(k.topic, 0)
		return err == nil && ok && end.Offset == 4
	})
	must(first.EndTransaction(ctx, kgo.TryAbort))
	must(first.BeginTransaction())
	write(first, "committed")
	must(first.EndTransaction(ctx, kgo.TryCommit))

	c := k.newConsumer()
	addHandler(t, c, "counted", k.insertInto("effects"))
	k.start(c)
	k.waitUntil("all offsets", func(context.Context) bool { return k.readCommitted(1)[0] == 7 })
	var values []string
	must(k.db.Collection("effects").Distinct(ctx, "value", bson.D{}).Decode(&values))
	if !slices.Equal(values, []string{"committed"}) {
		t.Errorf("the handler was given %q", values)
	}
}

// N29: a recreated topic begins a new generation of the watermarks. Otherwise its messages would be rejected
// forever.
func TestN29_RecreatedTopicIsNotRejected(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.newConsumer()
	addHandler(t, c, "counted", k.insertInto("effects"))

	k.publish(newMessages(3, 30)...)
	stop := k.start(c)
	k.waitCount("effects", 30)
	stop()

	k.recreateTopic(1)
	k.waitUntil("the record", func(ctx context.Context) bool {
		return k.kafka.Publish(ctx, k.topic, newRecords(newMessage("new", "counted", "0"))) == nil
	})

	k.start(c)
	k.waitCount("effects", 31)
}

// N29: also a new topic with more records than the old one had.
func TestN29_ARefilledTopicIsNotRejected(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.newConsumer()
	addHandler(t, c, "counted", k.insertInto("effects"))

	k.publish(newMessages(3, 20)...)
	stop := k.start(c)
	k.waitCount("effects", 20)
	stop()

	k.recreateTopic(1)
	list := make([]*consumer.Message, 25)
	for i := range list {
		list[i] = newMessage(fmt.Sprintf("key%02d", i%3), "counted", fmt.Sprint("new", i))
	}
	k.waitUntil("the records", func(ctx context.Context) bool { return k.kafka.Publish(ctx, k.topic, newRecords(list...)) == nil })

	k.start(c)
	k.waitCount("effects", 45)
}

// N29: fetched offsets count as contiguous. Records that retention removed are passed with a report, or
// stop the consumer.
func TestN29_OffsetsThatRetentionRemovedArePassed(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	k.publish(newMessages(1, 10)...)
	gaps := make(chan struct{}, 10)
	c := k.newConsumer(consumer.WithCommitCount(1), consumer.WithSharedTransaction(1), consumer.WithErrorHook(func(_ context.Context, err error) {
		var gap *transport.RangeError
		if errors.As(err, &gap) && gap.Offset == 10 && gap.Start == 20 {
			gaps <- struct{}{}
		}
	}))

	addHandler(t, c, "counted", k.insertInto("effects"))
	stop := k.start(c)
	k.waitUntil("the offset", func(context.Context) bool { return k.readCommitted(1)[0] == 10 })
	stop()
	k.publish(newMessages(1, 15)...)
	adm, done := k.newAdmin()
	defer done()
	offsets := kadm.Offsets{}
	offsets.AddOffset(k.topic, 0, 20, -1)
	if _, err := adm.DeleteRecords(k.context(), offsets); err != nil {
		t.Fatal(err)
	}
	halting := k.newConsumer(consumer.WithHaltOnLoss())
	addHandler(t, halting, "counted", k.insertInto("effects"))
	var gap *transport.RangeError
	if err := halting.Run(k.context()); !errors.As(err, &gap) || gap.Start != 20 {
		t.Errorf("Run: %v", err)
	}
	k.start(c)
	k.waitFor("the report", gaps)
	k.waitUntil("the offset", func(context.Context) bool { return k.readCommitted(1)[0] == 25 })
}

// A record of a retry topic is for one handler.
func TestARecordForOneHandlerReachesNoOther(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.newConsumer()
	addHandlerAs(t, c, "one", "*", k.insertInto("one"))
	addHandlerAs(t, c, "two", "*", k.insertInto("two"))
	only := func(to string) *consumer.Message {
		m := newMessage("a", "counted", "0")
		m.SetHeader("id", []byte(to))
		m.Headers = append(m.Headers, event.Header{Key: "outrelay-only", Value: []byte(to)})
		return m
	}

	k.publish(only(k.group+"/one"), only("another/two"), newMessage("a", "counted", "1"))
	k.start(c)
	k.waitUntil("all offsets", func(context.Context) bool { return k.readCommitted(1)[0] == 3 })
	if one, two := k.countDocuments("one"), k.countDocuments("two"); one != 2 || two != 1 {
		t.Errorf("%d and %d", one, two)
	}
}

func TestMemoryIsBoundedWhileAHandlerHangs(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	stats := &counts{}
	release := make(chan struct{})
	reached := make(chan struct{}, 1000)
	c := k.newConsumer(consumer.WithBuffer(4<<10), consumer.WithBufferedRecords(50), consumer.WithMaxAhead(100), consumer.WithSharedTransaction(1), consumer.WithTelemetry(stats))

	addHandler(t, c, "counted", func(ctx context.Context, _ *consumer.Message) error {
		reached <- struct{}{}
		select {
		case <-release:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}, consumer.WithMode(consumer.AtLeastOnce))

	n := 600
	all := newMessages(20, n)
	// The consumer never accepts a part of a batch, so publish small batches.
	for i := 0; i < n; i += 20 {
		k.publish(all[i : i+20]...)
	}

	k.start(c)
	k.waitFor("a message", reached)
	k.waitUntil("a full buffer", func(context.Context) bool { return stats.heldBytes.Load() >= 4<<10 || stats.held.Load() >= 50 })

	close(release)
	k.waitUntil("all offsets", func(context.Context) bool { return k.readCommitted(1)[0] == int64(n) })

	if got := stats.handled.Load(); got != int64(n) {
		t.Errorf("%d of %d were handled", got, n)
	}
	if got := stats.maxHeld.Load(); got > 150 {
		t.Errorf("%d messages were held at once", got)
	}
}
