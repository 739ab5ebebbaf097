package consumer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/setaside"
)

// roomPoll is how often a track that is held up by a suspension, or by a full waiting room, checks whether it may move its
// message out of the way.
const roomPoll = time.Second

// errBehind reports that an earlier message of a key of the batch is set aside. The messages are tried one by one.
var errBehind = errors.New("an earlier message of the key is set aside")

// room returns the waiting room of the handler, or nil if its messages cannot be set aside.
func (t *track) room() *waitingRoom {
	return t.p.s.openRoom(t.reg)
}

// awaitRoom blocks until the stored queues of the handler are known. It returns false if the track must stop before.
func (t *track) awaitRoom() bool {
	room := t.room()
	return room == nil || awaitSignal(t, room.loaded)
}

// queueOf returns the queue of task, and false if task has no key, so that no message follows it.
func (t *track) queueOf(task task) (queueKey, bool) {
	key := task.entry.rec.Key
	return queueKey{t.p.tp, setaside.KeyQueue(key)}, key != nil
}

// isBehind reports whether an earlier message of the key is set aside for this handler.
func (t *track) isBehind(task task) bool {
	if t.waiting != nil {
		return false
	}
	room := t.room()
	if room == nil || room.size.Load() == 0 {
		return false
	}
	key, ok := t.queueOf(task)
	return ok && room.hasQueue(key)
}

// attemptMark has the messages of a lane that the handler has now. The lock of the partition guards its fields.
type attemptMark struct {
	tasks []task
	ended chan struct{} // closed at the end of the attempt; nil unless a worker waits for it
}

// begin announces an attempt at the messages. It returns false if an earlier message of one of their keys is set aside.
//
// A requeued message appears in its room while the lane handles a later message of its key. So the lane first announces its
// attempt and then looks for the queue, while the worker of the queue first has the queue and then looks for the attempt: one of
// them sees the other.
func (a *attemptMark) begin(track *track, list []task) bool {
	if track.waiting != nil {
		return true
	}
	track.p.mu.Lock()
	a.tasks = list
	track.p.mu.Unlock()

	if slices.ContainsFunc(list, track.isBehind) {
		a.end(track.p)
		return false
	}
	return true
}

// end ends begin.
func (a *attemptMark) end(partition *partition) {
	partition.mu.Lock()
	defer partition.mu.Unlock()
	a.tasks = nil
	if a.ended != nil {
		close(a.ended)
		a.ended = nil
	}
}

