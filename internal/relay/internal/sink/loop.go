package sink

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/base/crash"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/kafkawire/batch"
)

// loopID names one connection for records to a broker.
type loopID struct {
	broker int32
	index  int
}

// loop sends the batches of its partitions, one request at a time. Records gather while a request
// is in flight, so requests grow with the load of the broker. There is no linger, and no request
// waits after another request on the connection.
type loop struct {
	id   loopID
	sink *Sink
	wake chan struct{}

	// Guarded by the sink's lock.
	ready        []*partition    // in the order in which they became ready, so that a large one starves no other
	link         *kafkawire.Link // here, so that applyLayout can interrupt a request to a broker that leads no more
	abortDial    func()          // ends the dial that is in progress
	requestBegan time.Time       // zero: no request is in flight

	// Used only by the loop's goroutine.
	producer     kafkawire.Producer
	request      []flight
	batches      []kafkawire.PartitionBatch // the same, as it is encoded
	results      []kafkawire.ProduceResult
	acked        []ackedBatch
	failures     int
	wrote        bool          // a part of the request may have reached the broker
	lastDuration time.Duration // of the last request

	quotaLogged time.Time

	smaller      int       // the largest request since one has failed because of its size; 0: the usual limit
	smallerSince time.Time // when that was set
}

// isLateLocked reports whether the request in flight takes long.
func (l *loop) isLateLocked(now time.Time) bool {
	return !l.requestBegan.IsZero() && now.Sub(l.requestBegan) > slowRequest
}

// loopSet has the loops of the sink. The sink's lock guards it.
type loopSet struct {
	sink      *Sink
	perBroker int
	byID      map[loopID]*loop
	start     func(*loop) // starts a loop's goroutine; nil before Run
}

// findOrAddLoopLocked returns the loop of partition at its leader broker. Slow partitions share one extra
// loop. Kafka responds to a request when all of its partitions are done, so a partition whose
// requests time out would delay all other partitions of the broker.
func (ls *loopSet) findOrAddLoopLocked(broker int32, partition *partition) *loop {
	id := loopID{broker, int(partition.tp.Partition) % ls.perBroker}
	if partition.slow {
		id.index = ls.perBroker
	}

	existing := ls.byID[id]
	if existing == nil {
		existing = &loop{id: id, sink: ls.sink, wake: make(chan struct{}, 1)}
		ls.byID[id] = existing
		if ls.start != nil {
			ls.start(existing)
		}
	}
	return existing
}

// flight is one partition's share of a request. The batch belongs to the loop until settleRequest.
type flight struct {
	partition *partition
	batch     *pending
}

// sendBackoff is the wait after a connection was lost or rejected, and before a partition's batch is sent
// again.
var sendBackoff = retry.Policy{Base: 4 * time.Millisecond, Cap: 200 * time.Millisecond}

// gatePoll is the interval at which a closed gate is checked. A lease whose local deadline has
// passed is suspended, but not lost (N2).
const gatePoll = 10 * time.Millisecond

// sendLoop sends requests until ctx ends.
func (l *loop) sendLoop(ctx context.Context) {
	// A produce request does not watch ctx. Only the end of its connection ends it.
	stop := context.AfterFunc(ctx, func() { l.cutLink() })
	defer stop()
	defer l.cutLink()

	for {
		if !l.fillRequest() {
			select {
			case <-l.wake:
				continue
			case <-ctx.Done():
				return
			}
		}

		err := l.sendRequest(ctx)
		l.settleRequest(err)
		if err == nil {
			l.failures = 0
			continue
		}

		l.failures++
		// The broker may lead the partitions no longer. The layout is read again during the pause.
		retry.Signal(l.sink.refresher.wake)
		if retry.Sleep(ctx, sendBackoff.Delay(l.failures)) != nil {
			return
		}
	}
}

