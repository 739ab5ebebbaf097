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

	holds   bool          // one of the session's slots
	limited chan struct{} // the handler's slots, of which it holds one too; nil without a Limit
	trouble trouble
	ran     time.Duration // how long the handler took in the last attempt
}

// task is one message for one handler.
type task struct {
	entry *entry
	part  *part
}

// run handles what is queued until there is nothing more.
func (t *track) run() {
	for t.next() {
		if t.p.s.c.gate.paused() || !t.acquire() {
			t.revert(nil)
			return
		}
		list := t.take()
		left := t.process(list)
		t.release()
		switch {
		case len(left) > 0:
			t.revert(left)
			return
		}
	}
}

// next makes the registration of the first message the track's, or ends the track if nothing is left to begin.
func (t *track) next() bool {
	p := t.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(t.queue) == 0 || p.closed || p.s.soft.Err() != nil {
		t.retire()
		return false
	}
	t.reg = t.queue[0].part.reg
	return true
}

// retire forgets the track: the next message of its lane and handler makes a new one. The partition's lock is held.
func (t *track) retire() {
	t.queue, t.running = nil, false
	delete(t.p.tracks, t.key)
}

// acquire waits for a call of the handler within its Limit, and then for one of the slots of all lanes: a lane that waits for
// its own handler keeps no other handler from running. It returns false if the generation ends first.
func (t *track) acquire() bool {
	s := t.p.s
	if t.reg.slots != nil {
		select {
		case t.reg.slots <- struct{}{}:
		case <-s.soft.Done():
			return false
		}
	}

	select {
	case s.slots <- struct{}{}:
		t.limited, t.holds = t.reg.slots, true
		s.countRunning(1)
	case <-s.soft.Done():
		if t.reg.slots != nil {
			<-t.reg.slots
		}
	}
	return t.holds
}

func (t *track) release() {
	if !t.holds {
		return
	}
	t.holds = false
	t.p.s.countRunning(-1)
	<-t.p.s.slots
	if t.limited != nil {
		<-t.limited
	}
}

// yield gives the turn to others while f runs. Afterwards the track has its turn again unless the generation ends, when it
// begins nothing more.
func (t *track) yield(f func()) {
	t.release()
	f()
	t.acquire()
}

// revert ends the track: what it began and did not finish, and with it all that is queued behind, is fetched again. Nothing
// behind may go first: it would move the watermark past what is not handled.
func (t *track) revert(left []task) {
	p := t.p
	p.mu.Lock()
	defer p.mu.Unlock()
	left = append(left[:len(left):len(left)], t.queue...)
	t.retire()
	for _, x := range left {
		x.part.state = waiting
		p.shed(x.entry)
	}
	if len(left) > 0 {
		p.rewind = true
		p.signal()
	}
}

// take begins as many tasks as may share a transaction. There may be none any more: what waited was dropped meanwhile.
func (t *track) take() []task {
	p := t.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.s.soft.Err() != nil {
		return nil
	}
	most := 1
	if t.joint() {
		most = t.reg.pace.batch(t.reg.batch)
	}
	n := 0
	for n < min(most, len(t.queue)) && t.queue[n].part.reg == t.reg {
		n++
	}
	list := t.queue[:n:n]
	t.queue = t.queue[n:]
	for _, x := range list {
		x.part.state = started
	}
	return list
}

// joint reports whether several messages may be handled in one go.
func (t *track) joint() bool {
	if t.reg.system || t.reg.mode == inbox.Eager {
		return false
	}
	return t.reg.batched != nil || t.transactional()
}

func (t *track) transactional() bool { return t.reg.mode != inbox.None || t.reg.inTx }

// interrupted reports whether nothing more is to be begun.
func (t *track) interrupted() bool { return t.p.s.soft.Err() != nil || t.p.s.c.gate.paused() }

// wait waits for d or until it is interrupted, and lets others run meanwhile.
func (t *track) wait(d time.Duration) {
	if d <= 0 || t.interrupted() {
		return
	}
	t.yield(func() {
		timer := time.NewTimer(d)
		defer timer.Stop()
		for {
			_, _, changed := t.p.s.c.gate.state()
			if t.interrupted() {
				return
			}
			select {
			case <-timer.C:
				return
			case <-changed:
			case <-t.p.s.soft.Done():
			}
		}
	})
}

