package consumer

import (
	"container/heap"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/internal/service/transport"
)

const (
	// interruptedPause is how long a queue rests after an attempt that was interrupted.
	interruptedPause = time.Second
)

// waitingRoom has the queues of one handler with messages that are set aside, in the partitions of the session, and
// retries their messages. Package setaside describes the steps.
type waitingRoom struct {
	s       *session
	reg     *registration
	handler string // the handler's name in the inbox
	workers chan struct{}
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
	added   int  // messages that were set aside; if it grows, a worker looks again
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
func (h *dueHeap) Push(pushed any) {
	queue := pushed.(*waitingQueue)
	queue.index = len(*h)
	*h = append(*h, queue)
}

// Pop removes the last queue.
func (h *dueHeap) Pop() any {
	old := *h
	queue := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	queue.index = -1
	return queue
}

// openRoom returns the waiting room of a handler. If there is none, it opens one and starts its loop, unless the session ends.
// openRoom returns nil if the consumer has no store for messages that are set aside.
func (s *session) openRoom(reg *registration) *waitingRoom {
	if s.c.waiting == nil || reg.system {
		return nil
	}
	s.roomsMu.Lock()
	// The lock spans the creation, so that two tracks do not open two rooms.
	defer s.roomsMu.Unlock()

	room := s.rooms[reg]
	if room == nil {
		room = &waitingRoom{
			s: s, reg: reg, handler: s.c.inboxConsumer(reg),
			// Retries leave most of the lanes to new messages.
			workers: make(chan struct{}, max(1, s.c.s.concurrency/4)),
			loaded:  make(chan struct{}), wake: make(chan struct{}, 1),
			queues: map[queueKey]*waitingQueue{},
		}
		s.rooms[reg] = room
		if !s.closing {
			s.loops.Go(room.retryDueQueues)
		}
	}
	return room
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
func (r *waitingRoom) hasDueBefore(moment time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.scheduled) > 0 && r.scheduled[0].due.Before(moment)
}

// findQueueLocked returns a queue, and creates it if it does not exist.
func (r *waitingRoom) findQueueLocked(key queueKey) *waitingQueue {
	queue := r.queues[key]
	if queue == nil {
		queue = &waitingQueue{key: key, index: -1}
		r.queues[key] = queue
		r.size.Add(1)
	}
	return queue
}

// scheduleLocked makes a queue due at a time, unless a worker has it or it is due earlier.
func (r *waitingRoom) scheduleLocked(queue *waitingQueue, due time.Time) {
	switch {
	case queue.running || queue.index >= 0 && !due.Before(queue.due):
		return
	case queue.index >= 0:
		queue.due = due
		heap.Fix(&r.scheduled, queue.index)
	default:
		queue.due = due
		heap.Push(&r.scheduled, queue)
	}

	retry.Signal(r.wake)
}

// beginAdd announces a message of the queue of key. From now on, later messages of its key follow it. It must be called before
// the transaction that sets the message aside, and be followed by endAdd with its result.
func (r *waitingRoom) beginAdd(key queueKey) *waitingQueue {
	r.mu.Lock()
	defer r.mu.Unlock()
	queue := r.findQueueLocked(key)
	queue.adding++
	return queue
}

// endAdd ends beginAdd. If the queue was empty, it is due at the given time.
func (r *waitingRoom) endAdd(queue *waitingQueue, due time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	queue.adding--
	r.count++

	// The partition was given back while a handler was abandoned. If it has come back, its queue gets the message.
	if queue = r.queues[queue.key]; queue == nil {
		return
	}
	queue.added++
	// A queue that is scheduled keeps the due time of its first message.
	if queue.index < 0 {
		r.scheduleLocked(queue, due)
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

// isFull reports whether no more messages of the handler may be set aside, by the last count of the group and the messages that
// this member has added since.
func (r *waitingRoom) isFull() bool {
	n, at := r.s.c.health.countOf(r.reg.name)
	r.mu.Lock()
	defer r.mu.Unlock()
	if !at.Equal(r.countedAt) {
		r.count, r.countedAt = n, at
	}
	return r.count >= max(r.reg.retry.MaxWaiting, 0)
}

// loadQueues starts to load the queues of some partitions in each room, and returns a channel that is closed after that. A room that is
// opened later loads the queues of all partitions. It loads nothing if the session ends.
func (s *session) loadQueues(list []*partition) (loaded <-chan struct{}) {
	rooms, done := s.listRooms(), make(chan struct{})
	s.roomsMu.Lock()
	defer s.roomsMu.Unlock()
	if s.closing {
		return done
	}

	s.loops.Go(func() {
		defer close(done)
		for _, r := range rooms {
			if r.load(s.serveCtx, list) != nil {
				return
			}
		}
	})
	return done
}

// load reads the queues of some partitions. It repeats that until it succeeds or ctx ends.
func (r *waitingRoom) load(ctx context.Context, list []*partition) error {
	places := make([]setaside.Place, len(list))
	for i, p := range list {
		places[i] = r.place(p.tp)
	}
	return r.repeat(ctx, loading, func() error {
		heads, err := r.s.c.waiting.Heads(ctx, places)
		r.addHeads(heads)
		return err
	})
}

// unpreparedError reports that a handler that was registered while the consumer runs cannot be prepared, for example because of
// an index with other options. Its messages are set aside, so that its partitions go on, until the preparation succeeds.
type unpreparedError struct {
	handler string
	err     error
}

func (e *unpreparedError) Error() string {
	return fmt.Sprintf("handler %q cannot be prepared, its messages are set aside until it can: %v", e.handler, e.err)
}

func (e *unpreparedError) Unwrap() error { return e.err }

func (e *unpreparedError) line() line {
	return line{slog.LevelWarn, "cannot prepare the handler; its messages are set aside until that succeeds", []any{"handler", e.handler, "error", e.err}}
}

// prepareHandler prepares a handler that was registered while the consumer runs. It repeats that while the database is
// unavailable. Other errors are those of the handler: it returns false, and has recorded and reported the error.
func (r *waitingRoom) prepareHandler(ctx context.Context) (prepared bool, err error) {
	err = r.repeat(ctx, fmt.Sprintf("preparing handler %q", r.reg.name), func() error {
		limited, cancel := context.WithTimeout(ctx, readyTimeout)
		defer cancel()
		err := r.reg.prepare(limited)
		if prepared = err == nil; prepared {
			r.reg.unprepared.Store(nil)
		}
		if prepared || isTransient(err) || mongo.IsTimeout(err) {
			return err
		}

		if last := r.reg.unprepared.Load(); last == nil || last.err.Error() != err.Error() {
			failed := &unpreparedError{r.reg.name, err}
			r.reg.unprepared.Store(failed)
			r.s.report(failed)
		}
		return nil
	})
	return prepared, err
}

// repairHandler prepares a handler whose first preparation failed, until it succeeds, the handler is removed or ctx ends.
func (r *waitingRoom) repairHandler(ctx context.Context) error {
	backoff := retry.Reopen.Start()

	for !r.reg.removed.Load() {
		if err := backoff.Wait(ctx); err != nil {
			return err
		}
		prepared, err := r.prepareHandler(ctx)
		if err != nil {
			return err
		}
		if prepared {
			return nil
		}
	}
	return nil
}

// checkFailing begins in doubt if so many keys of the handler failed, in the whole group, that a service may be unavailable.
// Otherwise each member that starts during an outage would set as many further keys aside. It repeats the read until it
// succeeds or ctx ends.
func (r *waitingRoom) checkFailing(ctx context.Context) error {
	outage := r.reg.retry.Outage
	if outage < 0 {
		return nil
	}
	return r.repeat(ctx, loading, func() error {
		n, err := r.s.c.waiting.Failing(ctx, r.handler, outage)
		if n >= outage {
			r.reg.suspension.beginInDoubt()
		}
		return err
	})
}

// loading is the purpose of reads in the errors that are reported.
const loading = "loading the messages that are set aside"

// repeat calls callback until it succeeds or ctx ends. It reports each failure.
func (r *waitingRoom) repeat(ctx context.Context, doing string, callback func() error) error {
	backoff := retry.Reopen.Start()
	for {
		err := callback()
		if err == nil {
			return nil
		}

		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		r.s.reportTrouble("cannot prepare the retries of a handler; they begin after that", fmt.Errorf("%s: %w", doing, err), "handler", r.reg.name)
		if err := backoff.Wait(ctx); err != nil {
			return err
		}
	}
}

// forget removes the queues of a partition that was given back.
func (r *waitingRoom) forget(tp transport.TopicPartition) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for key, q := range r.queues {
		if key.tp != tp {
			continue
		}
		if q.index >= 0 {
			heap.Remove(&r.scheduled, q.index)
		}
		delete(r.queues, key)
		r.size.Add(-1)
	}
}

// addHeads schedules the queues that were read from the store.
func (r *waitingRoom) addHeads(heads []setaside.Head) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, h := range heads {
		tp := transport.TopicPartition{Topic: h.Topic, Partition: h.Partition}
		// The partition may have been given back during the read.
		if r.s.findPartition(tp) != nil {
			r.scheduleLocked(r.findQueueLocked(queueKey{tp, h.Digest}), time.Now().Add(h.Wait))
		}
	}
}
