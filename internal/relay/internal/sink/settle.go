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
	// rejectedRetry is the wait after a response that definitely rejects a batch.
	rejectedRetry = time.Second
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
func (l *loop) settleRequest(err error) {
	now := time.Now()
	l.sink.mu.Lock()
	l.acked = l.acked[:0]
	why := ""
	if err != nil {
		why = l.adaptToFailureLocked(err, now)
	}
	for i, f := range l.request {
		partition, result := f.partition, kafkawire.ProduceResult{}
		if err == nil {
			result = l.results[i]
		}
		if err == nil && result.Present {
			l.applyResultLocked(partition, &result, now)
			l.chooseLoopLocked(partition, result.Code)
			continue
		}

		// The request may have arrived. The broker recognizes the same bytes if it has them.
		f.batch.maybeAppended = f.batch.maybeAppended || l.wrote && !errors.Is(err, kafkawire.ErrIncomplete)
		if why != "" && !f.batch.maybeAppended {
			l.rejectSizeLocked(partition, f.batch)
			continue
		}
		reason := obstacle{kindUnreachable, "the broker's response leaves it out", ""}
		switch {
		case why != "":
			reason = obstacle{kindRejected, why, ""}
		case err != nil:
			reason.cause = err.Error()
		}
		l.retryLaterLocked(partition, reason, now)
	}
	l.sink.mu.Unlock()

	bytes, count := l.callAcks(l.acked)

	l.sink.mu.Lock()
	defer l.sink.mu.Unlock()
	l.sink.batches.changeUnresolvedLocked(-count, -bytes)
	for _, f := range l.request {
		partition := f.partition
		partition.busy = false
		partition.markReadyLocked()
		// This loop looks at its own ready list next.
		if partition.ready && partition.loop != l {
			retry.Signal(partition.loop.wake)
		}

		// The parker skips busy partitions, and a partition may be busy at each of its ticks.
		if !partition.obstacle.none() && l.sink.parker.mustParkLocked(partition, now, hasRoom) {
			retry.Signal(l.sink.parker.wake)
		}
	}
	clear(l.acked)
	clear(l.request)
	clear(l.batches)
	l.request = l.request[:0]
}

// callAcks calls the acks of list, without the lock.
func (l *loop) callAcks(list []ackedBatch) (bytes, count int) {
	for i := range list {
		batch := &list[i]
		bytes += batch.bytes
		count += len(batch.tickets)
		if batch.restore {
			l.sink.acks.Restore(batch.partition.tp, batch.baseOffset)
		}
		l.sink.acks.Acked(batch.partition.tp, batch.baseOffset, batch.tickets, batch.bytes)
	}
	return bytes, count
}

