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

		queue, probe, idle := r.takeDueQueue(time.Now())
		if queue == nil {
			<-r.workers
			r.sleep(ctx, idle)
			continue
		}
		// A drain waits for the attempts in the groups of the partitions.
		partition := r.s.findPartition(queue.key.tp)
		started := partition != nil && partition.goWorker(func() {
			release := sync.OnceFunc(func() { <-r.workers })
			defer release()
			r.retryQueue(partition, queue, probe, release)
		})
		if !started {
			r.dropQueue(queue)
			r.reg.suspension.endProbe(probe)
			<-r.workers
		}
	}
}

// takeDueQueue returns the queue that is due first. If there is none, or if the handler is suspended, it returns the time
// to wait in idle.
func (r *waitingRoom) takeDueQueue(now time.Time) (queue *waitingQueue, probe int, idle permit) {
	r.mu.Lock()
	defer r.mu.Unlock()

	if len(r.scheduled) == 0 {
		return nil, 0, permit{}
	}
	if due := r.scheduled[0].due; due.After(now) {
		return nil, 0, permit{wait: due.Sub(now)}
	}
	allowed := r.reg.suspension.mayRetry(now)
	if !allowed.ok {
		return nil, 0, allowed
	}

	queue = heap.Pop(&r.scheduled).(*waitingQueue)
	queue.running = true
	return queue, allowed.probe, permit{}
}

// sleep blocks until the time of idle is over, the suspension changes, or a queue is scheduled. A time of 0 means no limit.
func (r *waitingRoom) sleep(ctx context.Context, idle permit) {
	var timer <-chan time.Time
	if idle.wait > 0 {
		alarm := time.NewTimer(idle.wait)
		defer alarm.Stop()
		timer = alarm.C
	}

	select {
	case <-timer:
	case <-idle.changed:
	case <-r.wake:
	case <-ctx.Done():
	}
}

// retryQueue tries the first message of a queue, and then returns the queue or removes it if it is empty. Then the queue that is due
// first follows, so that a key with many messages holds up no other keys. It calls release before it waits for a lane.
func (r *waitingRoom) retryQueue(partition *partition, queue *waitingQueue, probe int, release func()) {
	defer r.reg.suspension.endProbe(probe)
	// removeQueue compares this number, so it keeps a queue to which a message is added after the read.
	added := r.addedTo(queue)
	message, err := r.s.c.waiting.First(partition.s.drainCtx, r.place(queue.key.tp), queue.key.queue)
	if err != nil {
		partition.reportTrouble("cannot read a message that is set aside; it is read again", err, "handler", r.reg.name)
		r.returnQueue(queue, interruptedPause)
		return
	}
	if message == nil {
		r.removeQueue(queue, added)
		return
	}

	// The handler must not get it any more.
	if message.Discarded != nil {
		wait := time.Duration(0)
		if !partition.giveUpDiscarded(message) {
			wait = interruptedPause
		}
		r.returnQueue(queue, wait)
		return
	}

	// The lane began with a later message of the key before an operator requeued this one.
	if attempted := partition.attemptOfLane(r.reg, message); attempted != nil {
		r.reg.suspension.endProbe(probe)
		release()
		select {
		case <-attempted:
		case <-partition.serveCtx.Done():
		}
		r.returnQueue(queue, 0)
		return
	}

	track := partition.newRetryTrack(r.reg, message)
	if !track.acquireSlots() {
		r.returnQueue(queue, 0)
		return
	}
	finished := track.handleAlone(track.waitingTask())
	track.releaseSlots()
	if !finished {
		r.returnQueue(queue, interruptedPause)
		return
	}
	r.returnQueue(queue, track.postponedFor)
}

// addedTo returns how many messages were added to the queue so far.
func (r *waitingRoom) addedTo(queue *waitingQueue) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return queue.added
}

// returnQueue ends the work on a queue, which is due again after wait.
func (r *waitingRoom) returnQueue(queue *waitingQueue, wait time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.returnQueueLocked(queue, wait)
}

