package sink

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/sasl"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/internal/fence"
)

func TestMain(m *testing.M) {
	stacktest.Wide(8)
	// The fake cluster leaks a goroutine if it is closed while one of its control functions sleeps.
	fake := goleak.IgnoreAnyFunction("github.com/twmb/franz-go/pkg/kfake.(*Cluster).runControl.func1")
	goleak.VerifyTestMain(stacktest.Settled(m, func(...goleak.Option) error { return goleak.Find(fake) }), fake)
}

// testTimeout is how long tests wait for an event that happens soon unless the test fails. It is long
// because the machine may be slow.
const testTimeout = time.Minute

// place is the offset of a record in its partition.
type place struct {
	tp  record.TopicPartition
	off int64
}

// rejection is the outcome of a record that is at fault itself.
type rejection struct {
	*record.Rejection
	ID, NS []byte
}

// ledger is the dispatcher of a test. It checks that each ticket is acked or rejected exactly once.
// As a Holder it holds nothing.
type ledger struct {
	tb      testing.TB
	recycle func([]record.Ticket)

	mu       sync.Mutex
	acked    map[record.Ticket]place
	rejected map[record.Ticket]*rejection
	restored map[record.TopicPartition][]int64
	idle     map[record.TopicPartition]int64
	bytes    int
	changed  chan struct{}

	offsetHolds atomic.Int64 // calls of HoldOffsets
}

func newLedger(tb testing.TB) *ledger {
	return &ledger{
		tb:       tb,
		acked:    map[record.Ticket]place{},
		rejected: map[record.Ticket]*rejection{},
		restored: map[record.TopicPartition][]int64{},
		idle:     map[record.TopicPartition]int64{},
		changed:  make(chan struct{}),
	}
}

// signalLocked wakes waitUntil.
func (l *ledger) signalLocked() {
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
	l.signalLocked()
}

func (l *ledger) Withdrawn(list []record.Withdrawn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range list {
		if w.Topic == "" {
			l.tb.Error("a rejection without a topic")
		}
		if w.Rejection == nil {
			l.tb.Errorf("ticket %d was given back: %v", w.Ticket, w.Held)
			continue
		}

		if _, twice := l.rejected[w.Ticket]; twice {
			l.tb.Errorf("ticket %d was rejected twice", w.Ticket)
		}
		l.rejected[w.Ticket] = &rejection{w.Rejection, w.ID, w.NS}
		l.bytes -= w.Bytes
	}
	l.signalLocked()
}

func (*ledger) CheckGate(*record.Record, bool) error        { return nil }
func (*ledger) MemoryPressure() (record.Ticket, bool, bool) { return 0, false, false }
func (*ledger) Ready(string)                                {}
func (l *ledger) HoldOffsets()                              { l.offsetHolds.Add(1) }

func (l *ledger) Restore(tp record.TopicPartition, offset int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.restored[tp] = append(l.restored[tp], offset)
	l.signalLocked()
}

func (l *ledger) Idle(tp record.TopicPartition, offset int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.idle[tp] = offset
	l.signalLocked()
}

// waitUntil waits until ok returns true. It calls ok with the lock of the ledger.
func (l *ledger) waitUntil(d time.Duration, condition string, ok func() bool) {
	l.tb.Helper()
	deadline := time.NewTimer(d)
	defer deadline.Stop()
	for {
		l.mu.Lock()
		done, changed := ok(), l.changed
		acked, rejected := len(l.acked), len(l.rejected)
		l.mu.Unlock()
		if done {
			return
		}

		select {
		case <-changed:
		case <-deadline.C:
			l.tb.Fatalf("%s: not within %s (%d acked, %d rejected)", condition, d, acked, rejected)
		}
	}
}

// waitResolved waits until n records are acked or rejected, and checks that they have released the
// memory that they had reserved.
func (l *ledger) waitResolved(n int) {
	l.tb.Helper()
	condition := fmt.Sprintf("%d records are acked or rejected", n)
	l.waitUntil(testTimeout, condition, func() bool { return len(l.acked)+len(l.rejected) == n })

	l.mu.Lock()
	defer l.mu.Unlock()
	if l.bytes != 0 {
		l.tb.Errorf("%d bytes stay reserved, want 0", l.bytes)
	}
}

