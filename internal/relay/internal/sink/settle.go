package sink

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/kafkawire/batch"
	"github.com/outrelay/outrelay/internal/kafkawire/fetched"
)

const (
	// corruptTries is how often a batch that the broker found corrupt is sent with the same bytes
	// before it is encoded again.
	corruptTries = 3
	// movedTries is how often an unknown partition is treated as a partition that is moving.
	movedTries = 5
	// refusedRetry is the wait after a response that definitely refuses a batch.
	refusedRetry = time.Second
	// reportAfter is the age from which State reports a partition that is only being retried.
	reportAfter = 2 * time.Second
)

// ackedBatch is an ack that is called after the lock is released.
type ackedBatch struct {
	partition  *partition
	baseOffset int64
	tickets    []record.Ticket
	restore    bool // offsets start again at baseOffset: the topic was deleted and created again
	bytes      int
}

// settleRequest applies the outcome of one request to the heads of its partitions. err means that
// the connection was lost. A partition stays busy until its acks have been called, so that no other
// goroutine reports about it in the meantime.
func (l *lane) settleRequest(err error) {
	now := time.Now()
	l.sink.mu.Lock()
	l.acked = l.acked[:0]
	why := ""
	if err != nil {
		why = l.adaptToFailureLocked(err, now)
	}
	for i, f := range l.request {
		p, r := f.partition, kafkawire.ProduceResult{}
		if err == nil {
			r = l.results[i]
		}
		if err == nil && r.Present {
			l.applyResultLocked(p, &r, now)
			l.chooseLaneLocked(p, r.Code)
			continue
		}

		// The request may have arrived. The broker recognizes the same bytes if it has them.
		f.batch.maybeAppended = f.batch.maybeAppended || l.wrote && !errors.Is(err, kafkawire.ErrIncomplete)
		if why != "" && !f.batch.maybeAppended {
			l.refuseSizeLocked(p, f.batch)
			continue
		}
		reason := obstacle{kindUnreachable, "the broker's response leaves it out"}
		switch {
		case why != "":
			reason = obstacle{kindRefused, why}
		case err != nil:
			reason.text = err.Error()
		}
		l.retryLaterLocked(p, reason, now, 0)
	}
	l.sink.mu.Unlock()

	bytes, count := l.callAcks(l.acked)

	l.sink.mu.Lock()
	defer l.sink.mu.Unlock()
	l.sink.batches.changeUnresolvedLocked(-count, -bytes)
	for _, f := range l.request {
		p := f.partition
		p.busy = false
		p.markReadyLocked()
		// This lane looks at its own ready list next.
		if p.ready && p.lane != l {
			retry.Signal(p.lane.wake)
		}

		// The parker skips busy partitions, and a partition may be busy at each of its ticks.
		if !p.obstacle.none() && l.sink.parker.mustParkLocked(p, now, false) {
			retry.Signal(l.sink.parker.wake)
		}
	}
	clear(l.acked)
	clear(l.request)
	clear(l.batches)
	l.request = l.request[:0]
}

// callAcks calls the acks of list, without the lock.
func (l *lane) callAcks(list []ackedBatch) (bytes, count int) {
	for i := range list {
		a := &list[i]
		bytes += a.bytes
		count += len(a.tickets)
		if a.restore {
			l.sink.acks.Restore(a.partition.tp, a.baseOffset)
		}
		l.sink.acks.Acked(a.partition.tp, a.baseOffset, a.tickets, a.bytes)
	}
	return bytes, count
}

