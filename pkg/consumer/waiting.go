package consumer

import (
	"container/heap"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/inbox"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/setaside"
	"github.com/outrelay/outrelay/internal/transport"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
)

const (
	// countInterval is how long a count of the messages that are set aside is used.
	countInterval = 5 * time.Second
	// requeuePoll is how often a member looks for requeued dead letters.
	requeuePoll = 2 * time.Second
	// interruptedPause is how long a queue rests after an attempt that was interrupted.
	interruptedPause = time.Second
)

// waitingRoom has the queues of one handler with messages that are set aside, in the partitions of one session, and
// retries their messages. Package setaside describes the steps.
type waitingRoom struct {
	s       *session
	reg     *registration
	handler string // the handler's name in the inbox
	workers chan struct{}
	host    *partition    // whose track has opened the room; nil if the session has
	loaded  chan struct{} // closed when the stored queues are known
	wake    chan struct{} // a queue was added, or is due earlier

	size      atomic.Int32 // of queues; lets messages pass without a look at the queues while there are none
	mu        sync.Mutex
	queues    map[queueKey]*waitingQueue
	scheduled dueHeap
	count     int // messages of the handler in the whole group, about
	countedAt time.Time
}

// queueKey identifies a queue within a handler.
type queueKey struct {
	tp    transport.TopicPartition
	queue setaside.Digest
}

// waitingQueue is a queue that has messages, or gets some.
type waitingQueue struct {
	key     queueKey
	due     time.Time
	index   int  // in the heap; -1 if the queue is not scheduled
	running bool // a worker has it
	adding  int  // messages that are being set aside
	added   int  // messages that were set aside; it tells a worker to look again
}

// dueHeap orders the scheduled queues by their due time.
type dueHeap []*waitingQueue

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(i, j int) bool { return h[i].due.Before(h[j].due) }
func (h dueHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

// Push adds a queue.
func (h *dueHeap) Push(x any) {
	q := x.(*waitingQueue)
	q.index = len(*h)
	*h = append(*h, q)
}

// Pop removes the last queue.
func (h *dueHeap) Pop() any {
	old := *h
	q := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	q.index = -1
	return q
}

// openRoom returns the waiting room of a handler. If there is none, it opens one and starts its loop with start. host is
// the partition whose track opens the room, or nil. openRoom returns nil if the consumer has no store for messages that are
// set aside.
func (s *session) openRoom(reg *registration, host *partition, start func(f func())) *waitingRoom {
	if s.c.waiting == nil || reg.system {
		return nil
	}
	s.roomsMu.Lock()
	defer s.roomsMu.Unlock()

	r := s.rooms[reg]
	if r == nil {
		r = &waitingRoom{
			s: s, reg: reg, host: host, handler: s.c.inboxConsumer(reg),
			workers: make(chan struct{}, max(1, s.c.s.concurrency/4)),
			loaded:  make(chan struct{}), wake: make(chan struct{}, 1),
			queues: map[queueKey]*waitingQueue{},
		}
		s.rooms[reg] = r
		start(r.retryDueQueues)
	}
	return r
}

// place returns the place of a partition in the store.
func (r *waitingRoom) place(tp transport.TopicPartition) setaside.Place {
	return setaside.Place{Handler: r.handler, Topic: tp.Topic, Partition: tp.Partition}
}

// hasQueue reports whether messages of the queue wait.
func (r *waitingRoom) hasQueue(key queueKey) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.queues[key] != nil
}

// hasDueBefore reports whether a queue is due before a time.
func (r *waitingRoom) hasDueBefore(at time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.scheduled) > 0 && r.scheduled[0].due.Before(at)
}

// findQueueLocked returns a queue, and creates it if it does not exist.
func (r *waitingRoom) findQueueLocked(key queueKey) *waitingQueue {
	q := r.queues[key]
	if q == nil {
		q = &waitingQueue{key: key, index: -1}
		r.queues[key] = q
		r.size.Add(1)
	}
	return q
}

