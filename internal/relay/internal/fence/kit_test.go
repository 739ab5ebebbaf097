package fence

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/compress"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/metadata"
	"github.com/segmentio/kafka-go/protocol/produce"
	"github.com/segmentio/kafka-go/protocol/rawproduce"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/kafkawire/fetched"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find)) }

// patient is how long tests wait for a slow server before they fail. The behavior under test happens at once, or never.
const patient = 30 * time.Second

// admins has the client of kafka-go that a test uses in addition to a Client.
var admins sync.Map

// newClient returns the client of one process.
func newClient(tb testing.TB, brokers ...string) *Client {
	tb.Helper()
	// Tests that kill brokers use the default patience.
	patience := time.Duration(0)
	if len(brokers) == 0 {
		brokers, patience = stacktest.Brokers(tb), patient
	}

	k, err := kafkawire.NewClient(kafkawire.Config{Brokers: brokers, ClientID: "fence-test", Patience: patience})
	if err != nil {
		tb.Fatal(err)
	}

	c := NewClient(k)
	tr := &kafka.Transport{MetadataTTL: 500 * time.Millisecond, ClientID: "fence-test"}
	admins.Store(c, &kafka.Client{Addr: kafka.TCP(brokers...), Transport: tr})
	tb.Cleanup(func() {
		k.Close()
		tr.CloseIdleConnections()
	})

	return c
}

// newFakeCluster returns a cluster of one broker in this process, for responses that a real broker gives rarely.
func newFakeCluster(tb testing.TB, opts ...kfake.Opt) *kfake.Cluster {
	tb.Helper()
	cluster, err := kfake.NewCluster(append(opts, kfake.NumBrokers(1))...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(cluster.Close)
	return cluster
}

// adminOf returns a client for requests that the fence does not send.
func adminOf(c *Client) *kafka.Client {
	got, _ := admins.Load(c)
	return got.(*kafka.Client)
}

// refreshLayout makes the client of the test read the layout again. A request for an impossible topic name always does this.
func refreshLayout(ctx context.Context, c *Client) {
	a := adminOf(c)
	_, _ = a.Transport.RoundTrip(ctx, a.Addr, &metadata.Request{TopicNames: []string{"/"}, AllowAutoTopicCreation: true})
}

func pause(ctx context.Context, d time.Duration) { _ = retry.Sleep(ctx, d) }

// ctxOf returns a context with a time limit.
func ctxOf(tb testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(tb.Context(), d)
	tb.Cleanup(cancel)
	return ctx
}

// newTopic creates a topic, and waits until all its partitions accept writes.
func newTopic(tb testing.TB, c *Client, partitions int) string {
	tb.Helper()
	name := stacktest.Topic(tb, partitions)
	waitReady(tb, c, name, partitions)
	return name
}

func waitReady(tb testing.TB, c *Client, name string, partitions int) {
	tb.Helper()
	ctx := ctxOf(tb, 2*time.Minute)
	stacktest.Eventually(tb, "topic "+name, func() bool {
		h, err := c.Health(ctx, []string{name})
		return err == nil && len(h.layout.Topics[name].Partitions) == partitions && len(h.Healthy(allOf(name, partitions))) == partitions
	})
	refreshLayout(ctx, c)
}

func allOf(topic string, partitions int) []record.TopicPartition {
	var out []record.TopicPartition
	for p := range partitions {
		out = append(out, record.TopicPartition{Topic: topic, Partition: int32(p)})
	}
	return out
}

func at(topic string, p int) record.TopicPartition {
	return record.TopicPartition{Topic: topic, Partition: int32(p)}
}

func newHeader(k, v string) record.Header { return record.Header{Key: []byte(k), Value: []byte(v)} }

func mustIdentify(tb testing.TB, hs ...record.Header) Identity {
	tb.Helper()
	id, ok := IdentityOf(hs)
	if !ok {
		tb.Fatal("no identity")
	}
	return id
}

// encodeBatch returns a batch (v2). Each element of recs contains the headers of one record.
func encodeBatch(codec compress.Compression, id Producer, seq int32, recs ...[]record.Header) []byte {
	var body []byte
	field := func(b, x []byte) []byte { return append(binary.AppendVarint(b, int64(len(x))), x...) }
	for i, hs := range recs {
		r := []byte{0}
		r = binary.AppendVarint(r, 0)
		r = binary.AppendVarint(r, int64(i))
		r = binary.AppendVarint(r, -1) // null key
		r = field(r, []byte("value"))
		r = binary.AppendVarint(r, int64(len(hs)))
		for _, h := range hs {
			r = field(field(r, h.Key), h.Value)
		}
		body = field(body, r)
	}
	if codec != compress.None {

		var z bytes.Buffer
		w := codec.Codec().NewWriter(&z)
		_, _ = w.Write(body)
		_ = w.Close()
		body = z.Bytes()
	}

	b := make([]byte, 4+fetched.HeaderSize, 4+fetched.HeaderSize+len(body))
	b = append(b, body...)
	be, h := binary.BigEndian, b[4:]
	be.PutUint32(b, uint32(len(h)))
	be.PutUint32(h[8:], uint32(len(h)-12))
	be.PutUint32(h[12:], 0xffffffff)
	h[16] = 2
	be.PutUint16(h[21:], uint16(codec))
	be.PutUint32(h[23:], uint32(len(recs)-1))
	be.PutUint64(h[27:], uint64(time.Now().UnixMilli()))
	be.PutUint64(h[35:], uint64(time.Now().UnixMilli()))
	be.PutUint64(h[43:], uint64(id.ID))
	be.PutUint16(h[51:], uint16(id.Epoch))
	be.PutUint32(h[53:], uint32(seq))
	be.PutUint32(h[57:], uint32(len(recs)))
	be.PutUint32(h[17:], crc32.Checksum(h[21:], crc32.MakeTable(crc32.Castagnoli)))
	return b
}

// newRecords returns the headers of one record for each id.
func newRecords(list ...string) [][]record.Header {
	var out [][]record.Header
	for _, id := range list {
		out = append(out, []record.Header{newHeader("id", id)})
	}
	return out
}

// sendOnce sends a batch once. Without a response, the code is -99.
func sendOnce(ctx context.Context, c *Client, tp record.TopicPartition, b []byte) (code int, offset int64) {
	ctx, cancel := context.WithTimeout(ctx, 4*time.Second)
	defer cancel()
	m, err := adminOf(c).Transport.RoundTrip(ctx, adminOf(c).Addr, &rawproduce.Request{Acks: -1, Timeout: 2000, Topics: []rawproduce.RequestTopic{{
		Topic: tp.Topic, Partitions: []rawproduce.RequestPartition{{Partition: tp.Partition, RecordSet: protocol.RawRecordSet{Reader: bytes.NewReader(b)}}},
	}}})
	if err != nil {
		return -99, -1
	}
	r := m.(*produce.Response).Topics[0].Partitions[0]
	return int(r.ErrorCode), r.BaseOffset
}

// sendBatch sends a batch until the broker has decided about it.
func sendBatch(tb testing.TB, c *Client, tp record.TopicPartition, b []byte) (code int, offset int64) {
	tb.Helper()
	ctx := ctxOf(tb, 2*time.Minute)
	stacktest.Eventually(tb, "produce to "+formatPartition(tp), func() bool {
		code, offset = sendOnce(ctx, c, tp, b)
		if code == -99 || kafka.Error(code).Temporary() {
			refreshLayout(ctx, c)
			return false
		}
		return true
	})
	return code, offset
}

func mustSend(tb testing.TB, c *Client, tp record.TopicPartition, b []byte) int64 {
	tb.Helper()
	code, offset := sendBatch(tb, c, tp, b)
	if code != 0 {
		tb.Fatalf("produce to %s: %v", formatPartition(tp), kafka.Error(code))
	}
	return offset
}

// checkZombieRejected sends with the identity of a deposed owner, and checks that the broker rejects its epoch.
func checkZombieRejected(tb testing.TB, c *Client, tp record.TopicPartition, z Producer, seq int32) {
	tb.Helper()
	if code, offset := sendBatch(tb, c, tp, encodeBatch(0, z, seq, newRecords("zombie-"+strconv.Itoa(int(seq)))...)); code != int(kafka.InvalidProducerEpoch) {
		tb.Errorf("zombie %v wrote to %s: code %d, offset %d; want code 47", z, formatPartition(tp), code, offset)
	}
}

// owner is a test's watcher document.
type owner struct {
	id      string
	offsets map[string][]int64
	senders []record.Sender
	events  []Event
	mu      sync.Mutex
}

func newOwner(tb testing.TB, topic string, partitions int) *owner {
	return &owner{id: "tx-" + stacktest.Name(tb), offsets: map[string][]int64{topic: make([]int64, partitions)}}
}

func (o *owner) newInput() In {
	return In{
		TransactionalID: o.id, Offsets: o.offsets, Senders: o.senders, Idle: patient, Stuck: patient, Own: patient,
		Event: func(e Event) {
			// Tests do not check how slow a server is.
			if e.Kind == Waiting {
				return
			}
			o.mu.Lock()
			o.events = append(o.events, e)
			o.mu.Unlock()
		},
	}
}

func (o *owner) hasEvent(kind EventKind) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.ContainsFunc(o.events, func(e Event) bool { return e.Kind == kind })
}

