//go:build unix

package sink

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// TestPartitionIsJavasChoice: partitionByKey agrees with another client.
func TestPartitionIsJavasChoice(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 200).Draw(t, "partitions")
		key := rapid.SliceOfN(rapid.Byte(), 0, 40).Draw(t, "key")
		if key == nil {
			key = []byte{}
		}
		want := kgo.StickyKeyPartitioner(nil).ForTopic("t").Partition(&kgo.Record{Key: key}, n)
		if got := partitionByKey(&record.Record{Key: key}, int32(n)); int(got) != want {
			t.Fatalf("key %x of %d partitions: got partition %d, want %d", key, n, got, want)
		}
	})

	a := record.Record{Headers: []record.Header{{Key: []byte("id"), Value: []byte("one")}}}
	if first := partitionByKey(&a, 1000); first != partitionByKey(&a, 1000) {
		t.Error("the partition of a record without a key changes")
	}

	// A preset may write constant headers before the id.
	context := record.Header{Key: []byte("context"), Value: []byte("the same")}
	b := record.Record{Headers: []record.Header{context, a.Headers[0]}}
	if got, want := partitionByKey(&b, 1000), partitionByKey(&a, 1000); got != want {
		t.Errorf("a header before the id changes the partition from %d to %d", want, got)
	}
}

// counter receives acks like the dispatcher, and recycles their slices.
type counter struct {
	sink  *Sink
	n     atomic.Int64
	bytes atomic.Int64
	freed *sync.Cond
}

func (c *counter) Acked(_ record.TopicPartition, _ int64, tickets []record.Ticket, bytes int) {
	c.n.Add(int64(len(tickets)))
	c.bytes.Add(-int64(bytes))
	c.sink.c.Recycle(tickets)
	c.freed.L.Lock()
	c.freed.Broadcast()
	c.freed.L.Unlock()
}
func (c *counter) Restore(record.TopicPartition, int64) {}
func (c *counter) Idle(record.TopicPartition, int64)    {}

// waitBelow blocks until at most that many bytes are unresolved.
func (c *counter) waitBelow(most int64) {
	c.freed.L.Lock()
	for c.bytes.Load() > most {
		c.freed.Wait()
	}
	c.freed.L.Unlock()
}

// newFlood opens a sink with a counter. It returns a function that sends n records of 1 KB within a
// memory budget, as the dispatcher does.
func newFlood(tb testing.TB, cfg testConfig, topic string, budget int64) func(n int) {
	r := openSink(tb, sinkOptions{cfg: cfg, holder: new(openHolder)})
	r.send(tb, newRecord(topic, "k", "open"))
	r.acks.waitResolved(1)

	c := &counter{sink: r.Sink, freed: sync.NewCond(&sync.Mutex{})}
	r.Sink.acks = c
	r.EndReread()
	x := newRecord(topic, "key-00000000", "")
	x.Value = make([]byte, 1000)
	x.Headers = append(x.Headers, record.Header{Key: []byte("type"), Value: []byte("OrderPlaced")})
	size := int64(r.Size(&x))
	seq := uint32(0)

	return func(n int) {
		for i := range n {
			seq++
			binary.BigEndian.PutUint32(x.Key[4:], seq)
			binary.BigEndian.PutUint32(x.Value, seq)
			if c.bytes.Load()+size > budget {
				r.Flush()
				c.waitBelow(budget - size)
			}
			c.bytes.Add(size)
			if err := r.Send(&x, record.Ticket(i)); err != nil {
				tb.Fatal(err)
			}
			if i%64 == 63 {
				r.Flush()
			}
		}
		r.Flush()
		c.waitBelow(0)
	}
}

// TestSendToAckHardlyAllocates: with warm free lists, nearly all records are sent without an allocation.
func TestSendToAckHardlyAllocates(t *testing.T) {
	topic := stacktest.Topic(t, 6)
	run := newFlood(t, testConfig{}, topic, 16<<20)
	run(40_000) // warms the free lists

	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	const n = 60_000
	run(n)
	runtime.ReadMemStats(&after)

	per := float64(after.Mallocs-before.Mallocs) / n
	t.Logf("%.4f allocations per record, %d bytes", per, (after.TotalAlloc-before.TotalAlloc)/n)
	if per > 0.1 {
		t.Errorf("%.3f allocations per record, want at most 0.1", per)
	}
}

// TestMemoryStaysNearTheBudget: a broker with a thousand partitions has stopped. The sink holds
// about the memory of the records, not a full chunk for each partition.
func TestMemoryStaysNearTheBudget(t *testing.T) {
	const partitions = 1000
	_, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(partitions, "a"))
	u := fakeOptions(brokers...)
	u.gate = func() bool { return true }
	r := openSink(t, u)
	r.send(t, newRecord("a", "k", "open"))
	r.acks.waitResolved(1)

	r.mu.Lock()
	r.paused = true
	r.mu.Unlock()
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)

	x := newRecord("a", "", "")
	x.Value = make([]byte, 1000)
	sent := 0
	for i := 0; sent < 24<<20; i++ {
		x.Key = fmt.Appendf(x.Key[:0], "k%d", i)
		if i%2 == 0 {
			// Half of the records go to one partition.
			x.Key = []byte("hot")
		}
		if err := r.Send(&x, record.Ticket(i+1)); err != nil {
			t.Fatal(err)
		}
		sent += r.Size(&x)
	}

	runtime.GC()
	runtime.ReadMemStats(&after)
	held := int64(after.HeapAlloc) - int64(before.HeapAlloc)
	t.Logf("%d MiB sent, %d MiB held", sent>>20, held>>20)
	if held > 2*int64(sent) {
		t.Errorf("%d MiB are held for %d MiB of records, want at most twice as much", held>>20, sent>>20)
	}
}

// BenchmarkSendToAck measures the way of a record through the sink to a real broker and back, at
// full rate: 1 KB, 6 partitions, acks of all in-sync replicas.
func BenchmarkSendToAck(b *testing.B) {
	for _, codec := range []string{"none", "lz4"} {
		b.Run(codec, func(b *testing.B) {
			topic := stacktest.Topic(b, 6)
			run := newFlood(b, testConfig{Compression: codec}, topic, 24<<20)
			run(10_000)

			b.SetBytes(1000)
			b.ReportAllocs()
			cpu := cpuTime(b)
			b.ResetTimer()
			run(b.N)
			b.StopTimer()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "records/s")
			b.ReportMetric((cpuTime(b)-cpu)/float64(b.N)*1e6, "cpu-s/million")
		})
	}
}

// cpuTime returns the CPU time of the process in seconds.
func cpuTime(tb testing.TB) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		tb.Fatal(err)
	}
	return float64(u.Utime.Sec+u.Stime.Sec) + float64(u.Utime.Usec+u.Stime.Usec)/1e6
}
