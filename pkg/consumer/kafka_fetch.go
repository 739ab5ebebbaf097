package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync/atomic"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/fetch"
	"github.com/segmentio/kafka-go/protocol/listoffsets"
	"github.com/segmentio/kafka-go/protocol/metadata"

	"github.com/outrelay/outrelay/internal/kafkawire/fetched"
)

// exchange is a fetch whose answer is read by package fetched, not by kafka-go.
type exchange struct {
	*fetch.Request
	client  string
	version int16
}

var correlation atomic.Int32

// Required asks kafka-go to leave the exchange to us; it gets the versions that the connection has negotiated.
func (x *exchange) Required(versions map[protocol.ApiKey]int16) bool {
	x.version = versions[protocol.Fetch]
	return true
}

// RawExchange writes the request and reads the answer. Nobody else uses the connection meanwhile.
func (x *exchange) RawExchange(rw io.ReadWriter) (protocol.Message, error) {
	if err := protocol.WriteRequest(rw, x.version, correlation.Add(1), x.client, x.Request); err != nil {
		return nil, err
	}
	return fetched.Read(rw, x.version)
}

// Fetch reads committed records of one partition.
func (g *generation) Fetch(ctx context.Context, tp TopicPartition, offset int64, maxBytes int) (Fetched, error) {
	ctx, cancel := context.WithTimeout(ctx, g.cfg.MaxWait+requestTimeout)
	defer cancel()
	m, err := g.fetches.RoundTrip(ctx, g.addr, &exchange{client: g.cfg.ClientID, Request: &fetch.Request{
		ReplicaID: -1, MaxWaitTime: int32(g.cfg.MaxWait / time.Millisecond), MinBytes: 1, MaxBytes: int32(maxBytes), SessionEpoch: -1,
		IsolationLevel: int8(kafka.ReadCommitted),
		Topics: []fetch.RequestTopic{{Topic: tp.Topic, Partitions: []fetch.RequestPartition{{
			Partition: tp.Partition, CurrentLeaderEpoch: -1, FetchOffset: offset, LogStartOffset: -1, PartitionMaxBytes: int32(maxBytes),
		}}}},
	}})
	if err != nil {
		if ctx.Err() == nil {
			g.refresh(ctx)
		}
		return Fetched{}, err
	}
	answer, ok := m.(*fetched.Answer)
	if !ok || len(answer.Partitions) != 1 {
		return Fetched{}, errors.New("an answer without the partition")
	}
	a := &answer.Partitions[0]
	switch kafka.Error(a.Code) {
	case 0:
	case kafka.OffsetOutOfRange:
		return Fetched{}, g.outOfRange(ctx, tp, offset)
	default:
		g.refresh(ctx)
		return Fetched{}, kafka.Error(a.Code)
	}
	w := walker{tp: tp, from: offset, next: offset, aborted: a.Aborted, first: -1, last: -1}
	if err := w.walk(a.Set); err != nil {
		bad, ok := errors.AsType[*damagedError](err)
		if !ok || !g.damage.passes(bad, &w, a.High) {
			return Fetched{}, err
		}
	}
	if err := g.checkEpoch(ctx, &w); err != nil {
		return Fetched{}, err
	}
	return Fetched{Records: w.out, Next: w.next, End: max(a.Stable, w.next)}, nil
}

// outOfRange finds out what the partition has instead.
func (g *generation) outOfRange(ctx context.Context, tp TopicPartition, offset int64) error {
	start, _, err := g.edge(ctx, tp, kafka.FirstOffset)
	if err != nil {
		return err
	}
	end, _, err := g.edge(ctx, tp, kafka.LastOffset)
	if err != nil {
		return err
	}
	if offset >= start && offset <= end {
		return kafka.OffsetOutOfRange // a replica that is behind answered: asked again
	}
	return &RangeError{TopicPartition: tp, Offset: offset, Start: start, End: end}
}

// edge asks the leader for one end of the partition and its epoch.
func (g *generation) edge(ctx context.Context, tp TopicPartition, at int64) (int64, int32, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	m, err := g.fetches.RoundTrip(ctx, g.addr, &listoffsets.Request{ReplicaID: -1, Topics: []listoffsets.RequestTopic{{
		Topic: tp.Topic, Partitions: []listoffsets.RequestPartition{{Partition: tp.Partition, CurrentLeaderEpoch: -1, Timestamp: at}},
	}}})
	if err != nil {
		if ctx.Err() == nil {
			g.refresh(ctx)
		}
		return 0, -1, err
	}
	res, ok := m.(*listoffsets.Response)
	if !ok || len(res.Topics) != 1 || len(res.Topics[0].Partitions) != 1 {
		return 0, -1, errors.New("an answer without the partition")
	}
	p := res.Topics[0].Partitions[0]
	if p.ErrorCode != 0 {
		g.refresh(ctx)
		return 0, -1, kafka.Error(p.ErrorCode)
	}
	return p.Offset, p.LeaderEpoch, nil
}

func (g *generation) refresh(ctx context.Context) { refreshLayout(ctx, g.fetches, g.addr) }

// refreshLayout makes kafka-go read the cluster's layout anew: until then it dials leaders that are gone. A request for a
// name that no topic can have always ends in a refresh and never creates anything.
func refreshLayout(ctx context.Context, t *kafka.Transport, addr net.Addr) {
	_, _ = t.RoundTrip(ctx, addr, &metadata.Request{TopicNames: []string{"/"}, AllowAutoTopicCreation: true})
}

