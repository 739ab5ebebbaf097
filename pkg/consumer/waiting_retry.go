package consumer

import (
	"container/heap"
	"context"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
)

// retryDueQueues retries the messages of due queues until the session ends.
func (r *waitingRoom) retryDueQueues() {
	ctx := r.s.serveCtx
	// The room retries nothing before the queues of earlier owners are known, which keeps the order of keys.
	prepared, err := r.prepareHandler(ctx)
	if err != nil || r.load(ctx, append(r.s.listPartitions(), r.s.listStrays()...)) != nil || r.checkFailing(ctx) != nil {
		return
	}
	close(r.loaded)
	// Until then, the lanes set the messages of the handler aside.
	if !prepared && r.repairHandler(ctx) != nil {
		return
	}

	for ctx.Err() == nil && !r.reg.removed.Load() {
		if r.s.c.gate.waitOpen(ctx) != nil || r.s.outage.waitOver(ctx) != nil {
			return
		}
		// A worker is reserved first, so that a queue is never taken without one.
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
		// A drain waits for the attempts in the groups of the partitions.
		p := r.s.findPartition(q.key.tp)
		started := p != nil && p.goWorker(func() {
			release := sync.OnceFunc(func() { <-r.workers })
			defer release()
			r.retryQueue(p, q, probe, release)
		})
		if !started {
			r.dropQueue(q)
			r.reg.suspension.endProbe(probe)
			<-r.workers
		}
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
	p := r.reg.suspension.mayStart(now, true)
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
// for one message. It calls release before it waits for a lane.
func (r *waitingRoom) retryQueue(p *partition, q *waitingQueue, probe int, release func()) {
	defer r.reg.suspension.endProbe(probe)

	for {
		// removeQueue compares this number, so it keeps a queue to which a message is added after the read.
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

		// The lane began with a later message of the key before an operator requeued this one.
		if attempted := p.attemptOfLane(r.reg, m); attempted != nil {
			r.reg.suspension.endProbe(probe)
			release()
			select {
			case <-attempted:
			case <-p.serveCtx.Done():
			}
			r.returnQueue(q, time.Now())
			return
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
		case probe != 0 || t.mustStop() || r.reg.suspension.probesOnly():
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
	if r.queues[q.key] == q {
		r.scheduleLocked(q, due)
	}
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
	if q.adding == 0 && r.queues[q.key] == q {
		delete(r.queues, q.key)
		r.size.Add(-1)
	}
	return true
}

// dropQueue removes a queue whose partition was given back.
func (r *waitingRoom) dropQueue(q *waitingQueue) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.queues[q.key] == q {
		delete(r.queues, q.key)
		r.size.Add(-1)
	}
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
	// The message is decoded again: only the record is stored.
	decoded, err := t.p.s.decodeRecord(t.p.drainCtx, &rec)
	if err != nil {
		e.decodeErr = wrapDecodeError(&rec, err)
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