// applyResultLocked applies a broker's response to the head of partition.
func (l *loop) applyResultLocked(partition *partition, result *kafkawire.ProduceResult, now time.Time) {
	batch := partition.queue[0]
	if result.Code != 0 {
		l.sink.c.cfg.Metrics.ProduceErrors.WithLabelValues(result.Code.Title()).Inc()
	}
	verdict := kafkawire.Classify(result.Code)
	if verdict != kafkawire.VerdictAcked {
		batch.maybeAppended = batch.maybeAppended || kafkawire.MayBeAppended(result.Code)
	}

	switch verdict {
	case kafkawire.VerdictAcked:
		if why := l.findRepetitionLocked(partition, batch, result); why != "" {
			l.sink.failLocked(fmt.Errorf("%w: %s-%d: Kafka has acknowledged a batch as a repetition (%s), but the relay had not sent "+
				"it before, so another client writes with the relay's producer id: find it, and let only the relay WRITE to the topic",
				ErrBroken, partition.tp.Topic, partition.tp.Partition, why))
			return
		}
		l.acked = append(l.acked, l.removeAckedHeadLocked(partition, batch, result, now))

	case kafkawire.VerdictRetry:
		// NOT_ENOUGH_REPLICAS comes from the right leader. After other codes the leader may have moved.
		if result.Code != kafkawire.NotEnoughReplicas {
			retry.Signal(l.sink.refresher.wake)
		}
		text := fmt.Sprintf("partition %d of topic %q: Kafka responds with %v", partition.tp.Partition, partition.tp.Topic, result.Code)
		l.retryLaterLocked(partition, obstacle{kindRejected, text, ""}, now)

	case kafkawire.VerdictTooLarge, kafkawire.VerdictBadRecords:
		// Kafka checks the size and the records before it checks for duplicates. So an earlier
		// attempt may have been appended.
		if batch.maybeAppended {
			l.sink.failLocked(fmt.Errorf("%w: %s-%d: %w, and an earlier attempt may have been appended",
				ErrBroken, partition.tp.Topic, partition.tp.Partition, result.Code))
			return
		}

		if verdict == kafkawire.VerdictBadRecords {
			l.rejectRecordsLocked(partition, batch, result)
			return
		}
		partition.topic.configStale = true
		retry.Signal(l.sink.refresher.wake)
		l.splitHeadLocked(partition, batch)

	case kafkawire.VerdictCorrupt:
		l.handleCorruptLocked(partition, batch, now)

	case kafkawire.VerdictRejected:
		retry.Signal(l.sink.refresher.wake)
		partition.away = partition.away || result.Code == kafkawire.UnknownTopicOrPartition
		why := topicObstacle(partition.tp.Topic, result.Err())
		// A leader that has just moved away responds with this code, too.
		if result.Code == kafkawire.UnknownTopicOrPartition && partition.tries < movedTries {
			l.retryLaterLocked(partition, why, now)
		} else {
			l.retryAfterLocked(partition, why, now, rejectedRetry)
		}

	case kafkawire.VerdictFenced:
		l.sink.failLocked(fmt.Errorf("%w: %s-%d: %w", ErrFenced, partition.tp.Topic, partition.tp.Partition, result.Code))

	case kafkawire.VerdictBroken:
		l.sink.failLocked(fmt.Errorf("%w: %s-%d: %w", ErrBroken, partition.tp.Topic, partition.tp.Partition, result.Code))
	}
}

// findRepetitionLocked returns why the response result repeats an earlier one although the head batch of partition was never sent before. A
// client that writes with the producer id, epoch and sequence of the relay causes that: Kafka compares only these. Without this
// check the records of batch would count as sent.
//
// Kafka does not mark repetitions. But their offsets are those of the earlier batch, and they contain its time, which Kafka
// otherwise returns only where the broker sets the timestamps. A batch without a time that was appended after the last known
// end is not recognized.
func (l *loop) findRepetitionLocked(partition *partition, batch *pending, result *kafkawire.ProduceResult) string {
	if batch.maybeAppended {
		return ""
	}
	omitsTimes := &l.sink.c.omitsTimes
	switch {
	case result.Code != 0 || result.BaseOffset < 0:
		return "without an offset"
	case result.BaseOffset < partition.ackedEnd && !partition.away:
		return fmt.Sprintf("at offset %d, below the known end %d", result.BaseOffset, partition.ackedEnd)
	case partition.topic.keepsTimes && result.AppendedMS >= 0 && omitsTimes.Load():
		return fmt.Sprintf("with the time of the batch at offset %d", result.BaseOffset)
	case partition.topic.keepsTimes && result.AppendedMS < 0 && !omitsTimes.Load():
		omitsTimes.Store(true)
	}
	return ""
}

