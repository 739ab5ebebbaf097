package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/pkg/inbox"
)

// track is one handler's messages of one lane: one after another, in order, whatever the other tracks do.
type track struct {
	p       *partition
	key     trackKey
	reg     *registration // of the messages that run; another one of the same name may follow it
	lane    int32
	queue   []task // the partition's lock guards it
	running bool   // and this

	holdsSlot   bool          // one of the session's slots
	handlerSlots chan struct{} // the handler's slots, of which it holds one too; nil without a Limit
	trouble trouble
	lastRun     time.Duration // how long the handler took in the last attempt
}

// task is one message for one handler.
type task struct {
	entry *entry
	share  *share
}

// handleQueue handles what is queued until there is nothing more.
func (t *track) handleQueue() {
	for t.selectRegistration() {
		if t.p.s.c.gate.isPaused() || !t.acquireSlots() {
			t.returnTasks(nil)
			return
		}
		list := t.startTasks()
		left := t.handleTasks(list)
		t.releaseSlots()
		switch {
		case len(left) > 0:
			t.returnTasks(left)
			return
		}
	}
}

// selectRegistration makes the registration of the first message the track's, or ends the track if nothing is left to begin.
func (t *track) selectRegistration() bool {
	p := t.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(t.queue) == 0 || p.closed || p.s.serveCtx.Err() != nil {
		t.retireLocked()
		return false
	}
	t.reg = t.queue[0].share.reg
	return true
}

// retireLocked forgets the track: the next message of its lane and handler makes a new one. The partition's lock is held.
func (t *track) retireLocked() {
	t.queue, t.running = nil, false
	delete(t.p.tracks, t.key)
}

// acquireSlots waits for a call of the handler within its Limit, and then for one of the slots of all lanes: a lane that waits for
// its own handler keeps no other handler from running. It returns false if the generation ends first.
func (t *track) acquireSlots() bool {
	s := t.p.s
	if t.reg.slots != nil {
		select {
		case t.reg.slots <- struct{}{}:
		case <-s.serveCtx.Done():
			return false
		}
	}

	select {
	case s.laneSlots <- struct{}{}:
		t.handlerSlots, t.holdsSlot = t.reg.slots, true
		s.countRunning(1)
	case <-s.serveCtx.Done():
		if t.reg.slots != nil {
			<-t.reg.slots
		}
	}
	return t.holdsSlot
}

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

// yieldSlots gives the turn to others while f runs. Afterwards the track has its turn again unless the generation ends, when it
// begins nothing more.
func (t *track) yieldSlots(f func()) {
	t.releaseSlots()
	f()
	t.acquireSlots()
}

// returnTasks ends the track: what it began and did not finish, and with it all that is queued behind, is fetched again. Nothing
// behind may go first: it would move the watermark past what is not handled.
func (t *track) returnTasks(left []task) {
	p := t.p
	p.mu.Lock()
	defer p.mu.Unlock()
	left = append(left[:len(left):len(left)], t.queue...)
	t.retireLocked()
	for _, x := range left {
		x.share.state = shareWaiting
		p.dropBodyLocked(x.entry)
	}
	if len(left) > 0 {
		p.refetch = true
		p.wakeReader()
	}
}