// scheduleLocked makes a queue due at a time, unless a worker has it or it is due earlier.
func (r *waitingRoom) scheduleLocked(q *waitingQueue, due time.Time) {
	switch {
	case q.running || q.index >= 0 && !due.Before(q.due):
		return
	case q.index >= 0:
		q.due = due
		heap.Fix(&r.scheduled, q.index)
	default:
		q.due = due
		heap.Push(&r.scheduled, q)
	}

	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// beginAdd announces a message of the queue. From now on, later messages of its key follow it. It must be called before
// the transaction that sets the message aside, and be followed by endAdd.
func (r *waitingRoom) beginAdd(key queueKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.findQueueLocked(key).adding++
}

// endAdd ends beginAdd. If the queue was empty, it is due at the given time.
func (r *waitingRoom) endAdd(key queueKey, due time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()

	q := r.queues[key]
	q.adding--
	q.added++
	r.count++
	// A queue that is scheduled keeps the due time of its first message.
	if q.index < 0 {
		r.scheduleLocked(q, due)
	}
}

// discover adds queues whose messages another member has set aside.
func (r *waitingRoom) discover(tp transport.TopicPartition, queues []setaside.Digest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, digest := range queues {
		if key := (queueKey{tp, digest}); r.queues[key] == nil {
			r.scheduleLocked(r.findQueueLocked(key), time.Now())
		}
	}
}

// discoverRequeued adds the queues of requeued dead letters to the rooms of their handlers, until the generation ends. It opens
// missing rooms with start. It leaves out the handlers that this process does not have.
func (s *session) discoverRequeued(start func(f func())) {
	tick := time.NewTicker(requeuePoll)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-s.serveCtx.Done():
			return
		}

		queues, err := s.c.waiting.Requeued(s.serveCtx, s.c.group)
		if err != nil && s.serveCtx.Err() == nil {
			s.report(err)
		}
		for _, q := range queues {
			tp := transport.TopicPartition{Topic: q.Topic, Partition: q.Partition}
			hasName := func(r *registration) bool { return s.c.inboxConsumer(r) == q.Handler }
			all := s.c.reg.snapshot().all
			if i := slices.IndexFunc(all, hasName); i >= 0 && s.partitions[tp] != nil {
				s.openRoom(all[i], nil, start).discover(tp, []setaside.Digest{q.Digest})
			}
		}
	}
}

// isFull reports whether no more messages of the handler may be set aside. It counts them at most once in countInterval.
func (r *waitingRoom) isFull(ctx context.Context) bool {
	limit := r.reg.retry.MaxWaiting
	r.mu.Lock()
	fresh := time.Since(r.countedAt) < countInterval
	full := r.count >= limit
	r.mu.Unlock()
	if fresh || limit < 0 {
		return full || limit < 0
	}

	n, err := r.s.c.waiting.Count(ctx, r.handler, limit+1)
	if err != nil {
		r.s.report(err)
		return full
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.count, r.countedAt = n, time.Now()
	return n >= limit
}

// load reads the queues of the session's partitions. It repeats that until it succeeds or ctx ends.
func (r *waitingRoom) load(ctx context.Context) error {
	partitions := map[string][]int32{}
	for tp := range r.s.partitions {
		partitions[tp.Topic] = append(partitions[tp.Topic], tp.Partition)
	}

	backoff := retry.Reopen.Start()
	for topic, list := range partitions {
		for {
			heads, err := r.s.c.waiting.Heads(ctx, r.handler, topic, list)
			if err == nil {
				r.addHeads(topic, heads)
				break
			}
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			r.s.report(fmt.Errorf("loading the messages that are set aside: %w", err))
			if err := backoff.Wait(ctx); err != nil {
				return err
			}
		}
	}
	close(r.loaded)
	return nil
}

// addHeads schedules the queues that were read from the store.
func (r *waitingRoom) addHeads(topic string, heads []setaside.Head) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, h := range heads {
		q := r.findQueueLocked(queueKey{transport.TopicPartition{Topic: topic, Partition: h.Partition}, h.Queue})
		r.scheduleLocked(q, time.Now().Add(h.Wait))
	}
}

// retryDueQueues retries the messages of due queues until the generation ends.
func (r *waitingRoom) retryDueQueues() {
	ctx := r.s.serveCtx
	if r.load(ctx) != nil {
		return
	}

	for ctx.Err() == nil && !r.reg.removed.Load() {
		if r.s.c.gate.waitOpen(ctx) != nil || r.s.outage.waitOver(ctx) != nil {
			return
		}
		select {
		case r.workers <- struct{}{}:
		case <-ctx.Done():
			return
		}

		q, probe, idle := r.takeDueQueue(time.Now())
		if q == nil {
			<-r.workers
			r.sleep(ctx, idle)
			continue
		}
		// A drain waits for the attempts in the groups of the partitions. The group of the host counts this loop.
		group := &r.s.partitions[q.key.tp].trackGroup
		if r.host != nil {
			group = &r.host.trackGroup
		}
		group.Go(func() {
			defer func() { <-r.workers }()
			r.retryQueue(q, probe)
		})
	}
}

// takeDueQueue returns the queue that is due first. If there is none, or if the handler is suspended, it returns the time
// to wait in idle.
func (r *waitingRoom) takeDueQueue(now time.Time) (q *waitingQueue, probe int, idle permit) {
	r.mu.Lock()
	defer r.mu.Unlock()

	if len(r.scheduled) == 0 {
		return nil, 0, permit{}
	}
	if due := r.scheduled[0].due; due.After(now) {
		return nil, 0, permit{wait: due.Sub(now)}
	}
	p := r.reg.suspension.mayStart(now)
	if !p.ok {
		return nil, 0, p
	}

	q = heap.Pop(&r.scheduled).(*waitingQueue)
	q.running = true
	return q, p.probe, permit{}
}

