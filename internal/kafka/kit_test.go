package kafka

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/record"
)

func TestMain(m *testing.M) {
	stacktest.Wide(4)
	// The fake cluster leaves a goroutine behind when a control function of its slept while the cluster was closed.
	fake := goleak.IgnoreAnyFunction("github.com/twmb/franz-go/pkg/kfake.(*Cluster).runControl.func1")
	goleak.VerifyTestMain(stacktest.Settled(m, func(...goleak.Option) error { return goleak.Find(fake) }), fake)
}

// patient is how long tests wait for a slow machine: for what happens soon, or never.
const patient = time.Minute

// place is where a record stands.
type place struct {
	tp  record.TopicPartition
	off int64
}

// refusal is the fate of a record that is at fault itself.
type refusal struct {
	*record.Refusal
	ID, NS []byte
}

// ledger is the dispatcher of a test: it counts that each ticket is answered exactly once. As a Holder it holds nothing.
type ledger struct {
	tb      testing.TB
	recycle func([]record.Ticket)

	mu       sync.Mutex
	acked    map[record.Ticket]place
	refused  map[record.Ticket]*refusal
	restored map[record.TopicPartition][]int64
	idle     map[record.TopicPartition]int64
	bytes    int
	changed  chan struct{}
}

func newLedger(tb testing.TB) *ledger {
	return &ledger{
		tb: tb, acked: map[record.Ticket]place{}, refused: map[record.Ticket]*refusal{},
		restored: map[record.TopicPartition][]int64{}, idle: map[record.TopicPartition]int64{}, changed: make(chan struct{}),
	}
}

func (l *ledger) change() {
	close(l.changed)
	l.changed = make(chan struct{})
}

func (l *ledger) Acked(tp record.TopicPartition, base int64, tickets []record.Ticket, bytes int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, t := range tickets {
		if _, twice := l.acked[t]; twice {
			l.tb.Errorf("ticket %d was acked twice", t)
		}
		l.acked[t] = place{tp, base + int64(i)}
	}
	l.bytes -= bytes
	if l.recycle != nil {
		l.recycle(tickets)
	}
	l.change()
}

func (l *ledger) Withdrawn(list []record.Withdrawn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range list {
		if w.Topic == "" {
			l.tb.Error("a refusal without a topic")
		}
		if w.Why == nil {
			l.tb.Errorf("ticket %d was given back: %v", w.Ticket, w.Held)
			continue
		}
		if _, twice := l.refused[w.Ticket]; twice {
			l.tb.Errorf("ticket %d was refused twice", w.Ticket)
		}
		l.refused[w.Ticket] = &refusal{w.Why, w.ID, w.NS}
		l.bytes -= w.Bytes
	}
	l.change()
}

func (*ledger) Closed(*record.Record, bool) error    { return nil }
func (*ledger) Found(record.TopicPartition, int64)   {}
func (*ledger) Pressed() (record.Ticket, bool, bool) { return 0, false, false }
func (*ledger) Ready(string)                         {}

func (l *ledger) Restore(tp record.TopicPartition, offset int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.restored[tp] = append(l.restored[tp], offset)
	l.change()
}

func (l *ledger) Idle(tp record.TopicPartition, offset int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.idle[tp] = offset
	l.change()
}

// until waits for a condition of the ledger, which is locked while ok looks at it.
func (l *ledger) until(d time.Duration, what string, ok func() bool) {
	l.tb.Helper()
	deadline := time.NewTimer(d)
	defer deadline.Stop()
	for {
		l.mu.Lock()
		done, changed := ok(), l.changed
		acked, refused := len(l.acked), len(l.refused)
		l.mu.Unlock()
		if done {
			return
		}
		select {
		case <-changed:
		case <-deadline.C:
			l.tb.Fatalf("%s: not within %s (%d acked, %d refused)", what, d, acked, refused)
		}
	}
}

func (l *ledger) resolved(n int) {
	l.tb.Helper()
	l.until(patient, fmt.Sprintf("%d answers", n), func() bool { return len(l.acked)+len(l.refused) == n })
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.bytes != 0 {
		l.tb.Errorf("%d bytes of the budget are lost", l.bytes)
	}
}