// process handles a batch: together where that may be, else and after a failure one by one. It returns what was not
// finished because of an interruption.
func (t *track) process(list []task) (left []task) {
	if t.reg.removed.Load() && !t.reg.once && len(list) > 0 {
		t.p.s.c.s.observer.Dropped(t.reg.name, len(list))
		t.p.finish(list)
		return nil
	}
	defer t.trouble.over(t)
	for len(list) > 0 {
		if n := min(t.due(list), t.reg.pace.batch(t.reg.batch)); n > 1 && t.joint() {
			switch t.together(list[:n]) {
			case isHandled:
				list = list[n:]
				continue
			case tryAgain:
				continue
			case isInterrupted:
				return list
			case tryAlone:
			}
			for i, x := range list[:n] {
				if i > 0 && t.interrupted() || !t.alone(x) {
					return list[i:]
				}
			}
			list = list[n:]
			continue
		}
		if !t.alone(list[0]) {
			return list
		}
		if list = list[1:]; t.interrupted() {
			return list
		}
	}
	return nil
}

// outcome is what one attempt at several messages came to.
type outcome uint8

const (
	isHandled outcome = iota
	isInterrupted
	tryAgain // with as many as the pace allows now
	tryAlone // one by one: the policy decides about the one that failed
)

// together tries several messages in one transaction.
func (t *track) together(list []task) outcome {
	res, err := t.attemptTasks(list)
	if err == nil {
		t.trouble.over(t)
		t.account(list, res)
		return isHandled
	}
	if t.p.s.hard.Err() != nil || errors.Is(err, errOrphan) {
		return isInterrupted
	}
	if slow, ok := errors.AsType[*overrunError](err); ok {
		t.reg.pace.overran(len(list), slow)
		return tryAgain
	}
	if blamed, _ := t.assignBlame(err); blamed {
		return tryAlone
	}
	if expired(err) {
		t.reg.pace.overran(len(list), nil)
	}
	if !t.trouble.wait(t, err) {
		return isInterrupted
	}
	return tryAgain
}

// alone handles one message until it is finished; false if it was interrupted before.
func (t *track) alone(x task) bool {
	defer t.trouble.over(t)
	t.p.s.recall(t, x)
	overruns := 0 // one after another
	for first := true; ; first = false {
		if !first && t.interrupted() {
			return false
		}
		if err := t.precheck(x); err != nil {
			if e, ok := errors.AsType[*NotDueError](err); ok {
				t.wait(e.Wait(time.Now()))
			} else if done, again := t.decide(x, err); !again {
				return done
			}
			continue
		}
		list := []task{x}
		res, err := t.attemptTasks(list)
		if err == nil {
			t.account(list, res)
			return true
		}
		if t.p.s.hard.Err() != nil || errors.Is(err, errOrphan) {
			return false
		}
		if slow, ok := errors.AsType[*overrunError](err); ok {
			// A new primary ends transactions too, but hardly the same message's twice.
			if overruns++; overruns == 1 {
				continue
			}
			err = &handlerFailure{&LifetimeError{Handler: t.reg.name, Ran: t.ran, Reason: cmp.Or(errorText(slow.err), "its commit failed")}}
		}
		overruns = 0
		if blamed, cause := t.assignBlame(err); blamed {
			t.trouble.over(t)
			if done, again := t.decide(x, cause); !again {
				return done
			}
			continue
		}
		if !t.trouble.wait(t, err) {
			return false
		}
	}
}

// due is how many of the first messages may be handled now.
func (t *track) due(list []task) int {
	for i, x := range list {
		if t.precheck(x) != nil {
			return i
		}
	}
	return len(list)
}

// precheck says why the message may not be handled now, if so.
func (t *track) precheck(x task) error {
	if t.reg.system {
		return nil
	}
	return Precheck(x.entry.m, time.Now())
}