// applyResultLocked applies a broker's response to the head of p.
func (l *lane) applyResultLocked(p *partition, r *kafkawire.ProduceResult, now time.Time) {
	b := p.queue[0]
	if r.Code != 0 {
		l.sink.c.cfg.Metrics.ProduceErrors.WithLabelValues(r.Code.Title()).Inc()
	}
	verdict := kafkawire.Classify(r.Code)
	if verdict != kafkawire.VerdictAcked {
		b.maybeAppended = b.maybeAppended || kafkawire.MayBeAppended(r.Code)
	}

	switch verdict {
	case kafkawire.VerdictAcked:
		if why := l.findRepetitionLocked(p, b, r); why != "" {
			l.sink.failLocked(fmt.Errorf("%w: %s-%d: Kafka has acknowledged a batch as a repetition (%s), but the relay had not sent "+
				"it before, so another client writes with the relay's producer id: find it, and let only the relay WRITE to the topic",
				ErrBroken, p.tp.Topic, p.tp.Partition, why))
			return
		}
		l.acked = append(l.acked, l.removeAckedHeadLocked(p, b, r, now))

	case kafkawire.VerdictRetry:
		// NOT_ENOUGH_REPLICAS comes from the right leader. After other codes the leader may have moved.
		if r.Code != kafkawire.NotEnoughReplicas {
			retry.Signal(l.sink.refresher.wake)
		}
		text := fmt.Sprintf("partition %d of topic %q: Kafka responds with %v", p.tp.Partition, p.tp.Topic, r.Code)
		l.retryLaterLocked(p, obstacle{kindRefused, text}, now, 0)

	case kafkawire.VerdictTooLarge, kafkawire.VerdictBadRecords:
		// Kafka checks the size and the records before it checks for duplicates. So an earlier
		// attempt may have been appended.
		if b.maybeAppended {
			l.sink.failLocked(fmt.Errorf("%w: %s-%d: %w, and an earlier attempt may have been appended",
				ErrBroken, p.tp.Topic, p.tp.Partition, r.Code))
			return
		}

		if verdict == kafkawire.VerdictBadRecords {
			l.refuseRecordsLocked(p, b, r)
			return
		}
		p.topic.configStale = true
		retry.Signal(l.sink.refresher.wake)
		l.splitHeadLocked(p, b)

	case kafkawire.VerdictCorrupt:
		l.handleCorruptLocked(p, b, now)

	case kafkawire.VerdictRefused:
		retry.Signal(l.sink.refresher.wake)
		p.away = p.away || r.Code == kafkawire.UnknownTopicOrPartition
		wait := refusedRetry
		// A leader that has just moved away responds with this code, too.
		if r.Code == kafkawire.UnknownTopicOrPartition && p.tries < movedTries {
			wait = 0
		}
		l.retryLaterLocked(p, topicObstacle(p.tp.Topic, r.Err(), false), now, wait)

	case kafkawire.VerdictFenced:
		l.sink.failLocked(fmt.Errorf("%w: %s-%d: %w", ErrFenced, p.tp.Topic, p.tp.Partition, r.Code))

	case kafkawire.VerdictBroken:
		l.sink.failLocked(fmt.Errorf("%w: %s-%d: %w", ErrBroken, p.tp.Topic, p.tp.Partition, r.Code))
	}
}

// findRepetitionLocked returns why the response r repeats an earlier one although the head b of p was never sent before. A
// client that writes with the producer id, epoch and sequence of the relay causes that: Kafka compares only these. Without this
// check the records of b would count as sent.
//
// Kafka does not mark repetitions. But their offsets are those of the earlier batch, and they contain its time, which Kafka
// otherwise returns only where the broker sets the timestamps. A batch without a time that was appended after the last known
// end is not recognized.
func (l *lane) findRepetitionLocked(p *partition, b *pending, r *kafkawire.ProduceResult) string {
	if b.maybeAppended {
		return ""
	}
	omitsTimes := &l.sink.c.omitsTimes
	switch {
	case r.Code != 0 || r.BaseOffset < 0:
		return "without an offset"
	case r.BaseOffset < p.ackedEnd && !p.away:
		return fmt.Sprintf("at offset %d, below the known end %d", r.BaseOffset, p.ackedEnd)
	case p.topic.keepsTimes && r.AppendedMS >= 0 && omitsTimes.Load():
		return fmt.Sprintf("with the time of the batch at offset %d", r.BaseOffset)
	case p.topic.keepsTimes && r.AppendedMS < 0 && !omitsTimes.Load():
		omitsTimes.Store(true)
	}
	return ""
}