// claims is the watcher document of a test.
type claims struct {
	mu      sync.Mutex
	senders []record.Sender
	offsets map[string][]int64
	asked   int // calls of Save
	fail    error
	saved   func(offsets map[string][]int64)
}

func (c *claims) Save(_ context.Context, senders []record.Sender, offsets map[string][]int64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.asked++
	if c.fail != nil {
		return c.fail
	}
	if senders != nil {
		c.senders = senders
	}
	if c.offsets == nil {
		c.offsets = map[string][]int64{}
	}
	for topic, list := range offsets {
		have := c.offsets[topic]
		for p, off := range list {
			for len(have) <= p {
				have = append(have, 0)
			}
			if off >= 0 {
				have[p] = off
			}
		}
		c.offsets[topic] = have
	}
	if c.saved != nil {
		c.saved(offsets)
	}
	return nil
}

func (c *claims) document() ([]record.Sender, map[string][]int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	offsets := map[string][]int64{}
	for t, list := range c.offsets {
		offsets[t] = slices.Clone(list)
	}
	return slices.Clone(c.senders), offsets
}

// rig is a sink that runs until the test ends.
type rig struct {
	*Sink
	acks   *ledger
	claims *claims
	client *Client
	ended  chan error
	cancel context.CancelFunc
	next   record.Ticket
}

type setUp struct {
	cfg    Config
	txid   string
	claims *claims
	gate   func() bool
	noRun  bool
	holder record.Holder // nil: the ledger, and nothing is parked
	acks   *ledger       // of the sink before
	every  time.Duration // reopenEvery, if it is not zero
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func newClient(tb testing.TB, cfg Config) *Client {
	tb.Helper()
	shared := cfg.Brokers == nil
	if shared {
		cfg.Brokers = stacktest.Brokers(tb)
	}
	if cfg.Log == nil {
		cfg.Log = quiet()
	}
	c, err := NewClient(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	if shared {
		c.patience, c.fence.Timeout = patient/2, patient/2
	}
	tb.Cleanup(c.Close)
	return c
}

func open(tb testing.TB, u setUp) *rig {
	tb.Helper()
	r := &rig{acks: newLedger(tb), claims: u.claims, ended: make(chan error, 1)}
	if r.claims == nil {
		r.claims = &claims{}
	}
	if u.acks != nil {
		r.acks = u.acks
	}
	if u.holder == nil {
		u.holder, u.cfg.ParkAfter = r.acks, time.Hour
	}
	if u.gate == nil {
		u.gate = func() bool { return true }
	}
	r.client = newClient(tb, u.cfg)
	if u.every != 0 {
		r.client.reopenEvery = u.every
	}
	if u.txid == "" {
		u.txid = "outrelay.test." + stacktest.Name(tb)
	}
	senders, offsets := r.claims.document()
	ctx, cancel := context.WithTimeout(tb.Context(), patient)
	defer cancel()
	var err error
	r.Sink, err = Open(ctx, r.client, TakeOver{TransactionalID: u.txid, Senders: senders, Offsets: offsets, Gate: u.gate, Holder: u.holder}, r.claims, r.acks)
	if err != nil {
		tb.Fatal(err)
	}
	r.acks.recycle = r.Recycle
	if u.noRun {
		return r
	}
	r.run(tb)
	return r
}

func (r *rig) run(tb testing.TB) {
	run, stop := context.WithCancel(context.WithoutCancel(tb.Context()))
	r.cancel = stop
	var wg sync.WaitGroup
	wg.Go(func() { r.ended <- r.Run(run) })
	tb.Cleanup(func() {
		stop()
		wg.Wait()
		r.client.Close()
	})
}

// kill ends the sink as a crash would, as far as Kafka sees it.
func (r *rig) kill() error {
	r.cancel()
	return <-r.ended
}

// end waits for the error that ends the sink by itself.
func (r *rig) end(tb testing.TB) error {
	tb.Helper()
	select {
	case err := <-r.ended:
		return err
	case <-time.After(patient):
		tb.Fatal("the sink goes on")
		return nil
	}
}

// send gives the next ticket to a record.
func (r *rig) send(tb testing.TB, rec record.Record) record.Ticket {
	tb.Helper()
	t := r.next
	r.next++
	r.acks.mu.Lock()
	r.acks.bytes += r.Size(&rec)
	r.acks.mu.Unlock()
	if err := r.Send(&rec, t); err != nil {
		tb.Fatal(err)
	}
	return t
}

// rec is a record with an id.
func rec(topic, key, value string) record.Record {
	return record.Record{
		Topic: topic, Partition: record.AnyPartition, Key: []byte(key), Value: []byte(value), TimeMS: time.Now().UnixMilli(),
		Headers: []record.Header{{Key: []byte("id"), Value: []byte(value)}},
	}
}

// read returns all records of a topic, by partition in their order, as another client sees them.
func read(tb testing.TB, brokers []string, topic string) map[int32][]*kgo.Record {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patient)
	defer cancel()
	cl, err := kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.ConsumeTopics(topic), kgo.FetchMaxWait(100*time.Millisecond), kgo.KeepControlRecords())
	if err != nil {
		tb.Fatal(err)
	}
	defer cl.Close()
	ends, err := kadm.NewClient(cl).ListEndOffsets(ctx, topic)
	if err != nil {
		tb.Fatal(err)
	}
	left := map[int32]int64{}
	ends.Each(func(o kadm.ListedOffset) {
		if o.Offset > 0 {
			left[o.Partition] = o.Offset
		}
	})
	out := map[int32][]*kgo.Record{}
	for len(left) > 0 {
		fs := cl.PollFetches(ctx)
		if err := fs.Err0(); err != nil {
			tb.Fatalf("reading %s: %v; left %v", topic, err, left)
		}
		fs.EachRecord(func(r *kgo.Record) {
			if !r.Attrs.IsControl() {
				out[r.Partition] = append(out[r.Partition], r)
			}
			if r.Offset+1 >= left[r.Partition] {
				delete(left, r.Partition)
			}
		})
	}
	return out
}