func (r *waitingRoom) returnQueueLocked(queue *waitingQueue, wait time.Duration) {
	queue.running = false
	if r.queues[queue.key] == queue {
		r.scheduleLocked(queue, time.Now().Add(wait))
	}
}

// removeQueue removes a queue that was found empty when it had the given number of added messages. If messages were added since, it
// returns the queue instead. If a message is being added, the queue stays, and endAdd schedules it.
func (r *waitingRoom) removeQueue(queue *waitingQueue, added int) {
	r.mu.Lock()
	defer r.mu.Unlock()

	if queue.added != added {
		r.returnQueueLocked(queue, 0)
		return
	}
	queue.running = false
	if queue.adding == 0 && r.queues[queue.key] == queue {
		delete(r.queues, queue.key)
		r.size.Add(-1)
	}
}

// dropQueue removes a queue for which no worker could start, because its partition was given back. If the member has got the partition
// since, the queue stays: the queues of the partition may have been read before.
func (r *waitingRoom) dropQueue(queue *waitingQueue) {
	r.mu.Lock()
	defer r.mu.Unlock()
	queue.running = false
	if r.queues[queue.key] != queue {
		return
	}
	if r.s.findPartition(queue.key.tp) != nil {
		r.scheduleLocked(queue, time.Now().Add(roomPoll))
		return
	}
	delete(r.queues, queue.key)
	r.size.Add(-1)
}

// newRetryTrack returns a track that handles one message that is set aside. It is not a track of the partition.
func (p *partition) newRetryTrack(reg *registration, message *setaside.Message) *track {
	lane := inbox.Lane(message.Key, message.Offset)
	return &track{p: p, key: trackKey{lane, reg.name}, reg: reg, lane: lane, waiting: message}
}

// waitingTask returns the task of a track of newRetryTrack.
func (t *track) waitingTask() task {
	message := t.waiting
	rec := recordOfWaiting(message)
	entry := &entry{
		offset: message.Offset, lane: t.lane, rec: rec, openShares: 1,
		shares: []share{{reg: t.reg, state: shareStarted, attempts: attemptsFromStore(message.Attempts, time.Now())}},
	}
	entry.m, entry.decodeErr = t.p.decodeWaiting(&rec)
	return task{entry, &entry.shares[0]}
}

// recordOfWaiting returns the record of a message that is set aside.
func recordOfWaiting(message *setaside.Message) transport.Record {
	rec := transport.Record{
		Topic: message.Topic, Partition: message.Partition, Offset: message.Offset, LeaderEpoch: message.LeaderEpoch,
		Time: message.Time, Key: message.Key, Value: message.Value,
	}
	for _, h := range message.Headers {
		rec.Headers = append(rec.Headers, event.Header(h))
	}
	return rec
}

// decodeWaiting decodes the record of a message that is set aside, of which only the record is stored. With an error, the message has
// the fields of the record alone.
func (p *partition) decodeWaiting(rec *transport.Record) (*Message, error) {
	decoded, err := p.s.decodeRecord(p.drainCtx, rec)
	if err == nil {
		return decoded, nil
	}
	decoded = completeMessage(newMessage(rec), rec, p.s.c.group)
	p.s.c.dropForeignControls(decoded, time.Now())
	return decoded, wrapDecodeError(rec, err)
}

// attemptsFromStore returns the attempts of a message that was set aside.
func attemptsFromStore(attempts setaside.Attempts, now time.Time) failures {
	out := failures{Failed: attempts.Failed, Spared: attempts.Spared}
	if attempts.Failed > 0 {
		out.Since = now.Add(-attempts.Elapsed)
	}
	for _, f := range attempts.History {
		out.History = append(out.History, deadletter.Failure(f))
	}
	return out
}

// attemptsForStore is the reverse of attemptsFromStore.
func attemptsForStore(failures failures, now time.Time) setaside.Attempts {
	out := setaside.Attempts{Failed: failures.Failed, Spared: failures.Spared}
	if failures.Failed > 0 {
		out.Elapsed = max(0, now.Sub(failures.Since))
	}
	for _, f := range failures.History {
		out.History = append(out.History, setaside.Failure(f))
	}
	return out
}
