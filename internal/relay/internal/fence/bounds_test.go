package fence

import (
	"testing"
	"time"

	"github.com/segmentio/kafka-go/compress"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// N8: the records of others need no memory, so many of them do not cut a read-back short.
func TestN08_RecordsOfOthersNeedNoMemory(t *testing.T) {
	t.Parallel()
	c := newClient(t)
	tp := newTopic(t, c, 1)
	o := newOwner(t, tp, 1)
	me := o.takeAll(t, c).Producer
	const own = 50
	mustSend(t, c, at(tp, 0), encodeBatch(0, me, 0, newRecords(newNames("first", own)...)...))
	foreign := encodeBatch(compress.Zstd, Producer{ID: -1, Epoch: -1}, -1, newRecords(newNames("foreign", 10_000)...)...)
	for range 20 {
		mustSend(t, c, at(tp, 0), foreign)
	}
	mustSend(t, c, at(tp, 0), encodeBatch(0, me, own, newRecords(newNames("last", own)...)...))

	in := o.newInput()
	in.Bounds = Bounds{Memory: 2 * own * hitBytes}
	out, err := c.Take(ctxOf(t, 2*time.Minute), in)
	if err != nil {
		t.Fatal(err)
	}
	if tail := out.Released[at(tp, 0)]; tail == nil || tail.Truncated || tail.Hits.Len() != 2*own || o.hasEvent(Truncated) {
		t.Errorf("tail %+v, quarantined %v, events %+v", tail, out.Quarantined, o.events)
	}
}

// N8: the bounds also hold for a partition whose end could not be read before the markers were written.
func TestN08_ALongTailWithAnUnknownEndIsTruncated(t *testing.T) {
	t.Parallel()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "a"), kfake.SleepOutOfOrder())
	if err != nil {
		t.Fatal(err)
	}
	defer cluster.Close()
	c, o := newClient(t, cluster.ListenAddrs()...), newOwner(t, "a", 1)
	me := o.takeAll(t, c).Producer
	const batches, each = 12, 500
	size := 0
	for i := range batches {
		b := encodeBatch(0, me, int32(i*each), newRecords(newNames("batch"+string(rune('a'+i)), each)...)...)
		size += len(b)
		mustSend(t, c, at("a", 0), b)
	}
	cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.ListOffsets}, Err: kerr.LeaderNotAvailable, Count: -1})

	in := o.newInput()
	in.Bounds = Bounds{Bytes: int64(size) / 4}
	out, err := c.Take(ctxOf(t, 2*time.Minute), in)
	if err != nil {
		t.Fatal(err)
	}
	tail := out.Released[at("a", 0)]
	if tail == nil || !tail.Truncated || tail.Markers != 2 {
		t.Fatalf("tail %+v, quarantined %v", tail, out.Quarantined)
	}
	if n := tail.Hits.Len(); n < each || n > batches*each*3/4 {
		t.Errorf("%d of %d records read with a bound of a quarter", n, batches*each)
	}
}
