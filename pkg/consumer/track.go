package consumer

import (
	"cmp"
	"errors"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

// track handles the messages of one lane for one handler, one after another and in order. Tracks do
// not wait for each other.
type track struct {
	p       *partition
	key     trackKey
	reg     *registration // of the messages that run; another one of the same name may follow
	lane    int32
	queue   []task // guarded by the partition's lock
	running bool   // guarded by the partition's lock

	attempt attemptMark // guarded by the partition's lock

	holdsSlot    bool          // one of the session's slots
	handlerSlots chan struct{} // the handler's slots, of which the track holds one too; nil without a Limit
	trouble      trouble
	lastRun      time.Duration // how long the handler took in the last attempt

	// Only the track of a message that is set aside has the following fields.
	waiting      *setaside.Message
	postponedFor time.Duration // 0 unless the message failed again
}

// task is one message for one handler.
type task struct {
	entry *entry
	share *share
}

// handleQueue handles the queued tasks until the queue is empty. If it is interrupted, the tasks
// that are left are fetched again.
func (t *track) handleQueue() {
	for t.selectRegistration() {
		if t.p.s.c.gate.isPaused() || !t.acquireSlots() {
			t.returnTasks(nil)
			return
		}

		left := t.handleTasks(t.startTasks())
		t.releaseSlots()
		if len(left) > 0 {
			t.returnTasks(left)
			return
		}
	}
}

// selectRegistration sets the track's registration to that of the first queued task. If there is
// nothing to start, it ends the track and returns false.
func (t *track) selectRegistration() bool {
	partition := t.p
	partition.mu.Lock()
	defer partition.mu.Unlock()

	if len(t.queue) == 0 || partition.closed || partition.serveCtx.Err() != nil {
		t.retireLocked()
		return false
	}
	t.reg = t.queue[0].share.reg
	return true
}

// retireLocked removes the track from its partition. The next message of its lane and handler
// creates a new track. The caller holds the partition's lock.
func (t *track) retireLocked() {
	t.queue, t.running = nil, false
	delete(t.p.tracks, t.key)
}

// acquireSlots blocks until the track has a slot of its handler's Limit and then one of the
// session's slots. In this order, a lane that waits for its own handler does not keep other
// handlers from running. It returns false if the generation ends first.
func (t *track) acquireSlots() bool {
	session := t.p.s
	if t.reg.slots != nil {
		select {
		case t.reg.slots <- struct{}{}:
		case <-t.p.serveCtx.Done():
			return false
		}
	}

	select {
	case session.laneSlots <- struct{}{}:
		t.handlerSlots, t.holdsSlot = t.reg.slots, true
		session.countRunning(1)
	case <-t.p.serveCtx.Done():
		// The slot of the handler must not stay occupied without a running track.
		if t.reg.slots != nil {
			<-t.reg.slots
		}
	}
	return t.holdsSlot
}

// releaseSlots releases the slots of acquireSlots, if the track holds any.
func (t *track) releaseSlots() {
	if !t.holdsSlot {
		return
	}
	t.holdsSlot = false
	t.p.s.countRunning(-1)

	<-t.p.s.laneSlots
	if t.handlerSlots != nil {
		<-t.handlerSlots
	}
}

// yieldSlots releases the slots while callback runs, and acquires them again afterwards. If the generation
// ends before that, the track has no slot and must not start anything.
func (t *track) yieldSlots(callback func()) {
	t.releaseSlots()
	callback()
	t.acquireSlots()
}

// returnTasks ends the track. The unfinished tasks in left and all queued tasks are fetched again.
// No queued task may run first: it would move the watermark past the unfinished ones.
func (t *track) returnTasks(left []task) {
	partition := t.p
	partition.update(func() {
		left = append(left[:len(left):len(left)], t.queue...)
		t.retireLocked()
		for _, x := range left {
			x.share.state = shareWaiting
			partition.dropBodyLocked(x.entry)
		}

		if len(left) > 0 {
			partition.refetch = true
			partition.wakeReader()
		}
	})
}

// startTasks removes as many tasks from the queue as may share a transaction, and marks them as
// started. It returns none if the queue was dropped in the meantime.
func (t *track) startTasks() []task {
	partition := t.p
	partition.mu.Lock()
	defer partition.mu.Unlock()

	if partition.closed || partition.serveCtx.Err() != nil {
		return nil
	}

	// A batch is never larger than the transaction's share of the lifetime that the server allows.
	most := 1
	if t.mayBatch() {
		most = t.reg.pace.batchSize(t.reg.batchSize)
	}
	n := 0
	// A task of another registration of the same name ends the batch.
	for n < min(most, len(t.queue)) && t.queue[n].share.reg == t.reg {
		n++
	}

	list := t.queue[:n:n]
	t.queue = t.queue[n:]
	for _, x := range list {
		x.share.state = shareStarted
	}
	return list
}

// mayBatch reports whether several messages may be handled in one attempt.
func (t *track) mayBatch() bool {
	if t.reg.system || t.reg.mode == Claimed {
		return false
	}
	return t.reg.batch != nil || t.reg.mode.usesTransaction()
}

// mustStop reports whether the track must not start anything: the generation ends or the consumer
// is paused.
func (t *track) mustStop() bool { return t.p.serveCtx.Err() != nil || t.p.s.c.gate.isPaused() }

// waitYielding blocks for wait or until the track must stop. Other lanes use its slots during the wait.
func (t *track) waitYielding(wait time.Duration) {
	if wait <= 0 || t.mustStop() {
		return
	}

	timer := time.NewTimer(wait)
	defer timer.Stop()
	t.yieldSlots(func() { awaitSignal(t, timer.C) })
}

// awaitSignal blocks until signal has an element or is closed. It returns false if the track must stop before.
func awaitSignal[T any](track *track, signal <-chan T) bool {
	for {
		// The channel is read before the check. A pause in between closes it.
		_, changed := track.p.s.c.gate.currentState()
		if track.mustStop() {
			return false
		}

		select {
		case <-signal:
			return true
		case <-changed:
		case <-track.p.serveCtx.Done():
		}
	}
}

// repeatStep calls step until it succeeds, and reports each failure: "cannot DOING; it is tried again". Other lanes use the slots of
// the track between two calls. It returns false if the track must stop, or must attach its partition again, before the step succeeds.
func (t *track) repeatStep(doing string, step func() error) bool {
	backoff := retry.Reopen.Start()
	for {
		err := step()
		if err == nil {
			return true
		}

		if errors.Is(err, inbox.ErrRecreated) {
			t.p.s.failRun(err)
			return false
		}
		if errors.Is(err, errOrphan) {
			return false
		}
		t.p.reportTrouble("cannot "+doing+"; it is tried again", err, "handler", t.reg.name)
		if t.mustStop() {
			return false
		}
		t.waitYielding(backoff.Next())

		// As after an attempt, the partition is attached again and the message is fetched again.
		if errors.Is(err, inbox.ErrStale) {
			t.p.detachHandler(t.reg)
			return false
		}
	}
}

// handleTasks handles started tasks: together where that is allowed, one by one otherwise and after
// a failure. It returns the tasks that an interruption left unfinished.
func (t *track) handleTasks(list []task) (left []task) {
	// The limit of messages that may be set aside stops the lane, not the handler.
	if len(list) > 0 && !t.awaitRoom() {
		return list
	}
	defer t.trouble.clearTrouble(t)

	for len(list) > 0 {
		n := t.reg.rateLimiter.largestBatch(min(t.countDue(list), t.reg.pace.batchSize(t.reg.batchSize)))
		if n <= 1 || !t.mayBatch() || t.reg.suspension.probesOnly() || t.reg.unprepared.Load() != nil {
			if !t.handleAlone(list[0]) {
				return list
			}
			if list = list[1:]; t.mustStop() {
				return list
			}
			continue
		}

		switch t.handleTogether(list[:n]) {
		case outcomeHandled:
			list = list[n:]
			continue
		case outcomeRetry:
			continue
		case outcomeInterrupted:
			return list
		case outcomeSplit:
		}

		// One by one, the messages show which of them fails.
		for i, x := range list[:n] {
			if i > 0 && t.mustStop() || !t.handleAlone(x) {
				return list[i:]
			}
		}
		list = list[n:]
	}
	return nil
}

// outcome is the result of one attempt at several messages.
type outcome uint8

const (
	outcomeHandled outcome = iota
	outcomeInterrupted
	outcomeRetry // with as many messages as the pace allows now
	outcomeSplit // one by one: Retry decides about the message that failed
)

// handleTogether attempts several messages in one transaction.
func (t *track) handleTogether(list []task) outcome {
	res, err := t.attemptTasks(list)
	if err == nil {
		t.trouble.clearTrouble(t)
		t.finishAttempt(list, res)
		return outcomeHandled
	}
	// An interrupted attempt shows nothing about its messages.
	if t.p.drainCtx.Err() != nil || errors.Is(err, errOrphan) || errors.Is(err, errInterrupted) {
		return outcomeInterrupted
	}
	if errors.Is(err, errBehind) {
		return outcomeSplit
	}

	if slow, ok := errors.AsType[*overrunError](err); ok {
		t.reg.pace.shrinkAfter(len(list), slow)
		return outcomeRetry
	}
	// One of the messages is to blame, so each is tried alone.
	if blamed, _ := t.assignBlame(err); blamed {
		return outcomeSplit
	}

	// A smaller batch is less likely to be aborted again.
	if isAbortedTransaction(err) {
		t.reg.pace.shrinkAfter(len(list), nil)
	}
	if !t.trouble.waitOut(t, err) {
		return outcomeInterrupted
	}
	return outcomeRetry
}

// handleAlone handles one message until it is finished. It returns false if it was interrupted before.
func (t *track) handleAlone(current task) bool {
	defer t.trouble.clearTrouble(t)
	overruns := 0 // in a row
	probe := 0    // the id of the probe, if the handler is suspended
	defer func() { t.reg.suspension.endProbe(probe) }()

	for first := true; ; first = false {
		if !first && t.mustStop() {
			return false
		}
		if !t.reg.suspension.isProbe(probe) {
			turn, id := t.takeTurn(current)
			if turn != turnNow {
				return turn == turnPassed
			}
			probe = id
		}

		err := t.precheckTask(current)
		// A message that is fetched again after its deadline may have been handled before it. The attempt then counts a duplicate.
		if errors.As(err, new(*expiredError)) {
			handled, checked := t.wasHandled(current)
			if !checked {
				return false
			}
			if handled {
				err = nil
			}
		}
		if err != nil {
			if notDue, ok := errors.AsType[*notDueError](err); ok {
				// Another message may be the probe during the wait.
				t.reg.suspension.endProbe(probe)
				t.waitYielding(notDue.Wait(time.Now()))
			} else if done, again := t.applyVerdict(current, err); !again {
				return done
			}
			continue
		}

		list := []task{current}
		res, err := t.attemptTasks(list)
		if err == nil {
			t.finishAttempt(list, res)
			return true
		}
		if t.p.drainCtx.Err() != nil || errors.Is(err, errOrphan) || errors.Is(err, errInterrupted) {
			return false
		}
		// An earlier message of the key has appeared, so this one is set aside.
		if errors.Is(err, errBehind) {
			t.reg.suspension.endProbe(probe)
			continue
		}

		if slow, ok := errors.AsType[*overrunError](err); ok {
			// A new primary aborts transactions too, but it hardly aborts one message's transaction twice.
			if overruns++; overruns == 1 {
				continue
			}
			err = &handlerFailure{&lifetimeError{
				Handler: t.reg.name, Ran: t.lastRun, Reason: cmp.Or(errorText(slow.err), "its commit failed"),
			}}
		}
		overruns = 0

		if blamed, cause := t.assignBlame(err); blamed {
			t.trouble.clearTrouble(t)
			if done, again := t.applyVerdict(current, cause); !again {
				return done
			}
			continue
		}
		if !t.trouble.waitOut(t, err) {
			return false
		}
	}
}

// countDue returns how many of the first messages may be handled now.
func (t *track) countDue(list []task) int {
	for i, x := range list {
		if t.precheckTask(x) != nil || t.isBehind(x) {
			return i
		}
	}
	return len(list)
}

// precheckTask returns why the message must not be handled now, or nil. Handlers of the consumer
// itself handle every message.
func (t *track) precheckTask(task task) error {
	if t.reg.system {
		return nil
	}
	return checkTimes(task.entry.m, time.Now())
}

// wasHandled reports whether the inbox has the message. checked is false if the track was interrupted before.
func (t *track) wasHandled(current task) (handled, checked bool) {
	if t.waiting != nil || !t.hasWatermark(current) {
		return false, true
	}

	checked = t.repeatStep("look for an expired message in the inbox", func() error {
		ctx := t.p.drainCtx
		_, err := t.attachHandler(ctx)
		if err == nil {
			var fresh []bool
			fresh, err = t.p.s.inbox.Check(ctx, []inbox.Entry{t.inboxEntry(current)})
			handled = err == nil && !fresh[0]
		}
		// Such a message has no place in the inbox, so it was not handled.
		if errors.Is(err, errOrphan) || errors.Is(err, inbox.ErrInvalid) {
			return nil
		}
		return err
	})
	return handled, checked
}

// finishAttempt reports the result of a successful attempt and finishes its tasks.
func (t *track) finishAttempt(list []task, res attemptResult) {
	t.reg.pace.growAfter(len(list))

	if res.handled > 0 && t.reg.suspension.noteSuccess() {
		t.p.s.report(&suspendedError{Handler: t.reg.name, Over: true})
	}
	if res.handled > 0 {
		if !t.reg.system && t.reg.hasHandled.CompareAndSwap(false, true) {
			t.p.s.note("handler has handled its first message", "handler", t.reg.name,
				"topic", t.p.tp.Topic, "partition", t.p.tp.Partition, "offset", list[0].entry.offset)
		}
		t.reg.lastError.Store(nil)
		t.reg.pace.recordDuration(res.took, res.handled)
		t.p.s.c.measure(telemetry.Measurement{Metric: telemetry.Handled, N: int64(res.handled), Took: res.took, Handler: t.reg.name})
	}
	t.count(telemetry.Duplicates, res.duplicates, "")
	t.completeTasks(list)
}

// inboxEntry returns the identity and the place of task in the inbox. A message that is set aside has no place: the watermark
// of its lane has passed it.
func (t *track) inboxEntry(task task) inbox.Entry {
	message := task.entry.m
	entry := inbox.Entry{Key: inbox.Key{Consumer: t.p.s.c.inboxConsumer(t.reg), Namespace: namespaceOf(message), ID: dedupID(message)}}
	if t.waiting == nil {
		entry.Place = inbox.Place{
			Topic: message.Topic, Partition: message.Partition, Lane: t.lane, Offset: message.Offset, LeaderEpoch: message.LeaderEpoch,
		}
	}
	return entry
}
