package kafkalog

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/kafkawire/fetched"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/event"
)

// Reader reads partitions for one membership. It is safe for concurrent use, but only one goroutine at a time may fetch a
// partition.
type Reader struct {
	fromEnd bool
	maxWait time.Duration
	rack    string
	leaders leaders
	nearby  nearby
	damage  damage
	epochs  epochs
}

// Reader returns a reader of these topics.
func (c *Client) Reader(topics []string) *Reader {
	cfg := &c.Config
	reader := &Reader{fromEnd: cfg.FromEnd, maxWait: cfg.MaxWait, rack: cfg.Rack, leaders: leaders{client: c.Wire, topics: topics}}
	reader.epochs.leaders = &reader.leaders
	return reader
}

// Resume returns where the group of offsets goes on with a partition: at its committed offset, with the leader epoch of the last record
// before it, or at the configured end of the log.
//
// A retry topic without an offset is read from its first record, because the group itself has written all of them.
func (r *Reader) Resume(ctx context.Context, tp transport.TopicPartition, offsets *GroupOffsets) (transport.Start, error) {
	at, ok, err := offsets.read(ctx, tp)
	if err != nil {
		return transport.Start{}, fmt.Errorf("reading the committed offset of partition %s: %w", tp, err)
	}
	if ok {
		// Without the epoch, a member that joins after an unclean election of a leader would miss its records.
		if at.LeaderEpoch >= 0 {
			r.epochs.last.Store(tp, at.LeaderEpoch)
		}
		id, _ := strings.CutPrefix(at.Metadata, topicIDPrefix)
		if id == at.Metadata {
			id = ""
		}
		return transport.Start{GroupOffset: transport.GroupOffset{Offset: at.Offset, TopicID: id}}, nil
	}

	edge := kafkawire.LogStart
	_, retries := transport.ParseRetryTopic(tp.Topic, offsets.group)
	atEnd := r.fromEnd && retries == 0
	if atEnd {
		edge = kafkawire.LogEnd
	}
	first, err := r.leaders.readEdge(ctx, tp, edge)
	if err != nil {
		return transport.Start{}, fmt.Errorf("reading where partition %s begins: %w", tp, err)
	}
	return transport.Start{GroupOffset: transport.GroupOffset{Offset: first.Offset}, Uncommitted: atEnd}, nil
}

// Log returns the end of the partition, the epoch of its leader, and the id of its topic. The leader returns all of them, so the
// id is that of the topic whose records it returns.
func (r *Reader) Log(ctx context.Context, tp transport.TopicPartition) (inbox.Log, error) {
	id, err := r.leaders.readTopicID(ctx, tp)
	if err != nil {
		return inbox.Log{}, err
	}
	end, err := r.leaders.readEdge(ctx, tp, kafkawire.LogEnd)
	return inbox.Log{ID: id, End: end.Offset, Epoch: end.LeaderEpoch}, err
}