// fillRequest moves partitions from the ready list into the next request, and freezes their head
// batches. It reports whether there is something to send.
func (l *loop) fillRequest() bool {
	l.sink.mu.Lock()
	defer l.sink.mu.Unlock()
	l.request = l.request[:0]
	if l.sink.paused {
		return false
	}

	total, n := 0, 0
	now := time.Now()
	limit := l.requestLimitLocked(now)
	for _, p := range l.ready {
		batch := p.queue[0]
		size := batch.builder.Len()
		// The first batch always goes, even if it alone exceeds the limit.
		if total > 0 && total+size > limit {
			break
		}

		n++
		p.ready = false
		l.freezeLocked(p, batch, now)
		// The sink has ended because the batch is too old to be sent again.
		if l.sink.ended != nil {
			return false
		}

		total += size
		p.busy = true
		l.request = append(l.request, flight{p, batch})
	}

	rest := copy(l.ready, l.ready[n:])
	clear(l.ready[rest:])
	l.ready = l.ready[:rest]
	return len(l.request) > 0
}

// freezeLocked fixes the boundaries and the sequence of the head batch. A batch that was sent before
// keeps them. If it is so old that the broker may have forgotten the producer's state, the sink
// ends: the broker would append the batch a second time (H2).
func (l *loop) freezeLocked(partition *partition, batch *pending, now time.Time) {
	if partition.openBatch == batch {
		partition.openBatch = nil
	}
	if !batch.frozen {
		batch.frozen, batch.seq, batch.firstSent = true, partition.nextSeq, now
		return
	}

	limit := l.sink.keeper.expiry.ProducerID / 2
	if batch.maybeAppended && limit > 0 && now.Sub(batch.firstSent) > limit {
		l.sink.failLocked(fmt.Errorf("%w: a batch for %s-%d has had no definite response for %s; "+
			"the broker may have forgotten it",
			ErrBroken, partition.tp.Topic, partition.tp.Partition, now.Sub(batch.firstSent).Round(time.Second)))
	}
}

// sendRequest seals the batches of l.request, writes one request and reads its response into
// l.results.
func (l *loop) sendRequest(ctx context.Context) error {
	l.wrote = false
	for _, f := range l.request {
		if err := l.sealBatch(f.batch); err != nil {
			return err
		}
	}
	l.dropOversized()
	if len(l.request) == 0 {
		return nil
	}

	// The request groups partitions by topic.
	if len(l.request) > 1 {
		slices.SortStableFunc(l.request, func(a, b flight) int {
			if a.partition.topic == b.partition.topic {
				return 0
			}
			return strings.Compare(a.partition.topic.name, b.partition.topic.name)
		})
	}

	l.batches = l.batches[:0]
	for _, f := range l.request {
		tp := &f.partition.tp
		batch := kafkawire.PartitionBatch{Topic: tp.Topic, Partition: tp.Partition, Batch: &f.batch.builder}
		l.batches = append(l.batches, batch)
	}

	link, err := l.ensureLink(ctx)
	if err != nil {
		return err
	}

	if err := l.waitForQuota(ctx, link.Addr()); err != nil {
		return err
	}

	// N2: nothing is produced after the local deadline. A suspended process can wake up anywhere, so
	// this is the last step before the write.
	for !l.sink.gate() {
		if err := retry.Sleep(ctx, gatePoll); err != nil {
			return err
		}
	}

	crash.At("before-produce")
	l.wrote = true
	l.results, err = l.producer.Produce(link, l.sink.c.cfg.RequestTimeout, l.batches, l.results[:0])
	crash.At("after-produce-before-ack")

	l.sink.mu.Lock()
	l.lastDuration, l.requestBegan = time.Since(l.requestBegan), time.Time{}
	l.sink.mu.Unlock()
	if err != nil {
		// The response may still arrive, so the connection cannot carry another request.
		l.cutLink()
		l.sink.c.kafka.MarkFailed(link.Addr())
		return fmt.Errorf("producing to %s: %w", link.Addr(), err)
	}
	l.sink.c.kafka.NoteThrottle(link.Addr(), l.producer.Throttle())
	return nil
}