// removeAckedHeadLocked removes the acked head of partition, and returns the ack to call.
func (l *loop) removeAckedHeadLocked(partition *partition, head *pending, result *kafkawire.ProduceResult, now time.Time) ackedBatch {
	n := head.builder.Count()
	ackedBatch := ackedBatch{partition: partition, baseOffset: result.BaseOffset, tickets: head.tickets, bytes: head.reserved}
	// The receiver of the ack owns the tickets now, so the batch must not return them to the free list.
	head.tickets = nil

	switch {
	case ackedBatch.baseOffset < 0:
		// A duplicate whose offset the broker does not remember. Its offset is at least this.
		ackedBatch.baseOffset = partition.ackedEnd

	case ackedBatch.baseOffset < partition.ackedEnd && !head.maybeAppended && result.Code == 0:
		ackedBatch.restore = true
		l.sink.log.Warn("offsets of a partition went back: its topic was deleted and created again",
			"topic", partition.tp.Topic, "partition", partition.tp.Partition, "from", partition.ackedEnd, "to", result.BaseOffset)
		partition.ackedEnd = 0
	}

	// The broker accepted more than the known limit, so the limit was raised.
	if partition.topic.maxBytes > 0 && head.builder.Len() > partition.topic.maxBytes {
		partition.topic.configStale = true
	}

	partition.away = false
	partition.ackedEnd = max(partition.ackedEnd, ackedBatch.baseOffset+int64(n))
	partition.nextSeq = batch.NextSequence(partition.nextSeq, n)
	partition.lastUsed = now
	partition.popHead()
	partition.clearObstacle()
	partition.probing = false
	l.sink.batches.releaseBatchLocked(head)
	l.sink.parker.unparkLocked(partition)
	return ackedBatch
}

// retryLaterLocked is retryAfterLocked with the next wait of sendBackoff.
func (l *loop) retryLaterLocked(partition *partition, why obstacle, now time.Time) {
	l.retryAfterLocked(partition, why, now, sendBackoff.Delay(partition.tries+1))
}

// retryAfterLocked schedules the same bytes to be sent again after wait.
func (l *loop) retryAfterLocked(partition *partition, why obstacle, now time.Time, wait time.Duration) {
	partition.tries++
	partition.setObstacle(why, now)

	// Until then, records that are queued do not make the partition ready.
	partition.retryPending = true
	time.AfterFunc(wait, func() {
		l.sink.mu.Lock()
		defer l.sink.mu.Unlock()
		partition.retryPending = false
		partition.markReadyLocked()
		if partition.ready {
			retry.Signal(partition.loop.wake)
		}
	})
}

// forEachRecord decodes the records of source, which may be frozen or not, and calls visit for each of them.
func forEachRecord(source *pending, visit func(i int, rec *record.Record)) error {
	from := fetched.NewOwnBatch(source.builder.Records())
	list, err := from.Stream()
	if err != nil {
		return err
	}
	defer list.Close()

	var parsed fetched.Record
	for i := range source.tickets {
		ok, err := list.Next(&parsed, 0)
		if err != nil {
			return err
		}
		if !ok {
			return fmt.Errorf("%w: %d records instead of %d", fetched.ErrCorrupt, i, len(source.tickets))
		}
		visit(i, &record.Record{Key: parsed.Key, Value: parsed.Value, Headers: parsed.Headers, TimeMS: parsed.TimeMS})
	}
	return nil
}

// reencodeHeadLocked encodes the records of the head of partition again, in n batches that replace it.
// The first of them gets the sequence of head, because head was not appended. If head.uncompressed is set, they are not compressed.
func (l *loop) reencodeHeadLocked(partition *partition, head *pending, n int) {
	batches := make([]*pending, n)
	count := int(head.builder.Count())
	err := forEachRecord(head, func(i int, rec *record.Record) {
		// The records are spread evenly, in order.
		to := i * n / count
		if batches[to] == nil {
			batches[to] = l.sink.batches.newBatchLocked()
			batches[to].uncompressed = head.uncompressed
		}

		_, size := recordSizes(rec)
		l.sink.batches.appendRecordLocked(batches[to], rec, head.tickets[i], size)
	})
	if err != nil {
		l.sink.failLocked(fmt.Errorf("%w: %s-%d: decoding a batch to send: %w", ErrBroken, partition.tp.Topic, partition.tp.Partition, err))
		return
	}

	partition.replaceHead(batches...)
	l.sink.batches.releaseBatchLocked(head)
}