// removeAckedHeadLocked removes the acked head b of p, and returns the ack to call.
func (l *lane) removeAckedHeadLocked(p *partition, b *pending, r *kafkawire.ProduceResult, now time.Time) ackedBatch {
	n := b.builder.Count()
	a := ackedBatch{partition: p, baseOffset: r.BaseOffset, tickets: b.tickets, bytes: b.reserved}
	// The receiver of the ack owns the tickets now, so the batch must not return them to the free list.
	b.tickets = nil

	switch {
	case a.baseOffset < 0:
		// A duplicate whose offset the broker does not remember. Its offset is at least this.
		a.baseOffset = p.ackedEnd

	case a.baseOffset < p.ackedEnd && !b.maybeAppended && r.Code == 0:
		a.restore = true
		l.sink.log.Warn("offsets of a partition went back: its topic was deleted and created again",
			"topic", p.tp.Topic, "partition", p.tp.Partition, "from", p.ackedEnd, "to", r.BaseOffset)
		p.ackedEnd = 0
	}

	// The broker accepted more than the known limit, so the limit was raised.
	if p.topic.maxBytes > 0 && len(b.sealed)-4 > p.topic.maxBytes {
		p.topic.configStale = true
	}

	p.away = false
	p.ackedEnd = max(p.ackedEnd, a.baseOffset+int64(n))
	p.nextSeq = batch.NextSequence(p.nextSeq, n)
	p.lastUsed = now
	p.popHead()
	p.clearObstacle()
	p.probing = false
	l.sink.batches.releaseBatchLocked(b)
	l.sink.parker.unparkLocked(p)
	return a
}

// retryLaterLocked schedules the same bytes to be sent again after wait. If wait is 0, it uses
// sendBackoff.
func (l *lane) retryLaterLocked(p *partition, why obstacle, now time.Time, wait time.Duration) {
	p.tries++
	p.setObstacle(why, now)
	if wait == 0 {
		wait = sendBackoff.Delay(p.tries)
	}

	// Until then, records that are queued do not make the partition ready.
	p.retryPending = true
	time.AfterFunc(wait, func() {
		l.sink.mu.Lock()
		defer l.sink.mu.Unlock()
		p.retryPending = false
		p.markReadyLocked()
		if p.ready {
			retry.Signal(p.lane.wake)
		}
	})
}

// forEachRecord decodes the records of b, which may be frozen or not, and calls f for each of them.
func forEachRecord(b *pending, f func(i int, rec *record.Record)) error {
	var from fetched.Batch
	if b.compressed == nil {
		from = fetched.Unsealed(b.builder.Records())
	} else {
		// A sealed set holds one batch.
		var err error
		for from, err = range fetched.Batches(batch.BatchOfSet(b.sealed)) {
			if err != nil {
				return err
			}
		}
		from.Own = true
	}
	list, err := from.Stream()
	if err != nil {
		return err
	}
	defer list.Close()

	var x fetched.Record
	for i := range b.tickets {
		ok, err := list.Next(&x, 0)
		if err != nil {
			return err
		}
		if !ok {
			return fmt.Errorf("%w: %d records instead of %d", fetched.ErrCorrupt, i, len(b.tickets))
		}
		f(i, &record.Record{Key: x.Key, Value: x.Value, Headers: x.Headers, TimeMS: x.TimeMS})
	}
	return nil
}

// reencodeHeadLocked encodes the records of the head b of p again, in n batches that replace it.
// The first of them gets the sequence of b, because b was not appended.
func (l *lane) reencodeHeadLocked(p *partition, b *pending, n int, uncompressed bool) {
	batches := make([]*pending, n)
	count := int(b.builder.Count())
	err := forEachRecord(b, func(i int, rec *record.Record) {
		// The records are spread evenly, in order.
		to := i * n / count
		need, size := recordSizes(rec)
		if batches[to] == nil {
			batches[to] = l.sink.batches.newBatchLocked(batch.BufferSize(need))
			batches[to].uncompressed = uncompressed
		}

		l.sink.batches.appendRecordLocked(batches[to], rec, b.tickets[i], size, need)
	})
	if err != nil {
		l.sink.failLocked(fmt.Errorf("%w: %s-%d: decoding a batch to send: %w", ErrBroken, p.tp.Topic, p.tp.Partition, err))
		return
	}

	p.replaceHead(batches...)
	l.sink.batches.releaseBatchLocked(b)
}