// save stands for the fenced write after a takeover or a release.
func (o *owner) save(s *Session) { o.senders = s.Senders() }

// take takes over with everything released, and saves. changes are applied to the input.
func (o *owner) take(tb testing.TB, c *Client, changes ...func(*In)) *Out {
	tb.Helper()
	in := o.newInput()
	for _, change := range changes {
		change(&in)
	}
	out, err := c.Take(ctxOf(tb, 2*time.Minute), in)
	if err != nil {
		tb.Fatal(err)
	}
	o.save(out.Session)
	return out
}

func (o *owner) takeAll(tb testing.TB, c *Client, changes ...func(*In)) *Out {
	tb.Helper()
	out := o.take(tb, c, changes...)
	if len(out.Quarantined) > 0 {
		tb.Fatalf("quarantined: %v; events %v", out.Quarantined, o.events)
	}
	return out
}

func newNames(prefix string, n int) []string {
	var out []string
	for i := range n {
		out = append(out, fmt.Sprintf("%s-%d", prefix, i))
	}
	return out
}

func adminClient(tb testing.TB) (*kadm.Client, func()) {
	tb.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(stacktest.Brokers(tb)...))
	if err != nil {
		tb.Fatal(err)
	}
	return kadm.NewClient(cl), cl.Close
}

func adminOffsets(topic string, partition int32, offset int64) kadm.Offsets {
	o := kadm.Offsets{}
	o.Add(kadm.Offset{Topic: topic, Partition: partition, At: offset})
	return o
}

// settledWith returns the argument of NextGeneration for an owner that has stopped sending before.
func settledWith(
	unsettled []record.TopicPartition, ends map[string][]int64,
) func() ([]record.TopicPartition, map[string][]int64, error) {
	return func() ([]record.TopicPartition, map[string][]int64, error) { return unsettled, ends, nil }
}