// decide asks the policy about a failure and does what it says. again: the message is to be tried once more.
func (t *track) decide(x task, cause error) (done, again bool) {
	at, m := &x.part.at, x.entry.m
	*at = at.Note(cause, m, time.Now())
	v := t.reg.verdict(cause, original(x.entry), *at)
	if v.Uncounted {
		at.Spared++
	}
	t.p.s.c.s.observer.Failed(t.reg.name, v.Action)
	told := cause
	if n := at.Total - at.Spared; v.Action == DeadLetter && n > 1 {
		told = &RetriesExhaustedError{Attempts: n, Err: cause}
	}
	if t.reg == t.p.s.c.unknown && v.Action == Discard {
		t.p.s.c.reg.let(m.Type, t.p.s.report)
		return t.dispose(x, v, cause), false
	}
	t.p.s.report(&HandlerError{
		Handler: t.reg.name, Topic: m.Topic, Partition: m.Partition, Offset: m.Offset, ID: m.ID, Type: m.Type,
		Attempts: *at, Verdict: v, Err: told,
	})
	switch v.Action {
	case RetryInline, RetryAfter:
		t.wait(v.Delay)
		return false, true
	case PauseConsumer:
		t.p.s.remember(t, x)
		t.p.s.c.pauseFor(v.Delay)
		return false, false
	default:
		return t.dispose(x, v, cause), false
	}
}

// verdict is the policy's, or to the dead letters if it has none for the failure.
func (r *registration) verdict(cause error, m *Message, at Attempts) (v Verdict) {
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

// dispose lets the message go where the verdict says, and its watermark pass; false if it was interrupted before. The
// offset passes only after that.
//
// A disposal that can never succeed for this message is replaced by a weaker one, so that no message blocks its partition
// for ever. What servers that are away prevent is tried until they are back.
func (t *track) dispose(x task, v Verdict, cause error) bool {
	s := t.p.s
	b := retry.Reopen.Start()
	moved, lost := false, false
	for {
		err := error(nil)
		if !moved {
			err = s.move(original(x.entry), t.reg.name, v, cause)
			moved = err == nil
		}
		if isUnfit(err) {
			s.report(fmt.Errorf("%s of message %s for handler %q: %w", v.Action, clip(x.entry.m.ID, maxReason), t.reg.name, err))
			v.Reason = cmp.Or(v.Reason, Class(cause)) // of the handler's failure, not of the disposal's
			cause = errors.Join(cause, err)
			if v, moved = weaker(v); moved {
				lost = true
				s.report(&LostError{Handler: t.reg.name, Topic: x.entry.m.Topic, Partition: x.entry.m.Partition, Offset: x.entry.m.Offset, Err: err})
			}
			if !moved {
				continue
			}
			err = nil
		}
		if moved && t.reg.mode != inbox.None && !x.entry.orphan.Load() {
			if err = s.inbox.Pass(s.hard, []inbox.Entry{t.inboxEntry(x)}); err != nil {
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
		if t.interrupted() {
			return false
		}
		t.wait(b.Next())
		if errors.Is(err, inbox.ErrStale) { // as for one that is handled: attached to and read again
			t.p.detachHandler(t.reg)
			return false
		}
	}
	if v.Action == Discard || lost {
		s.c.s.observer.Dropped(t.reg.name, 1)
	}
	t.p.finish([]task{x})
	if v.Pause != 0 {
		s.c.pauseFor(v.Pause)
	}
	return true
}

// weaker is the verdict that follows one that cannot be carried out for the message; last reports that there is none.
func weaker(v Verdict) (next Verdict, last bool) {
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

// move calls the disposer.
func (s *session) move(m *Message, handler string, v Verdict, cause error) (err error) {
	defer recoverPanic(&err)
	return s.disposer.Dispose(s.hard, m, handler, v, cause)
}

// account counts what became of a batch and finishes it.
func (t *track) account(list []task, res attemptResult) {
	o := t.p.s.c.s.observer
	t.reg.pace.held(len(list))
	if res.handled > 0 {
		t.reg.pace.took(res.took, res.handled)
		o.Handled(t.reg.name, res.handled, res.took)
	}
	if res.duplicates > 0 {
		o.Duplicates(t.reg.name, res.duplicates)
	}
	if res.dropped > 0 {
		o.Dropped(t.reg.name, res.dropped)
	}
	t.p.finish(list)
}

// original is the message as it was read, with the record's own bytes, for whoever moves it.
func original(e *entry) *Message {
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

// contextOf is what the handler's context starts from.
func (t *track) contextOf() context.Context { return t.p.s.hard }