// attemptOfLane returns a channel that is closed when the lane of message has ended an attempt at a message of its key, or nil if there is
// no such attempt.
func (p *partition) attemptOfLane(reg *registration, message *setaside.Message) <-chan struct{} {
	// Messages without a key, and those that need no order, are alone in their queue.
	if message.Key == nil || message.Queue != setaside.KeyQueue(message.Key) {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()

	track := p.tracks[trackKey{inbox.Lane(message.Key, message.Offset), reg.name}]
	isSameKey := func(task task) bool { return bytes.Equal(task.entry.rec.Key, message.Key) }
	if track == nil || !slices.ContainsFunc(track.attempt.tasks, isSameKey) {
		return nil
	}
	if track.attempt.ended == nil {
		track.attempt.ended = make(chan struct{})
	}
	return track.attempt.ended
}

// takeTurn blocks while the handler is suspended. It returns:
//   - turnNow if the message may be tried, with the id of the probe if the handler is suspended.
//   - turnPassed if the message was set aside untried, because an earlier message of its key is, because the handler cannot be
//     prepared, or because the handler is suspended and all other handlers have finished the message.
//   - turnStopped if the track must stop.
func (t *track) takeTurn(task task) (turn, int) {
	// A message that is set aside was given its turn by its room.
	if t.waiting != nil || t.reg.system {
		return turnNow, 0
	}

	for {
		aside := t.isBehind(task) || t.reg.unprepared.Load() != nil && t.room() != nil
		if !aside {
			permit := t.mayStart()
			if permit.ok {
				return turnNow, permit.probe
			}
			// If all other handlers have finished the message, only this handler keeps its body in
			// memory.
			if aside = t.reg.suspension.isSuspended() && t.holdsUpOthers(task); !aside {
				t.waitForChange(permit)
			}
		}

		if t.mustStop() {
			return turnStopped, 0
		}
		if !aside {
			continue
		}
		switch stored, full := t.setAside(task, asideTerms{}); {
		case full:
			t.waitYielding(roomPoll)
		case stored:
			return turnPassed, 0
		default:
			return turnStopped, 0
		}
	}
}

// turn is the result of takeTurn.
type turn uint8

const (
	turnNow turn = iota
	turnPassed
	turnStopped
)

// mayStart reports whether the handler may take a message. A suspended handler probes with a message that is set aside, so
// that no other message joins it. Without one that is due within the longest wait, or in doubt, it probes with a new message.
func (t *track) mayStart() permit {
	now := time.Now()
	if t.reg.suspension.prefersRetries() {
		if room := t.room(); room != nil && room.hasDueBefore(now.Add(t.reg.retry.Max)) {
			return permit{wait: roomPoll}
		}
	}
	return t.reg.suspension.mayStart(now)
}

// holdsUpOthers reports whether the message has other handlers, and all of them have finished it.
func (t *track) holdsUpOthers(task task) bool {
	if t.room() == nil {
		return false
	}
	t.p.mu.Lock()
	defer t.p.mu.Unlock()
	return len(task.entry.shares) > 1 && task.entry.openShares == 1
}

// waitForChange blocks until the suspension changes, but at most for roomPoll. Other lanes use the slots of the track
// during the wait. The lane does not wait for the database any more.
func (t *track) waitForChange(permit permit) {
	t.trouble.markBack(t)
	t.yieldSlots(func() {
		timer := time.NewTimer(roomPoll)
		defer timer.Stop()
		_, paused := t.p.s.c.gate.currentState()
		if t.mustStop() {
			return
		}

		select {
		case <-timer.C:
		case <-permit.changed:
		case <-paused:
		case <-t.p.serveCtx.Done():
		}
	})
}

// asideTerms are the terms on which a message is set aside.
type asideTerms struct {
	wait      time.Duration // the message is due after it
	unordered bool          // later messages of its key need not wait for it
}

// setAside sets the message of current aside, with its failed attempts if it has any. full reports that the
// message has to wait in its lane, because no more messages may be set aside or the record is too large. stored is false
// if the track was interrupted.
func (t *track) setAside(current task, terms asideTerms) (stored, full bool) {
	room := t.room()
	if room.isFull() {
		return false, true
	}

	// The order of the queue depends on the generation of the topic, which the inbox returns in every mode. If the topic was deleted,
	// the generation of the last attempt counts.
	generation := current.share.generation
	attach := func() error {
		attached, err := t.attachHandler(t.p.drainCtx)
		if err == nil && !current.entry.orphan.Load() {
			generation = attached
		}
		return err
	}
	if !current.entry.orphan.Load() && !t.repeatStep("begin with the partition in the inbox", attach) {
		return false, false
	}

	// Without a failed attempt the message is due as soon as its queue has no earlier one.
	message := t.newWaiting(current, generation, terms.unordered)
	queue := room.beginAdd(queueKey{t.p.tp, message.Queue})
	defer func() { room.endAdd(queue, time.Now().Add(terms.wait)) }()

	ended := t.repeatStep("set a message aside", func() error {
		err := t.storeWaiting(current, message, terms.wait)
		if full = errors.Is(err, setaside.ErrTooLarge); full || err == nil {
			return nil
		}
		return fmt.Errorf("setting aside message %s for handler %q: %w", record.Clip(current.entry.m.ID, maxReason), t.reg.name, err)
	})
	if !ended || full {
		return false, full
	}

	// A handler of the same name has replaced this one. It may have loaded its queues before.
	if t.reg.removed.Load() {
		if reg := t.p.s.c.findByConsumer(room.handler); reg != nil {
			t.p.s.openRoom(reg).discover(t.p.tp, []setaside.Digest{message.Queue})
		}
	}
	t.completeTasks([]task{current})
	return true, false
}

// hasWatermark reports whether a watermark of the inbox has to pass task. The watermarks of a topic that was created again
// have other offsets.
func (t *track) hasWatermark(task task) bool {
	return t.reg.mode.usesInbox() && !task.entry.orphan.Load()
}

// newWaiting returns the document of a message that is set aside, of a generation of its topic.
func (t *track) newWaiting(task task, generation int64, unordered bool) *setaside.Message {
	rec, message := &task.entry.rec, task.entry.m
	place := setaside.Place{Handler: t.p.s.c.inboxConsumer(t.reg), Topic: message.Topic, Partition: message.Partition}
	waiting := &setaside.Message{
		Place: place, Generation: generation, Offset: message.Offset, LeaderEpoch: rec.LeaderEpoch, Time: rec.Time,
		Key: rec.Key, Value: rec.Value, Attempts: attemptsForStore(task.share.attempts, time.Now()),
	}
	for _, h := range rec.Headers {
		waiting.Headers = append(waiting.Headers, setaside.Header(h))
	}

	waiting.ID = setaside.MessageID(place, waiting.Generation, waiting.Offset, message.Source+"/"+dedupID(message))
	waiting.Queue = setaside.KeyQueue(rec.Key)
	// A message without an order to keep is a queue alone.
	if rec.Key == nil || unordered && !t.isBehind(task) {
		waiting.Queue = waiting.ID
	}
	return waiting
}

// storeWaiting writes the document of current and moves the watermark past current, in one transaction. A message that was handled
// before gets no document. Without an inbox, and if the topic was deleted after an attempt, the document alone is written. It returns
// errOrphan if the topic was deleted before any attempt: the log no longer has the message, and its next owner may have set it aside.
func (t *track) storeWaiting(current task, message *setaside.Message, wait time.Duration) error {
	ctx, session := t.p.drainCtx, t.p.s
	if current.entry.orphan.Load() && current.share.attempts.Failed == 0 {
		return errOrphan
	}
	if !t.hasWatermark(current) {
		return session.c.waiting.Add(ctx, wait, message)
	}

	// Checked first: after a takeover, the previous owner may have handled the message.
	list := []inbox.Entry{t.inboxEntry(current)}
	err := session.transact(ctx, func(ctx context.Context) error {
		fresh, err := session.inbox.Check(ctx, list)
		if err != nil {
			return err
		}
		if err := session.inbox.Pass(ctx, list); err != nil {
			return err
		}
		if err := checkOrphans([]task{current}); err != nil {
			return err
		}
		if !fresh[0] {
			return nil
		}
		return session.c.waiting.Add(ctx, wait, message)
	})
	// The topic was deleted in the meantime, so there is no watermark to move.
	if errors.Is(err, errOrphan) {
		return t.storeWaiting(current, message, wait)
	}
	return err
}

// postpone stores the failed attempts of a message that is set aside. It returns false if it was interrupted before.
func (t *track) postpone(task task, wait time.Duration) bool {
	t.waiting.Attempts = attemptsForStore(task.share.attempts, time.Now())
	t.postponedFor = wait
	return t.repeatStep("store the failure of a message that is set aside", func() error {
		return t.p.s.c.waiting.Postpone(t.p.drainCtx, t.waiting, wait)
	})
}

// handleWaiting handles a message that is set aside. The transaction that handles it removes it.
func (t *track) handleWaiting(ctx context.Context, current task, res *attemptResult) error {
	list := []task{current}
	return t.runTransaction(ctx, list, func(ctx context.Context) error {
		ctx = t.p.s.inbox.Remember(ctx)
		taken, err := t.takeWaiting(ctx, res)
		if !taken || err != nil {
			return err
		}

		fresh, err := t.p.s.inbox.Admit(ctx, []inbox.Entry{t.inboxEntry(current)})
		if err != nil {
			return &inboxFailure{fmt.Errorf("admitting a message that was set aside: %w", err)}
		}
		return t.runHandler(ctx, list, fresh, res)
	})
}

// takeWaiting removes the message, if it is set aside, in the transaction of ctx. If it is gone, another member has handled
// it, and it counts as a duplicate.
func (t *track) takeWaiting(ctx context.Context, res *attemptResult) (bool, error) {
	if t.waiting == nil {
		return true, nil
	}
	taken, err := t.p.s.c.waiting.Take(ctx, t.waiting)
	if err != nil {
		return false, &inboxFailure{err}
	}
	if !taken {
		*res = attemptResult{duplicates: 1}
	}
	return taken, nil
}

// checkOrder looks for messages that another member has set aside, after Admit found duplicates: a previous owner of the
// partition may have handled these messages, or set them aside. It returns errBehind if a fresh message of the list has to
// follow one of them.
func (t *track) checkOrder(ctx context.Context, list []task, fresh []bool) error {
	room := t.room()
	if room == nil || !slices.Contains(fresh, false) {
		return nil
	}

	var queues []setaside.Digest
	for i, x := range list {
		if key, ok := t.queueOf(x); ok && !fresh[i] {
			queues = append(queues, key.queue)
		}
	}
	// The previous owner's messages are in the database, but not in the room of this process.
	found, err := t.p.s.c.waiting.Waiting(ctx, room.place(t.p.tp), queues)
	if err != nil {
		return &inboxFailure{err}
	}

	room.discover(t.p.tp, found)
	for i, x := range list {
		if key, ok := t.queueOf(x); ok && fresh[i] && slices.Contains(found, key.queue) {
			return errBehind
		}
	}
	return nil
}

// noteOutcome records the failure of a message, after its attempts in place, for the suspension of the handler.
func (t *track) noteOutcome(task task, verdict verdict, cause error) {
	suspension := &t.reg.suspension
	switch {
	case verdict.Action == actSuspend:
		if until, began := suspension.suspendFor(verdict.Delay); began {
			t.p.s.report(&suspendedError{Handler: t.reg.name, Until: until, Err: cause})
		}
	case verdict.Action == actAside && (!verdict.Uncounted || isTransient(cause)):
		if until, began := suspension.noteFailure(t.outageKey(task), t.waiting != nil, &t.reg.retry); began {
			t.p.s.report(&suspendedError{Handler: t.reg.name, Until: until, Err: cause})
		}
	default:
	}
}

// outageKey returns the digest that counts as the key of task in an outage. A message without a key counts alone.
func (t *track) outageKey(task task) setaside.Digest {
	if t.waiting != nil {
		return t.waiting.Queue
	}
	if key, ok := t.queueOf(task); ok {
		return key.queue
	}
	return setaside.KeyQueue([]byte(task.entry.m.ID))
}

// completeTasks finishes tasks. A message that was set aside has no entry in its partition any more.
func (t *track) completeTasks(list []task) {
	if t.waiting == nil {
		t.p.finishTasks(list)
		return
	}
	for _, x := range list {
		t.p.s.c.reg.notifyWatches(x.entry.m)
	}
}
