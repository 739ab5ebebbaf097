package fence

import (
	"testing"

	"github.com/segmentio/kafka-go/compress"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// anonymous is a producer without an id, as that of another client.
var anonymous = Producer{ID: -1, Epoch: -1}

// tailRecords is the number of records in each batch of sendTail.
const tailRecords = 500

// sendTail sends batches of tailRecords records, and returns their size. The first record is "batch-a-0".
func sendTail(tb testing.TB, c *Client, tp record.TopicPartition, codec compress.Compression, me Producer, batches int) (size int) {
	tb.Helper()
	for i := range batches {
		b := encodeBatch(codec, me, int32(i*tailRecords), newRecords(newNames("batch-"+string(rune('a'+i)), tailRecords)...)...)
		size += len(b)
		mustSend(tb, c, tp, b)
	}
	return size
}

// N8: of a tail beyond the bound only the start is read.
func TestN08_LongTailIsTruncated(t *testing.T) {
	t.Parallel()
	c := newClient(t)
	tp := newTopic(t, c, 1)
	o := newOwner(t, tp, 1)
	const batches = 60
	size := sendTail(t, c, at(tp, 0), compress.None, o.takeAll(t, c).Producer, batches)

	out := o.take(t, c, func(in *In) { in.Bounds.Bytes = int64(size) / 4 })
	tail := out.Released[at(tp, 0)]
	if tail == nil || !tail.Truncated || !o.hasEvent(Truncated) {
		t.Fatalf("tail %+v, quarantined %v, events %+v", tail, out.Quarantined, o.events)
	}
	if n := tail.Hits.Len(); n < tailRecords || n > batches*tailRecords/2 {
		t.Errorf("%d of %d records read with a bound of a quarter", n, batches*tailRecords)
	}
	if _, ok := tail.Hits.Take(mustIdentify(t, newHeader("id", "batch-a-0")), AnyTime); !ok {
		t.Error("the first record was not read")
	}
}

// N8, I7: the records of small compressed batches need more memory than their bytes. The records that fit are kept.
func TestN08_TheMemoryOfTheReadBackIsBounded(t *testing.T) {
	t.Parallel()
	c := newClient(t)
	tp := newTopic(t, c, 2)
	o := newOwner(t, tp, 2)
	me := o.takeAll(t, c).Producer
	sendTail(t, c, at(tp, 0), compress.Zstd, me, 12)
	sendTail(t, c, at(tp, 1), compress.Zstd, me, 1)

	const most = 2000
	out := o.take(t, c, func(in *In) { in.Bounds.Memory = most * hitBytes })
	long, short := out.Released[at(tp, 0)], out.Released[at(tp, 1)]
	if long == nil || short == nil || !long.Truncated || !o.hasEvent(Truncated) {
		t.Fatalf("tails %+v and %+v, quarantined %v, events %+v", long, short, out.Quarantined, o.events)
	}
	if n := long.Hits.Len() + short.Hits.Len(); n > most || n < most/2 {
		t.Errorf("%d records are kept, want at most %d", n, most)
	}
	if missing := short.Hits.Len() < tailRecords; missing != short.Truncated {
		t.Errorf("%d of %d records of the short tail are kept, truncated %t", short.Hits.Len(), tailRecords, short.Truncated)
	}
}

// N8: the records of others need no memory, so many of them do not cut a read-back short.
func TestN08_RecordsOfOthersNeedNoMemory(t *testing.T) {
	t.Parallel()
	c := newClient(t)
	tp := newTopic(t, c, 1)
	o := newOwner(t, tp, 1)
	me := o.takeAll(t, c).Producer
	const own = 50
	mustSend(t, c, at(tp, 0), encodeBatch(compress.None, me, 0, newRecords(newNames("first", own)...)...))
	foreign := encodeBatch(compress.Zstd, anonymous, -1, newRecords(newNames("foreign", 10_000)...)...)
	for range 20 {
		mustSend(t, c, at(tp, 0), foreign)
	}
	mustSend(t, c, at(tp, 0), encodeBatch(compress.None, me, own, newRecords(newNames("last", own)...)...))

	out := o.take(t, c, func(in *In) { in.Bounds.Memory = 2 * own * hitBytes })
	if tail := out.Released[at(tp, 0)]; tail == nil || tail.Truncated || tail.Hits.Len() != 2*own || o.hasEvent(Truncated) {
		t.Errorf("tail %+v, quarantined %v, events %+v", tail, out.Quarantined, o.events)
	}
}

// N8: the bound skips no marker, although another client writes many records after it, and also holds for a partition whose end could not be
// read before the markers were written.
func TestN08_TheMarkersOfALongTailAreRead(t *testing.T) {
	t.Parallel()
	for name, disturb := range map[string]func(t *testing.T, cluster *kfake.Cluster, c *Client){
		"many records follow": func(t *testing.T, cluster *kfake.Cluster, c *Client) {
			// The markers are in the log at the first fetch.
			cluster.ControlKey(int16(kmsg.Fetch), func(kmsg.Request) (kmsg.Response, error, bool) {
				cluster.SleepControl(func() {
					mustSend(t, c, at("a", 0), encodeBatch(compress.None, anonymous, -1, newRecords(newNames("foreign", 2000)...)...))
				})
				return nil, nil, false
			})
		},
		"the end is unknown": func(_ *testing.T, cluster *kfake.Cluster, _ *Client) {
			cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.ListOffsets}, Err: kerr.LeaderNotAvailable, Count: -1})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cluster := newFakeCluster(t, kfake.SeedTopics(1, "a"), kfake.SleepOutOfOrder())
			c, o := newClient(t, cluster.ListenAddrs()...), newOwner(t, "a", 1)
			const batches = 12
			size := sendTail(t, c, at("a", 0), compress.None, o.takeAll(t, c).Producer, batches)
			disturb(t, cluster, c)

			out := o.take(t, c, func(in *In) { in.Bounds.Bytes = int64(size) / 4 })
			tail := out.Released[at("a", 0)]
			if tail == nil || !tail.Truncated || tail.Markers != 2 {
				t.Fatalf("tail %+v, quarantined %v", tail, out.Quarantined)
			}
			if n := tail.Hits.Len(); n < tailRecords || n > batches*tailRecords*3/4 {
				t.Errorf("%d of %d records read with a bound of a quarter", n, batches*tailRecords)
			}
		})
	}
}
