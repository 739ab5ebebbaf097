package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/pkg/inbox"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// track is one handler's messages of one lane: one after another, in order, whatever the other tracks do.
type track struct {
	p       *partition
	reg     *registration
	lane    int32
	queue   []task // the partition's lock guards it
	running bool   // and this
	holds   bool   // one of the run's slots
}

// task is one message for one handler.
type task struct {
	entry *entry
	part  *part
}

// pace is how long a message takes, so that a transaction does not hold more of them than it has time for.
type pace struct{ ns atomic.Int64 }

// span is how long the messages of one transaction may take together by that measure.
const span = 5 * time.Second

func (c *pace) took(d time.Duration, n int) {
	each := int64(d) / int64(max(n, 1))
	if old := c.ns.Load(); old > 0 {
		each = old + (each-old)/8
	}
	c.ns.Store(max(each, 1))
}

func (c *pace) batch(limit int) int {
	each := c.ns.Load()
	if each <= 0 {
		return limit
	}
	return max(1, min(limit, int(int64(span)/each)))
}

// run handles what is queued until there is nothing more.
func (t *track) run() {
	for {
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
		case len(list) == 0:
			return
		}
	}
}

// acquire waits for its turn among all lanes; false if the generation ends first.
func (t *track) acquire() bool { return t.acquireUntil(t.p.s.soft) }

func (t *track) acquireUntil(ctx context.Context) bool {
	select {
	case t.p.s.slots <- struct{}{}:
		t.holds = true
		t.p.s.running(1)
	case <-ctx.Done():
	}
	return t.holds
}

func (t *track) release() {
	if t.holds {
		t.holds = false
		t.p.s.running(-1)
		<-t.p.s.slots
	}
}

// yield gives the turn to others while f runs.
func (t *track) yield(f func()) {
	t.release()
	f()
	t.acquireUntil(t.p.s.hard)
}

// revert ends the track: what it began and did not finish, and with it all that is queued behind, is fetched again. Nothing
// behind may go first: it would move the watermark past what is not handled.
func (t *track) revert(left []task) {
	p := t.p
	p.mu.Lock()
	defer p.mu.Unlock()
	left = append(left[:len(left):len(left)], t.queue...)
	t.queue, t.running = nil, false
	for _, x := range left {
		x.part.state = waiting
		p.shed(x.entry)
	}
	if len(left) > 0 {
		p.rewind = true
		p.signal()
	}
}

// take begins as many tasks as may share a transaction; with none the track has ended.
func (t *track) take() []task {
	p := t.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(t.queue) == 0 || p.closed || p.s.soft.Err() != nil {
		t.queue, t.running = nil, false
		return nil
	}
	n := 1
	if t.joint() {
		n = min(len(t.queue), t.reg.pace.batch(t.reg.batch))
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
	if n := t.due(list); n > 1 {
		handled, interrupted := t.together(list[:n])
		switch {
		case interrupted:
			return list
		case handled:
			list = list[n:]
		}
	}
	for i := range list {
		if i > 0 && t.interrupted() || !t.alone(list[i]) {
			return list[i:]
		}
	}
	return nil
}

// together handles them in one go, unless it is interrupted; neither means that they have to be tried one by one.
func (t *track) together(list []task) (handled, interrupted bool) {
	var trouble trouble
	defer trouble.over(t)
	for {
		res, err := t.attempt(list)
		if err == nil {
			t.account(list, res)
			return true, false
		}
		if t.p.s.hard.Err() != nil || errors.Is(err, errOrphan) {
			return false, true
		}
		if blamed, _ := t.blame(err); blamed {
			return false, false
		}
		if !trouble.wait(t, err) {
			return false, true
		}
	}
}

// alone handles one message until it is finished; false if it was interrupted before.
func (t *track) alone(x task) bool {
	var trouble trouble
	defer trouble.over(t)
	t.p.s.recall(t, x)
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
		res, err := t.attempt(list)
		if err == nil {
			t.account(list, res)
			return true
		}
		if t.p.s.hard.Err() != nil || errors.Is(err, errOrphan) {
			return false
		}
		if blamed, cause := t.blame(err); blamed {
			trouble.over(t)
			if done, again := t.decide(x, cause); !again {
				return done
			}
			continue
		}
		if !trouble.wait(t, err) {
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
		if unfit(err) {
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
			t.p.detach(t.reg)
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
	defer recovered(&err)
	return s.disposer.Dispose(s.hard, m, handler, v, cause)
}

// account counts what became of a batch and finishes it.
func (t *track) account(list []task, res result) {
	o := t.p.s.c.s.observer
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

// trouble is one lane's wait for what is not the message's fault: the database, or somebody else's claim.
type trouble struct {
	b    *retry.Backoff
	away bool
}

// claimPoll is how often a claim of somebody else's is asked for: it may be given up before its time.
const claimPoll = 500 * time.Millisecond

// wait waits; false if it was interrupted.
func (o *trouble) wait(t *track, err error) bool {
	if o.b == nil {
		o.b = retry.Reopen.Start()
	}
	d := o.b.Next()
	var recreated *inbox.RecreatedError
	switch {
	case errors.As(err, &recreated), errors.Is(err, outbox.ErrStandalone):
		t.p.s.fail(err)
		return false
	case errors.Is(err, inbox.ErrUnconfirmed): // asked again
	case errors.Is(err, inbox.ErrClaimed):
		d = claimPoll
	case errors.Is(err, inbox.ErrStale):
		// It is read again first: what is in memory may be of the topic that was there before.
		t.p.detach(t.reg)
		t.p.s.report(err)
		t.wait(d)
		return false
	default:
		if !o.away {
			o.away = true
			t.p.s.away.enter()
		}
		t.p.s.report(err)
	}
	t.wait(d)
	return !t.interrupted()
}

func (o *trouble) over(t *track) {
	if o.away {
		o.away = false
		t.p.s.away.leave()
	}
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
		Key:   inbox.Key{Consumer: t.p.s.c.consumer(t.reg), Namespace: m.Namespace, ID: dedupID(m)},
		Place: inbox.Place{Topic: m.Topic, Partition: m.Partition, Lane: t.lane, Offset: m.Offset, LeaderEpoch: m.LeaderEpoch},
	}
}

// contextOf is what the handler's context starts from.
func (t *track) contextOf() context.Context { return t.p.s.hard }