// sleep blocks until the time of idle is over, the suspension changes, or a queue is scheduled. A time of 0 means no limit.
func (r *waitingRoom) sleep(ctx context.Context, idle permit) {
	var timer <-chan time.Time
	if idle.wait > 0 {
		t := time.NewTimer(idle.wait)
		defer t.Stop()
		timer = t.C
	}

	select {
	case <-timer:
	case <-idle.changed:
	case <-r.wake:
	case <-ctx.Done():
	}
}

// retryQueue tries the messages of a queue, one after another, until one of them fails or the queue is empty. A probe is
// for one message.
func (r *waitingRoom) retryQueue(q *waitingQueue, probe int) {
	defer r.reg.suspension.endProbe(probe)
	p := r.s.partitions[q.key.tp]

	for {
		added := r.addedTo(q)
		m, err := r.s.c.waiting.First(p.s.drainCtx, r.place(q.key.tp), q.key.queue)
		if err != nil {
			r.s.report(err)
			r.returnQueue(q, time.Now().Add(interruptedPause))
			return
		}
		if m == nil {
			if r.removeQueue(q, added) {
				return
			}
			continue
		}

		t := p.newRetryTrack(r.reg, m)
		if !t.acquireSlots() {
			r.returnQueue(q, time.Now())
			return
		}
		finished := t.handleAlone(t.waitingTask())
		t.releaseSlots()

		switch {
		case !finished:
			r.returnQueue(q, time.Now().Add(interruptedPause))
			return
		case t.isPostponed:
			r.returnQueue(q, time.Now().Add(t.postponedFor))
			return
		case probe != 0 || t.mustStop() || r.reg.suspension.isSuspended():
			r.returnQueue(q, time.Now())
			return
		}
	}
}

// addedTo returns how many messages were added to the queue so far.
func (r *waitingRoom) addedTo(q *waitingQueue) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return q.added
}

// returnQueue ends the work on a queue, which is due again at the given time.
func (r *waitingRoom) returnQueue(q *waitingQueue, due time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	q.running = false
	r.scheduleLocked(q, due)
}

// removeQueue removes a queue that was found empty when it had the given number of added messages. It returns false if
// messages were added since: the worker has to look again. If a message is being added, the queue stays, and endAdd
// schedules it.
func (r *waitingRoom) removeQueue(q *waitingQueue, added int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()

	if q.added != added {
		return false
	}
	q.running = false
	if q.adding == 0 {
		delete(r.queues, q.key)
		r.size.Add(-1)
	}
	return true
}

// newRetryTrack returns a track that handles one message that is set aside. It is not a track of the partition.
func (p *partition) newRetryTrack(reg *registration, m *setaside.Message) *track {
	lane := inbox.Lane(m.Key, m.Offset)
	return &track{p: p, key: trackKey{lane, reg.name}, reg: reg, lane: lane, waiting: m}
}

// waitingTask returns the task of a track of newRetryTrack.
func (t *track) waitingTask() task {
	m := t.waiting
	rec := transport.Record{
		Topic: m.Topic, Partition: m.Partition, Offset: m.Offset, LeaderEpoch: m.LeaderEpoch,
		Time: m.Time, Key: m.Key, Value: m.Value,
	}
	for _, h := range m.Headers {
		rec.Headers = append(rec.Headers, event.Header(h))
	}

	e := &entry{
		offset: m.Offset, lane: t.lane, rec: rec, openShares: 1,
		shares: []share{{reg: t.reg, state: shareStarted, attempts: attemptsFromStore(m.Attempts, time.Now())}},
	}
	decoded, err := t.p.s.decodeRecord(&rec)
	if err != nil {
		e.decodeErr = &decodeError{Topic: m.Topic, Partition: m.Partition, Offset: m.Offset, Err: err}
		decoded = completeMessage(newMessage(&rec), &rec, t.p.s.c.group)
		t.p.s.c.dropForeignControls(decoded, time.Now())
	}
	e.m = decoded
	return task{e, &e.shares[0]}
}

// attemptsFromStore returns the attempts of a message that was set aside.
func attemptsFromStore(a setaside.Attempts, now time.Time) failures {
	out := failures{Failed: a.Failed, Spared: a.Spared}
	if a.Failed > 0 {
		out.Since = now.Add(-a.Elapsed)
	}
	for _, f := range a.History {
		out.History = append(out.History, deadletter.Failure(f))
	}
	return out
}

// attemptsForStore is the reverse of attemptsFromStore.
func attemptsForStore(a failures, now time.Time) setaside.Attempts {
	out := setaside.Attempts{Failed: a.Failed, Spared: a.Spared}
	if a.Failed > 0 {
		out.Elapsed = max(0, now.Sub(a.Since))
	}
	for _, f := range a.History {
		out.History = append(out.History, setaside.Failure(f))
	}
	return out
}