// splitHeadLocked halves a batch that is too large. If it has only one record, the record itself is
// at fault.
func (l *loop) splitHeadLocked(partition *partition, batch *pending) {
	partition.clearObstacle()
	if batch.builder.Count() == 1 {
		size := batch.builder.Len()
		l.withdrawBadLocked(partition, func(int) *record.Rejection { return newTooLargeRejection(partition.topic, size) })
		return
	}
	l.reencodeHeadLocked(partition, batch, 2)
}

// rejectSizeLocked halves a batch at whose size the connection ends. If it has only one record, the record is rejected.
func (l *loop) rejectSizeLocked(partition *partition, batch *pending) {
	partition.clearObstacle()
	if batch.builder.Count() > 1 {
		l.reencodeHeadLocked(partition, batch, 2)
		return
	}
	reason := fmt.Sprintf("Kafka, or a device before it, closes the connection at a request of %d bytes with this record (topic %q); "+
		"raise socket.request.max.bytes of the brokers", batch.builder.Len(), partition.tp.Topic)
	l.withdrawBadLocked(partition, func(int) *record.Rejection {
		return &record.Rejection{Class: record.MessageTooLarge, Reason: reason}
	})
}

// rejectRecordsLocked gives back exactly the records that the broker names. If the broker names
// none, the batch is halved until the bad record is alone.
func (l *loop) rejectRecordsLocked(partition *partition, batch *pending, result *kafkawire.ProduceResult) {
	n := int(batch.builder.Count())
	named := slices.ContainsFunc(result.BadRecords, func(i int) bool { return i >= 0 && i < n })
	// Older brokers name no records.
	if !named && n > 1 {
		l.splitHeadLocked(partition, batch)
		return
	}

	partition.clearObstacle()
	l.withdrawBadLocked(partition, func(i int) *record.Rejection {
		if n > 1 && !slices.Contains(result.BadRecords, i) {
			return nil
		}
		reason := fmt.Sprintf("Kafka rejects the record for partition %d of topic %q: %v", partition.tp.Partition, partition.tp.Topic, result.Code)
		if result.Message != "" {
			reason += " (" + result.Message + ")"
		}
		return &record.Rejection{Class: record.RecordRejected, Reason: reason}
	})
}

// handleCorruptLocked handles a batch whose checksum the broker found wrong. The sink sends the
// same bytes a few times, and then encodes the batch again without compression. If that fails too,
// it retries slowly: a device between the sink and the broker changes the data.
func (l *loop) handleCorruptLocked(partition *partition, batch *pending, now time.Time) {
	batch.corruptCount++

	// If an earlier attempt may have been appended, no other bytes may use its sequence.
	if batch.maybeAppended && batch.corruptCount >= corruptTries {
		l.sink.failLocked(fmt.Errorf("%w: %s-%d: the broker finds a batch corrupt, "+
			"and an earlier attempt may have been appended",
			ErrBroken, partition.tp.Topic, partition.tp.Partition))
		return
	}

	why := obstacle{kindRejected, fmt.Sprintf("Kafka finds batches for partition %d of topic %q corrupt",
		partition.tp.Partition, partition.tp.Topic), "look for a proxy or a network card that changes data"}
	if batch.corruptCount%corruptTries != 0 {
		l.retryLaterLocked(partition, why, now)
		return
	}

	corruptCount := batch.corruptCount
	batch.uncompressed = true
	l.reencodeHeadLocked(partition, batch, 1)
	// The new batch continues the count, so that its retries become slow.
	partition.queue[0].corruptCount = corruptCount

	if corruptCount >= 2*corruptTries {
		l.retryAfterLocked(partition, why, now, rejectedRetry)
	} else {
		l.retryLaterLocked(partition, why, now)
	}
}