// walker takes a record set apart.
type walker struct {
	tp      TopicPartition
	from    int64
	next    int64
	aborted []fetched.Aborted // that did not begin yet; walk sorts them
	dropped map[int64]struct{}
	out     []Record
	size    int   // of out
	first   int32 // leader epoch of the first batch, -1 for none
	last    int32 // and of the last one
}

// walk goes through the batches. The next offset after one comes from its last offset delta: a compacted batch ends with a
// hole, and a marker is one (N29).
func (w *walker) walk(set []byte) error {
	// A broker lists transactions in the order in which they ended, and pass goes by where they began.
	slices.SortFunc(w.aborted, func(a, b fetched.Aborted) int { return cmp.Compare(a.First, b.First) })

	var bad *damagedError
	read := false
	for b, err := range fetched.Batches(set) {
		read = true
		if err == nil && b.Format < fetched.Format && b.End <= b.Base {
			err = fetched.ErrCorrupt
		}
		switch {
		case err == nil && bad == nil:
		case w.next > w.from:
			return nil // what came before is good; the next fetch begins with this one
		case err != nil:
			if bad == nil {
				bad = &damagedError{tp: w.tp, base: b.Base, end: b.End, err: err}
			}
			continue
		case b.Base > w.from:
			// A good batch says best where the damaged ones end. It is left to the next fetch, as the markers of transactions
			// that were damaged would be missed.
			bad.end = b.Base
			return bad
		default:
			bad = nil // it ends before the offsets that are wanted
		}

		w.batch(&b)
		if w.size >= fetchRoom {
			return nil
		}
	}
	if !read && len(set) > 0 {
		bad = &damagedError{tp: w.tp, base: w.from, err: fmt.Errorf("%w at offset %d: its length is wrong", fetched.ErrCorrupt, w.from)}
	}
	if bad != nil {
		return bad
	}
	return nil
}

// fetchRoom is how many bytes of records one fetch takes, decompressed and with what they cost in memory. What a batch has
// beyond that is read by the next fetch, which begins in the middle of the batch.
const fetchRoom = 16 << 20

func (w *walker) batch(b *fetched.Batch) {
	if b.Format < fetched.Format {
		if b.End > w.from {
			w.broken(b, b.Base, fmt.Errorf("a message of format %d, from before Kafka 0.11", b.Format))
		}
		w.next = max(w.next, b.End)
		return
	}
	if b.End > w.from {
		w.last = b.LeaderEpoch
		if w.first < 0 {
			w.first = w.last
		}
	}
	w.pass(b.Base)
	_, aborted := w.dropped[b.Producer]
	switch {
	case b.Control:
		delete(w.dropped, b.Producer) // a marker ends the producer's transaction, this way or that
	case b.Transactional && aborted, b.End <= w.from:
	default:
		if !w.records(b) {
			return
		}
	}
	w.next = max(w.next, b.End)
}

// pass takes up the aborted transactions that have begun by that offset.
func (w *walker) pass(base int64) {
	for len(w.aborted) > 0 && w.aborted[0].First <= base {
		if w.dropped == nil {
			w.dropped = map[int64]struct{}{}
		}
		w.dropped[w.aborted[0].Producer] = struct{}{}
		w.aborted = w.aborted[1:]
	}
}

// records takes those of a batch; false if there is no room for all of them. What cannot be read, although it is as the
// producer has sent it, is a record with an error: it could never be read, and nothing behind it.
func (w *walker) records(b *fetched.Batch) (all bool) {
	next := max(b.Base, w.from)
	list, err := b.Stream()
	if err != nil {
		w.broken(b, next, err)
		return true
	}
	defer list.Close()

	var x fetched.Record
	for {
		more, err := list.Next(&x, w.from)
		_, tooLarge := errors.AsType[*fetched.TooLargeError](err)
		switch {
		case err != nil && !tooLarge:
			w.broken(b, next, err)
			return true
		case !more:
			return true
		case x.Offset < w.from:
			continue
		}

		r := Record{
			Topic: w.tp.Topic, Partition: w.tp.Partition, LeaderEpoch: b.LeaderEpoch, Offset: x.Offset,
			Time: time.UnixMilli(x.TimeMS).UTC(), Key: x.Key, Value: x.Value, Err: err,
		}
		if len(x.Headers) > 0 {
			r.Headers = make([]Header, len(x.Headers))
		}
		for i, h := range x.Headers {
			r.Headers[i] = Header{Key: string(h.Key), Value: h.Value}
		}
		w.out = append(w.out, r)

		next = x.Offset + 1
		if w.size += recordSize(&r); w.size >= fetchRoom {
			w.next = max(w.next, next)
			return false
		}
	}
}

// broken takes one record for all of the batch from an offset on.
func (w *walker) broken(b *fetched.Batch, from int64, err error) {
	from = min(from, b.End-1)
	w.out = append(w.out, Record{
		Topic: w.tp.Topic, Partition: w.tp.Partition, LeaderEpoch: b.LeaderEpoch, Offset: from, Time: time.UnixMilli(b.TimeMS()).UTC(),
		Err: fmt.Errorf("the records at the offsets from %d to %d cannot be read: %w", from, b.End-1, err),
	})
	w.size += recordSize(&w.out[len(w.out)-1])
}