// Fetch reads committed records of one partition: see transport.Generation.
func (r *Reader) Fetch(ctx context.Context, tp transport.TopicPartition, from transport.FetchFrom, maxBytes int) (transport.Fetched, error) {
	offset := from.Offset
	ctx, cancel := context.WithTimeout(ctx, r.maxWait+RequestTimeout)
	defer cancel()
	addr, err := r.leaders.findAddr(ctx, tp)
	if err != nil {
		return transport.Fetched{}, err
	}
	rack := r.rack
	replica, near := r.nearby.find(tp)
	if near {
		// Only a leader selects replicas by rack.
		rack = ""
		if replicaAddr := r.leaders.findBroker(replica); replicaAddr != "" {
			addr = replicaAddr
		}
	}

	list := []kafkawire.FetchFrom{{TopicPartition: record.TopicPartition(tp), Offset: offset, TopicID: from.TopicID}}
	response, err := r.leaders.client.Fetch(ctx, addr, list, kafkawire.FetchLimits{
		MaxBytes:          maxBytes,
		MaxPartitionBytes: maxBytes,
		MaxWait:           r.maxWait,
		Timeout:           RequestTimeout,
		Committed:         true,
		Rack:              rack,
	})
	if err == nil && len(response.Partitions) != 1 {
		err = errors.New("a response without the partition")
	}
	// The leader decides about all errors.
	if near && replica != leaderOnly && (err != nil || response.Partitions[0].Code != 0) && ctx.Err() == nil {
		r.nearby.set(tp, leaderOnly, leaderTime)
		return transport.Fetched{Next: offset, End: offset}, nil
	}
	if err != nil {
		r.leaders.forget()
		return transport.Fetched{}, err
	}

	partition := &response.Partitions[0]
	// The leader names a nearer replica, and returns no records.
	if partition.Code == 0 && partition.Replica >= 0 && !near {
		r.nearby.set(tp, partition.Replica, replicaTime)
		return transport.Fetched{Next: offset, End: max(partition.Stable, offset)}, nil
	}
	switch code := kafkawire.Code(partition.Code); code {
	case 0:
	case kafkawire.OffsetOutOfRange:
		return transport.Fetched{}, r.explainRange(ctx, tp, offset)
	default:
		// The leader may have moved.
		r.leaders.forget()
		return transport.Fetched{}, code
	}

	walker := walker{tp: tp, from: offset, next: offset, aborted: partition.Aborted, first: -1, last: -1}
	if err := walker.readSet(partition.Set); err != nil {
		bad, ok := errors.AsType[*damagedError](err)
		if !ok || !r.damage.giveUp(bad, &walker, partition.High) {
			return transport.Fetched{}, err
		}
	}
	if err := r.epochs.checkFetched(ctx, &walker); err != nil {
		return transport.Fetched{}, err
	}
	return transport.Fetched{Records: walker.out, Next: walker.next, End: max(partition.Stable, walker.next)}, nil
}

// explainRange returns a *RangeError with the offsets that the partition has.
func (r *Reader) explainRange(ctx context.Context, tp transport.TopicPartition, offset int64) error {
	start, err := r.leaders.readEdge(ctx, tp, kafkawire.LogStart)
	if err != nil {
		return err
	}
	end, err := r.leaders.readEdge(ctx, tp, kafkawire.LogEnd)
	if err != nil {
		return err
	}

	// A replica that lags has responded. The caller fetches again.
	if offset >= start.Offset && offset <= end.Offset {
		return kafkawire.OffsetOutOfRange
	}
	// A leader that has lost records may have others below its end. Only a higher epoch shows that: the log of a topic that was created again
	// ends below the offset too.
	if end.LeaderEpoch > r.epochs.epochOf(tp) {
		if err := r.epochs.check(ctx, tp, offset); err != nil {
			return err
		}
	}
	return &transport.RangeError{TopicPartition: tp, Offset: offset, Start: start.Offset, End: end.Offset}
}

// walker reads the record set of a fetch.
type walker struct {
	tp      transport.TopicPartition
	from    int64
	next    int64
	aborted []fetched.Aborted  // transactions that begin later in the set; readSet sorts them
	dropped map[int64]struct{} // producers whose current transaction was aborted
	out     []transport.Record
	size    int   // of out
	first   int32 // leader epoch of the first batch, -1 for none
	last    int32 // leader epoch of the last batch
}

// readSet reads the batches. The next offset after a batch comes from its last offset delta, because a
// compacted batch ends with a hole, and a marker is a hole (N29).
func (w *walker) readSet(set []byte) error {
	// A broker lists transactions in the order in which they ended. startAborted needs the order in which
	// they began.
	slices.SortFunc(w.aborted, func(a, b fetched.Aborted) int { return cmp.Compare(a.First, b.First) })

	var bad *damagedError
	anyBatch := false
	for b, err := range fetched.Batches(set) {
		anyBatch = true
		if err == nil && b.Format < fetched.Format && b.End <= b.Base {
			err = fetched.ErrCorrupt
		}

		switch {
		case err == nil && bad == nil:
		case w.next > w.from:
			// The batches before this one are intact. The next fetch begins with it.
			return nil
		case err != nil:
			if bad == nil {
				bad = &damagedError{tp: w.tp, base: b.Base, end: b.End, err: err}
			}
			continue
		case b.Base > w.from:
			// An intact batch shows best where the damaged ones end. The next fetch reads it, because
			// markers of transactions in the damaged ones are unknown.
			bad.end = b.Base
			return bad
		default:
			// The damaged batch ends before the wanted offsets.
			bad = nil
		}

		w.readBatch(&b)
		if w.size >= fetchRoom {
			return nil
		}
	}

	if !anyBatch && len(set) > 0 {
		err := fmt.Errorf("%w at offset %d: its length is wrong", fetched.ErrCorrupt, w.from)
		bad = &damagedError{tp: w.tp, base: w.from, err: err}
	}
	if bad != nil {
		return bad
	}
	return nil
}