// quotaLogEvery is how often a loop logs that a quota delays it.
const quotaLogEvery = time.Minute

// waitForQuota waits as long as a quota of Kafka requires (KIP-219). A client that does not wait finds its connection
// muted, which looks like a broker that hangs.
func (l *loop) waitForQuota(ctx context.Context, addr string) error {
	wait := l.sink.c.kafka.Throttled(addr)
	if wait <= 0 {
		return nil
	}

	now := time.Now()
	text := fmt.Sprintf("a quota of Kafka (producer_byte_rate or request_percentage) delays this client at %s for %s; raise it for the client id %s",
		addr, wait.Round(time.Millisecond), l.sink.c.kafka.ClientID())
	if now.Sub(l.quotaLogged) >= quotaLogEvery {
		l.quotaLogged = now
		l.sink.log.Warn("waiting for a quota of Kafka", "broker", addr, "wait", wait, "error", text)
	}
	l.sink.c.cfg.Metrics.ThrottledSeconds.Add(wait.Seconds())

	l.sink.mu.Lock()
	// The wait is not a request that a broker delays.
	l.requestBegan = time.Time{}
	for _, f := range l.request {
		f.partition.setObstacle(obstacle{kindThrottled, text, ""}, now)
	}
	l.sink.mu.Unlock()

	err := retry.Sleep(ctx, wait)
	l.sink.mu.Lock()
	l.requestBegan = time.Now()
	l.sink.mu.Unlock()
	return err
}

// sealBatch encodes the header and compresses. The loop does this instead of Send, because it owns
// the frozen heads of its partitions and needs no lock for them.
func (l *loop) sealBatch(full *pending) error {
	if full.builder.IsSealed() {
		return nil
	}
	codec := l.sink.codec
	if full.uncompressed {
		codec = batch.None()
	}

	l.sink.mu.Lock()
	producer := l.sink.producer
	l.sink.mu.Unlock()
	return full.builder.Seal(codec, producer, full.seq)
}

// brokerAddr returns the present address of the loop's broker, or "" if the layout does not have it.
func (l *loop) brokerAddr() string { return l.sink.c.kafka.Layout().Brokers[l.id.broker] }

// ensureLink returns the loop's link. It dials a new one if there is none, if it was idle for too
// long, or if the broker has another address now.
func (l *loop) ensureLink(ctx context.Context) (*kafkawire.Link, error) {
	addr := l.brokerAddr()
	l.sink.mu.Lock()
	link := l.link
	l.sink.mu.Unlock()

	if link != nil && (link.Addr() != addr || link.IsStale()) {
		l.cutLink()
		link = nil
	}
	if addr == "" {
		return nil, kafkawire.UnknownBrokerError(l.id.broker)
	}

	// A dial can hang as long as a request. It counts as one, so that the refresher looks for another
	// leader and can interrupt it.
	dialCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	l.sink.mu.Lock()
	l.requestBegan, l.abortDial = time.Now(), cancel
	l.sink.mu.Unlock()

	var err error
	if link == nil {
		link, err = l.sink.c.kafka.Dial(dialCtx, addr)
	}

	l.sink.mu.Lock()
	defer l.sink.mu.Unlock()
	l.abortDial = nil
	// At the end of ctx, sendLoop has cut the link that the loop had then, which is not this link.
	if err == nil && ctx.Err() != nil {
		link.Close()
		err = context.Cause(ctx)
	}
	if err != nil {
		l.requestBegan = time.Time{}
		return nil, err
	}
	l.link = link
	return link, nil
}

// cutLink closes the loop's link. A request in flight fails at once.
func (l *loop) cutLink() {
	l.sink.mu.Lock()
	defer l.sink.mu.Unlock()
	l.interruptLocked()
	l.link = nil
}

// interruptLocked makes the request in flight, or the dial before it, fail at once.
func (l *loop) interruptLocked() {
	if l.abortDial != nil {
		l.abortDial()
	}
	if l.link != nil {
		l.link.Close()
	}
}