// claims is the watcher document of a test.
type claims struct {
	mu      sync.Mutex
	senders []record.Sender
	offsets map[string][]int64
	saves   int // calls of Save
	fail    error
	saved   func(offsets map[string][]int64)
}

func (c *claims) SaveSenders(_ context.Context, senders []record.Sender, offsets map[string][]int64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.saves++
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

func (c *claims) readDocument() ([]record.Sender, map[string][]int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	offsets := map[string][]int64{}
	for t, list := range c.offsets {
		offsets[t] = slices.Clone(list)
	}
	return slices.Clone(c.senders), offsets
}

// testSink is a sink that runs until the test ends.
type testSink struct {
	*Sink
	acks   *ledger
	claims *claims
	opener *Opener
	ended  chan error
	cancel context.CancelFunc
	next   record.Ticket
}

type sinkOptions struct {
	cfg    testConfig
	txid   string
	claims *claims
	gate   func() bool
	noRun  bool
	holder record.Holder // nil: the ledger, and nothing is parked
	acks   *ledger       // of the previous sink
	every  time.Duration // reopenEvery, unless it is zero
}

func discardLog() *slog.Logger { return slog.New(slog.DiscardHandler) }

// defaultParkBytes is the memory of a sink whose test sets none.
const defaultParkBytes = 32 << 20

// testConfig has the settings of the connections and of the sinks of a test.
type testConfig struct {
	Brokers           []string
	ClientID          string
	TLS               *tls.Config
	SASL              *sasl.Login
	Dial              func(ctx context.Context, network, address string) (net.Conn, error)
	Compression       string
	RequestTimeout    time.Duration
	MaxBatchBytes     int
	MaxRequestBytes   int
	RequestsPerBroker int
	Create            *kafkawire.TopicCreate
	ParkAfter         time.Duration
	ParkBytes         int64
	Log               *slog.Logger
	Metrics           *metrics.Set
	Patience          time.Duration
}

// newClient returns a client of the test's brokers. The shared broker may be slow, so its requests get
// more time.
func newClient(tb testing.TB, cfg testConfig) *kafkawire.Client {
	tb.Helper()
	if cfg.Brokers == nil {
		cfg.Brokers, cfg.Patience = stacktest.Brokers(tb), testTimeout/2
	}

	conn := kafkawire.Config{Brokers: cfg.Brokers, ClientID: cfg.ClientID, TLS: cfg.TLS, Dial: cfg.Dial, Patience: cfg.Patience}
	if cfg.SASL != nil {
		conn.SASL = cfg.SASL
	}

	c, err := kafkawire.NewClient(conn)
	if err != nil {
		tb.Fatal(err)
	}

	tb.Cleanup(c.Close)
	return c
}

func newOpener(tb testing.TB, cfg testConfig) *Opener {
	tb.Helper()
	if cfg.Log == nil {
		cfg.Log = discardLog()
	}

	o, err := NewOpener(Config{
		Compression: cfg.Compression, RequestTimeout: cmp.Or(cfg.RequestTimeout, 10*time.Second),
		RequestsPerBroker: cmp.Or(cfg.RequestsPerBroker, 1), Create: cfg.Create, ParkBytes: cmp.Or(cfg.ParkBytes, defaultParkBytes),
		Log: cfg.Log, Metrics: cfg.Metrics,
	}, newClient(tb, cfg))
	if err != nil {
		tb.Fatal(err)
	}

	o.limits.batchBytes = cmp.Or(cfg.MaxBatchBytes, o.limits.batchBytes)
	o.limits.requestBytes = cmp.Or(cfg.MaxRequestBytes, o.limits.requestBytes)
	o.limits.parkAfter = cmp.Or(cfg.ParkAfter, o.limits.parkAfter)
	if cfg.Brokers == nil {
		o.patience = testTimeout / 2
	}

	return o
}

// openSink opens a sink and starts it, unless u.noRun is set.
func openSink(tb testing.TB, u sinkOptions) *testSink {
	tb.Helper()
	r := &testSink{acks: newLedger(tb), claims: u.claims, ended: make(chan error, 1)}
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

	r.opener = newOpener(tb, u.cfg)
	if u.every != 0 {
		r.opener.limits.reopenEvery = u.every
	}
	if u.txid == "" {
		u.txid = "outrelay.test." + stacktest.Name(tb)
	}

	senders, offsets := r.claims.readDocument()
	ctx, cancel := context.WithTimeout(tb.Context(), testTimeout)
	defer cancel()
	var err error
	to := TakeOver{Holder: u.holder, Fence: fence.In{TransactionalID: u.txid, Senders: senders, Offsets: offsets, Gate: u.gate}}
	r.Sink, err = r.opener.Open(ctx, to, r.claims, r.acks)
	if err != nil {
		tb.Fatal(err)
	}

	r.acks.recycle = r.opener.Recycle
	if u.noRun {
		return r
	}
	r.run(tb)
	return r
}

// run starts the sink. It ends when the test ends.
func (r *testSink) run(tb testing.TB) {
	run, stop := context.WithCancel(context.WithoutCancel(tb.Context()))
	r.cancel = stop
	var wg sync.WaitGroup
	wg.Go(func() { r.ended <- r.Run(run) })
	tb.Cleanup(func() {
		stop()
		wg.Wait()
		r.opener.kafka.Close()
	})
}

// kill ends the sink without a graceful stop. For Kafka this looks like a crash.
func (r *testSink) kill() error {
	r.cancel()
	return <-r.ended
}

// waitEnded waits until the sink ends because of an error, and returns the error.
func (r *testSink) waitEnded(tb testing.TB) error {
	tb.Helper()
	select {
	case err := <-r.ended:
		return err
	case <-time.After(testTimeout):
		tb.Fatal("the sink has not ended")
		return nil
	}
}

// send sends a record with the next ticket, and returns the ticket.
func (r *testSink) send(tb testing.TB, rec record.Record) record.Ticket {
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

// commitMS is the commit time of all events. The stream repeats an event with its time.
var commitMS = time.Now().UnixMilli()

// newRecord returns a record whose id is its value.
func newRecord(topic, key, value string) record.Record {
	return record.Record{
		Topic:     topic,
		Partition: record.AnyPartition,
		Key:       []byte(key),
		Value:     []byte(value),
		TimeMS:    commitMS,
		Headers:   []record.Header{{Key: []byte("id"), Value: []byte(value)}},
	}
}

// readTopic returns all records of a topic by partition, in order, as another client reads them.
func readTopic(tb testing.TB, brokers []string, topic string) map[int32][]*kgo.Record {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	cl, err := kgo.NewClient(
		kgo.SeedBrokers(brokers...),
		kgo.ConsumeTopics(topic),
		kgo.FetchMaxWait(100*time.Millisecond),
		kgo.KeepControlRecords())
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

// valuesOf returns the values of each partition, in order.
func valuesOf(m map[int32][]*kgo.Record) map[int32][]string {
	out := map[int32][]string{}
	for p, list := range m {
		for _, r := range list {
			out[p] = append(out[p], string(r.Value))
		}
	}
	return out
}

// requireInOrder checks that each key has the values 0 to n−1, each once, in order.
func requireInOrder(tb testing.TB, m map[int32][]*kgo.Record, keys, n int) {
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
				tb.Fatalf("key %s: got value %d, want %d (partition %d, offset %d)", k, i, next[k], r.Partition, r.Offset)
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

// newFakeCluster returns a cluster in this process, for responses that a real broker gives rarely.
func newFakeCluster(tb testing.TB, opts ...kfake.Opt) (*kfake.Cluster, []string) {
	tb.Helper()
	c, err := kfake.NewCluster(opts...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(c.Close)
	return c, c.ListenAddrs()
}

// addPartitions adds partitions to a topic and waits until they have leaders.
func addPartitions(t *testing.T, topic string, n int) {
	t.Helper()
	res, err := newAdmin(t).CreatePartitions(t.Context(), &kafka.CreatePartitionsRequest{
		Topics: []kafka.TopicPartitionsConfig{{Name: topic, Count: int32(n)}},
	})
	if err == nil {
		err = res.Errors[topic]
	}
	if err != nil {
		t.Fatal(err)
	}

	c := newClient(t, testConfig{})
	stacktest.Eventually(t, "the new partitions have leaders", func() bool {
		l, err := c.Metadata(t.Context(), []string{topic})
		if err != nil {
			return false
		}
		parts := l.Topics[topic].Partitions
		return len(parts) == n && !slices.ContainsFunc(parts, func(p kafkawire.PartitionLayout) bool { return p.Leader < 0 })
	})
}