// fetchRoom is the number of bytes of records that one fetch reads, decompressed and with their overhead
// in memory. The next fetch reads the rest of a batch, and begins in the middle of it.
const fetchRoom = 16 << 20

func (w *walker) readBatch(batch *fetched.Batch) {
	if batch.Format < fetched.Format {
		if batch.End > w.from {
			w.addBroken(batch, batch.Base, fmt.Errorf("a message of format %d, from before Kafka 0.11", batch.Format))
		}
		w.next = max(w.next, batch.End)
		return
	}

	if batch.End > w.from {
		w.last = batch.LeaderEpoch
		if w.first < 0 {
			w.first = w.last
		}
	}
	w.startAborted(batch.Base)
	_, aborted := w.dropped[batch.Producer]
	switch {
	case batch.Control:
		// A marker ends the transaction of its producer, committed or aborted.
		delete(w.dropped, batch.Producer)
	case batch.Transactional && aborted, batch.End <= w.from:
	default:
		if !w.readRecords(batch) {
			return
		}
	}
	w.next = max(w.next, batch.End)
}

// startAborted drops the producers whose aborted transactions have begun at or below base.
func (w *walker) startAborted(base int64) {
	for len(w.aborted) > 0 && w.aborted[0].First <= base {
		if w.dropped == nil {
			w.dropped = map[int64]struct{}{}
		}
		w.dropped[w.aborted[0].Producer] = struct{}{}
		w.aborted = w.aborted[1:]
	}
}

// readRecords adds the records of a batch, and returns false if there is no room for all of them. A
// record with an error stands for records that cannot be read although the batch has the bytes that its
// producer sent: retrying would never succeed, and no later record could be read.
func (w *walker) readRecords(batch *fetched.Batch) (all bool) {
	next := max(batch.Base, w.from)
	list, err := batch.Stream()
	if err != nil {
		w.addBroken(batch, next, err)
		return true
	}
	defer list.Close()

	var record fetched.Record
	for {
		more, err := list.Next(&record, w.from)
		_, tooLarge := errors.AsType[*fetched.TooLargeError](err)
		switch {
		case err != nil && !tooLarge:
			w.addBroken(batch, next, err)
			return true
		case !more:
			return true
		// A batch can begin before the offset that was requested.
		case record.Offset < w.from:
			continue
		}

		rec := transport.Record{
			Topic:       w.tp.Topic,
			Partition:   w.tp.Partition,
			LeaderEpoch: batch.LeaderEpoch,
			Offset:      record.Offset,
			Time:        time.UnixMilli(record.TimeMS).UTC(),
			Key:         record.Key,
			Value:       record.Value,
			Err:         err,
		}
		if len(record.Headers) > 0 {
			rec.Headers = make([]event.Header, len(record.Headers))
		}
		for i, h := range record.Headers {
			rec.Headers[i] = event.Header{Key: string(h.Key), Value: h.Value}
		}
		w.out = append(w.out, rec)

		// The room is checked after the record, so that a record larger than the room is still delivered.
		next = record.Offset + 1
		if w.size += rec.Size(); w.size >= fetchRoom {
			w.next = max(w.next, next)
			return false
		}
	}
}

// addBroken adds one record with an error, which stands for the batch from an offset on.
func (w *walker) addBroken(batch *fetched.Batch, from int64, err error) {
	from = min(from, batch.End-1)
	w.out = append(w.out, transport.Record{
		Topic:       w.tp.Topic,
		Partition:   w.tp.Partition,
		LeaderEpoch: batch.LeaderEpoch,
		Offset:      from,
		Time:        time.UnixMilli(batch.TimeMS()).UTC(),
		Err:         fmt.Errorf("the records at the offsets from %d to %d cannot be read: %w", from, batch.End-1, err),
	})
	w.size += w.out[len(w.out)-1].Size()
}