// splitHeadLocked halves a batch that is too large. If it has only one record, the record itself is
// at fault.
func (l *lane) splitHeadLocked(p *partition, b *pending) {
	p.clearObstacle()
	if b.builder.Count() == 1 {
		size := len(b.sealed) - 4
		l.withdrawBadLocked(p, func(int) *record.Refusal { return newTooLargeRefusal(p.topic, size) })
		return
	}
	l.reencodeHeadLocked(p, b, 2, b.uncompressed)
}

// refuseSizeLocked halves a batch at whose size the connection ends. If it has only one record, the record is refused.
func (l *lane) refuseSizeLocked(p *partition, b *pending) {
	p.clearObstacle()
	if b.builder.Count() > 1 {
		l.reencodeHeadLocked(p, b, 2, b.uncompressed)
		return
	}
	reason := fmt.Sprintf("Kafka, or a device before it, closes the connection at a request of %d bytes with this record (topic %q); "+
		"raise socket.request.max.bytes of the brokers", len(b.sealed), p.tp.Topic)
	l.withdrawBadLocked(p, func(int) *record.Refusal {
		return &record.Refusal{Class: record.MessageTooLarge, Reason: reason}
	})
}

// refuseRecordsLocked gives back exactly the records that the broker names. If the broker names
// none, the batch is halved until the bad record is alone.
func (l *lane) refuseRecordsLocked(p *partition, b *pending, r *kafkawire.ProduceResult) {
	n := int(b.builder.Count())
	named := slices.ContainsFunc(r.BadRecords, func(i int) bool { return i >= 0 && i < n })
	// Older brokers name no records.
	if !named && n > 1 {
		l.splitHeadLocked(p, b)
		return
	}

	p.clearObstacle()
	l.withdrawBadLocked(p, func(i int) *record.Refusal {
		if n > 1 && !slices.Contains(r.BadRecords, i) {
			return nil
		}
		reason := fmt.Sprintf("Kafka rejects the record for partition %d of topic %q: %v", p.tp.Partition, p.tp.Topic, r.Code)
		if r.Message != "" {
			reason += " (" + r.Message + ")"
		}
		return &record.Refusal{Class: record.RecordRefused, Reason: reason}
	})
}

// handleCorruptLocked handles a batch whose checksum the broker found wrong. The sink sends the
// same bytes a few times, and then encodes the batch again without compression. If that fails too,
// it retries slowly: a device between the sink and the broker changes the data.
func (l *lane) handleCorruptLocked(p *partition, b *pending, now time.Time) {
	b.corruptCount++

	// If an earlier attempt may have been appended, no other bytes may use its sequence.
	if b.maybeAppended && b.corruptCount >= corruptTries {
		l.sink.failLocked(fmt.Errorf("%w: %s-%d: the broker finds a batch corrupt, "+
			"and an earlier attempt may have been appended",
			ErrBroken, p.tp.Topic, p.tp.Partition))
		return
	}

	why := obstacle{kindRefused, fmt.Sprintf("Kafka finds batches for partition %d of topic %q corrupt; "+
		"look for a proxy or a network card that changes data", p.tp.Partition, p.tp.Topic)}
	if b.corruptCount%corruptTries != 0 {
		l.retryLaterLocked(p, why, now, 0)
		return
	}

	corruptCount := b.corruptCount
	l.reencodeHeadLocked(p, b, 1, true)
	// The new batch continues the count, so that its retries become slow.
	p.queue[0].corruptCount = corruptCount

	wait := time.Duration(0)
	if corruptCount >= 2*corruptTries {
		wait = refusedRetry
	}
	l.retryLaterLocked(p, why, now, wait)
}