// startTasks begins as many tasks as may share a transaction. There may be none any more: what waited was dropped meanwhile.
func (t *track) startTasks() []task {
	p := t.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.s.serveCtx.Err() != nil {
		return nil
	}
	most := 1
	if t.mayBatch() {
		most = t.reg.pace.batchSize(t.reg.batch)
	}
	n := 0
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

// mayBatch reports whether several messages may be handled in one go.
func (t *track) mayBatch() bool {
	if t.reg.system || t.reg.mode == inbox.Eager {
		return false
	}
	return t.reg.batchHandler != nil || t.usesTransaction()
}

func (t *track) usesTransaction() bool { return t.reg.mode != inbox.None || t.reg.inTransaction }

// mustStop reports whether nothing more is to be begun.
func (t *track) mustStop() bool { return t.p.s.serveCtx.Err() != nil || t.p.s.c.gate.isPaused() }

// waitYielding waits for d or until it is interrupted, and lets others run meanwhile.
func (t *track) waitYielding(d time.Duration) {
	if d <= 0 || t.mustStop() {
		return
	}
	t.yieldSlots(func() {
		timer := time.NewTimer(d)
		defer timer.Stop()
		for {
			_, _, changed := t.p.s.c.gate.currentState()
			if t.mustStop() {
				return
			}
			select {
			case <-timer.C:
				return
			case <-changed:
			case <-t.p.s.serveCtx.Done():
			}
		}
	})
}

// handleTasks handles a batch: together where that may be, else and after a failure one by one. It returns what was not
// finished because of an interruption.
func (t *track) handleTasks(list []task) (left []task) {
	if t.reg.removed.Load() && !t.reg.once && len(list) > 0 {
		t.p.s.c.s.observer.Dropped(t.reg.name, len(list))
		t.p.finishTasks(list)
		return nil
	}
	defer t.trouble.clearTrouble(t)
	for len(list) > 0 {
		if n := min(t.countDue(list), t.reg.pace.batchSize(t.reg.batch)); n > 1 && t.mayBatch() {
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
			for i, x := range list[:n] {
				if i > 0 && t.mustStop() || !t.handleAlone(x) {
					return list[i:]
				}
			}
			list = list[n:]
			continue
		}
		if !t.handleAlone(list[0]) {
			return list
		}
		if list = list[1:]; t.mustStop() {
			return list
		}
	}
	return nil
}

// outcome is what one attempt at several messages came to.
type outcome uint8

const (
	outcomeHandled outcome = iota
	outcomeInterrupted
	outcomeRetry // with as many as the pace allows now
	outcomeSplit // one by one: the policy decides about the one that failed
)

// handleTogether tries several messages in one transaction.
func (t *track) handleTogether(list []task) outcome {
	res, err := t.attemptTasks(list)
	if err == nil {
		t.trouble.clearTrouble(t)
		t.finishAttempt(list, res)
		return outcomeHandled
	}
	if t.p.s.drainCtx.Err() != nil || errors.Is(err, errOrphan) {
		return outcomeInterrupted
	}
	if slow, ok := errors.AsType[*overrunError](err); ok {
		t.reg.pace.shrinkAfter(len(list), slow)
		return outcomeRetry
	}
	if blamed, _ := t.assignBlame(err); blamed {
		return outcomeSplit
	}
	if isAbortedTransaction(err) {
		t.reg.pace.shrinkAfter(len(list), nil)
	}
	if !t.trouble.waitOut(t, err) {
		return outcomeInterrupted
	}
	return outcomeRetry
}

// handleAlone handles one message until it is finished; false if it was interrupted before.
func (t *track) handleAlone(x task) bool {
	defer t.trouble.clearTrouble(t)
	t.p.s.restoreAttempts(t, x)
	overruns := 0 // one after another
	for first := true; ; first = false {
		if !first && t.mustStop() {
			return false
		}
		if err := t.precheckTask(x); err != nil {
			if e, ok := errors.AsType[*NotDueError](err); ok {
				t.waitYielding(e.Wait(time.Now()))
			} else if done, again := t.applyPolicy(x, err); !again {
				return done
			}
			continue
		}
		list := []task{x}
		res, err := t.attemptTasks(list)
		if err == nil {
			t.finishAttempt(list, res)
			return true
		}
		if t.p.s.drainCtx.Err() != nil || errors.Is(err, errOrphan) {
			return false
		}
		if slow, ok := errors.AsType[*overrunError](err); ok {
			// A new primary ends transactions too, but hardly the same message's twice.
			if overruns++; overruns == 1 {
				continue
			}
			err = &handlerFailure{&LifetimeError{Handler: t.reg.name, Ran: t.lastRun, Reason: cmp.Or(errorText(slow.err), "its commit failed")}}
		}
		overruns = 0
		if blamed, cause := t.assignBlame(err); blamed {
			t.trouble.clearTrouble(t)
			if done, again := t.applyPolicy(x, cause); !again {
				return done
			}
			continue
		}
		if !t.trouble.waitOut(t, err) {
			return false
		}
	}
}

// countDue is how many of the first messages may be handled now.
func (t *track) countDue(list []task) int {
	for i, x := range list {
		if t.precheckTask(x) != nil {
			return i
		}
	}
	return len(list)
}

// precheckTask says why the message may not be handled now, if so.
func (t *track) precheckTask(x task) error {
	if t.reg.system {
		return nil
	}
	return Precheck(x.entry.m, time.Now())
}

// applyPolicy asks the policy about a failure and does what it says. again: the message is to be tried once more.
func (t *track) applyPolicy(x task, cause error) (done, again bool) {
	at, m := &x.share.attempts, x.entry.m
	*at = at.Note(cause, m, time.Now())
	v := t.reg.decideVerdict(cause, originalMessage(x.entry), *at)
	if v.Uncounted {
		at.Spared++
	}
	t.p.s.c.s.observer.Failed(t.reg.name, v.Action)
	told := cause
	if n := at.Total - at.Spared; v.Action == DeadLetter && n > 1 {
		told = &RetriesExhaustedError{Attempts: n, Err: cause}
	}
	if t.reg == t.p.s.c.unknown && v.Action == Discard {
		t.p.s.c.reg.reportUnknownOnce(m.Type, t.p.s.report)
		return t.disposeTask(x, v, cause), false
	}
	t.p.s.report(&HandlerError{
		Handler: t.reg.name, Topic: m.Topic, Partition: m.Partition, Offset: m.Offset, ID: m.ID, Type: m.Type,
		Attempts: *at, Verdict: v, Err: told,
	})
	switch v.Action {
	case RetryInline, RetryAfter:
		t.waitYielding(v.Delay)
		return false, true
	case PauseConsumer:
		t.p.s.keepAttempts(t, x)
		t.p.s.c.pauseFor(v.Delay)
		return false, false
	default:
		return t.disposeTask(x, v, cause), false
	}
}

// decideVerdict is the policy's, or to the dead letters if it has none for the failure.
func (r *registration) decideVerdict(cause error, m *Message, at Attempts) (v Verdict) {
	dead := Verdict{Action: DeadLetter}
	defer func() {
		if recover() != nil {
			v = dead
		}
	}()
	if v = r.decider.Decide(cause, m, at); v.Action == 0 || int(v.Action) >= len(actions) {
		v = dead
	}
	return v
}

// disposeTask lets the message go where the verdict says, and its watermark pass; false if it was interrupted before. The
// offset passes only after that.
//
// A disposal that can never succeed for this message is replaced by a weaker one, so that no message blocks its partition
// for ever. What servers that are away prevent is tried until they are back.
func (t *track) disposeTask(x task, v Verdict, cause error) bool {
	s := t.p.s
	b := retry.Reopen.Start()
	moved, lost := false, false
	for {
		err := error(nil)
		if !moved {
			err = s.callDisposer(originalMessage(x.entry), t.reg.name, v, cause)
			moved = err == nil
		}
		if isUnfit(err) {
			s.report(fmt.Errorf("%s of message %s for handler %q: %w", v.Action, clip(x.entry.m.ID, maxReason), t.reg.name, err))
			v.Reason = cmp.Or(v.Reason, Class(cause)) // of the handler's failure, not of the disposal's
			cause = errors.Join(cause, err)
			if v, moved = weakerVerdict(v); moved {
				lost = true
				s.report(&LostError{Handler: t.reg.name, Topic: x.entry.m.Topic, Partition: x.entry.m.Partition, Offset: x.entry.m.Offset, Err: err})
			}
			if !moved {
				continue
			}
			err = nil
		}
		if moved && t.reg.mode != inbox.None && !x.entry.orphan.Load() {
			if err = s.inbox.Pass(s.drainCtx, []inbox.Entry{t.inboxEntry(x)}); err != nil {
				err = fmt.Errorf("passing the watermark: %w", err)
			}
		}
		if err == nil {
			break
		}
		s.report(fmt.Errorf("%s of message %s for handler %q: %w", v.Action, clip(x.entry.m.ID, maxReason), t.reg.name, err))
		if errors.Is(err, inbox.ErrInvalid) {
			break // the inbox has no watermark for such a place
		}
		if t.mustStop() {
			return false
		}
		t.waitYielding(b.Next())
		if errors.Is(err, inbox.ErrStale) { // as for one that is handled: attached to and read again
			t.p.detachHandler(t.reg)
			return false
		}
	}
	if v.Action == Discard || lost {
		s.c.s.observer.Dropped(t.reg.name, 1)
	}
	t.p.finishTasks([]task{x})
	if v.Pause != 0 {
		s.c.pauseFor(v.Pause)
	}
	return true
}

// weakerVerdict is the verdict that follows one that cannot be carried out for the message; last reports that there is none.
func weakerVerdict(v Verdict) (next Verdict, last bool) {
	next = v
	switch {
	case v.Bare:
		return v, true
	case v.Action == DeadLetter || v.Action == Park:
		next.Bare = true
	default:
		next.Action, next.Topic = DeadLetter, ""
	}
	return next, false
}

// callDisposer calls the disposer.
func (s *session) callDisposer(m *Message, handler string, v Verdict, cause error) (err error) {
	defer recoverPanic(&err)
	return s.disposer.Dispose(s.drainCtx, m, handler, v, cause)
}

// finishAttempt counts what became of a batch and finishes it.
func (t *track) finishAttempt(list []task, res attemptResult) {
	o := t.p.s.c.s.observer
	t.reg.pace.growAfter(len(list))
	if res.handled > 0 {
		t.reg.pace.recordDuration(res.took, res.handled)
		o.Handled(t.reg.name, res.handled, res.took)
	}
	if res.duplicates > 0 {
		o.Duplicates(t.reg.name, res.duplicates)
	}
	if res.dropped > 0 {
		o.Dropped(t.reg.name, res.dropped)
	}
	t.p.finishTasks(list)
}

// originalMessage is the message as it was read, with the record's own bytes, for whoever moves it.
func originalMessage(e *entry) *Message {
	m := e.m.Copy()
	m.Key, m.Value = e.rec.Key, e.rec.Value
	return m
}

func (t *track) inboxEntry(x task) inbox.Entry {
	m := x.entry.m
	return inbox.Entry{
		Key:   inbox.Key{Consumer: t.p.s.c.inboxConsumer(t.reg), Namespace: m.Namespace, ID: dedupID(m)},
		Place: inbox.Place{Topic: m.Topic, Partition: m.Partition, Lane: t.lane, Offset: m.Offset, LeaderEpoch: m.LeaderEpoch},
	}
}

// baseContext is what the handler's context starts from.
func (t *track) baseContext() context.Context { return t.p.s.drainCtx }