// values lists the values of all partitions, each in its order.
func values(m map[int32][]*kgo.Record) map[int32][]string {
	out := map[int32][]string{}
	for p, list := range m {
		for _, r := range list {
			out[p] = append(out[p], string(r.Value))
		}
	}
	return out
}

// inOrder checks a log: each key has the values 0 to n−1, each once, in order.
func inOrder(tb testing.TB, m map[int32][]*kgo.Record, keys, n int) {
	tb.Helper()
	next := map[string]int{}
	for _, p := range slices.Sorted(maps.Keys(m)) {
		for _, r := range m[p] {
			k := string(r.Key)
			_, num, _ := strings.Cut(string(r.Value), "/")
			i, err := strconv.Atoi(num)
			if err != nil {
				tb.Fatal(err)
			}
			if i != next[k] {
				tb.Fatalf("key %s: %d stands where %d should (partition %d, offset %d)", k, i, next[k], r.Partition, r.Offset)
			}
			next[k]++
		}
	}
	if len(next) != keys {
		tb.Fatalf("%d keys, want %d", len(next), keys)
	}
	for k, i := range next {
		if i != n {
			tb.Errorf("key %s has %d records, want %d", k, i, n)
		}
	}
}

// fake is a cluster in this process, for answers that a real broker gives rarely.
func fake(tb testing.TB, opts ...kfake.Opt) (*kfake.Cluster, []string) {
	tb.Helper()
	c, err := kfake.NewCluster(opts...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(c.Close)
	return c, c.ListenAddrs()
}

// grow adds partitions to a topic and waits until they have leaders.
func grow(t *testing.T, topic string, n int) {
	t.Helper()
	res, err := admin(t).CreatePartitions(t.Context(), &kafka.CreatePartitionsRequest{Topics: []kafka.TopicPartitionsConfig{{Name: topic, Count: int32(n)}}})
	if err == nil {
		err = res.Errors[topic]
	}
	if err != nil {
		t.Fatal(err)
	}
	c := newClient(t, Config{})
	until(t, "the new partitions have leaders", func() bool {
		l, err := c.Metadata(t.Context(), []string{topic})
		if err != nil {
			return false
		}
		parts := l.Topics[topic].Partitions
		return len(parts) == n && !slices.ContainsFunc(parts, func(p PartitionLayout) bool { return p.Leader < 0 })
	})
}

// until polls a condition that has no signal.
func until(tb testing.TB, what string, ok func() bool) {
	tb.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(patient)
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			tb.Fatalf("%s: not in time", what)
		}
	}
}
