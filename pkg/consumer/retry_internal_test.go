package consumer

import (
	"errors"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/internal/service/transport"
)

var errTest = errors.New("the service is away")

// decideAfter returns the verdict after n failures, the first of which was so long ago.
func decideAfter(d *decider, err error, n int, ago time.Duration) verdict {
	m, a := &Message{Attempt: 1, Topic: "orders", Group: "g"}, failures{}
	for range n {
		a = a.note(err, m, time.Now().Add(-ago))
	}
	return d.decide(err, m, a)
}

func TestDefaultsOfRetry(t *testing.T) {
	t.Parallel()
	d := &decider{retry: Retry{}.withDefaults()}
	for n, want := range []time.Duration{
		100 * time.Millisecond, 400 * time.Millisecond,
		5 * time.Second, 10 * time.Second, 20 * time.Second, 40 * time.Second, 80 * time.Second, 160 * time.Second,
		5 * time.Minute, 5 * time.Minute,
	} {
		v := decideAfter(d, errTest, n+1, time.Hour)
		action, least := actAside, want*4/5
		if n < 2 {
			action, least = actRetry, want
		}
		if v.Action != action || v.Delay < least || v.Delay > want {
			t.Errorf("failure %d: got %s after %v, want %s after %v to %v", n+1, v.Action, v.Delay, action, least, want)
		}
	}

	if v := decideAfter(d, errTest, 100, 23*time.Hour); v.Action != actAside {
		t.Errorf("after 23 hours: got %s, want %s", v.Action, actAside)
	}
	if v := decideAfter(d, errTest, 100, 24*time.Hour); v.Action != actDeadLetter {
		t.Errorf("after 24 hours: got %s, want %s", v.Action, actDeadLetter)
	}
	away := mongo.CommandError{Code: 91}
	for n, want := range map[int]action{1: actWait, 5: actWait, 6: actAside, 100: actAside} {
		if v := decideAfter(d, away, n, 0); v.Action != want || !v.Uncounted {
			t.Errorf("while the database is away, after %d failures: got %+v, want %s", n, v, want)
		}
	}
	if v := decideAfter(d, away, 2, 48*time.Hour); v.Action != actAside || !v.Uncounted {
		t.Errorf("while the database is away for long: got %+v", v)
	}
	for _, c := range []struct {
		err  error
		want action
	}{
		{&expiredError{}, actDeadLetter},
		{wrapDecodeError(&transport.Record{}, malformed("%w", errTest)), actDeadLetter},
		{&inbox.DuplicateError{}, actDiscard},
		{&timeoutError{Err: mongo.CommandError{Code: 189}}, actRetry},
		{Reject(errTest), actDeadLetter},
		{Discard(errTest), actDiscard},
	} {
		if v := decideAfter(d, c.err, 1, 0); v.Action != c.want {
			t.Errorf("%T: got %s, want %s", c.err, v.Action, c.want)
		}
	}
	if v := decideAfter(d, &notDueError{Due: time.Now().Add(time.Hour)}, 1, 0); v.Action != actWait || !v.Uncounted || v.Delay < 59*time.Minute {
		t.Errorf("a message that is not due: got %+v", v)
	}
}

func TestRetryTopicsFollowTheQuickAttempts(t *testing.T) {
	t.Parallel()
	d := &decider{retry: Retry{Quick: []time.Duration{time.Second}}.withDefaults(), topics: []time.Duration{time.Minute, time.Hour}}
	m := &Message{Topic: "orders", Group: "g", Attempt: 1}
	var a failures

	for i, want := range []verdict{
		{Action: actRetry, Delay: time.Second},
		{Action: actRetryTopic, Delay: time.Minute, Topic: "orders.g.retry.1"},
		{Action: actRetryTopic, Delay: time.Hour, Topic: "orders.g.retry.2"},
		{Action: actDeadLetter},
	} {
		a = a.note(errTest, m, time.Now())
		v := d.decide(errTest, m, a)
		if v.Action != want.Action || v.Delay != want.Delay || v.Topic != want.Topic {
			t.Errorf("failure %d: got %s after %v to %q, want %s after %v to %q", i+1, v.Action, v.Delay, v.Topic, want.Action, want.Delay, want.Topic)
		}

		// The next failure belongs to the next delivery.
		if v.Action == actRetryTopic {
			m, a = &Message{Topic: "orders", Group: "g", Attempt: a.Total + 1}, failures{}
		}
	}
}

// In any order of failures, uncounted ones spend no attempt.
func TestFailuresThatAreNotCountedSpendNothing(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		most := rapid.IntRange(1, 6).Draw(t, "attempts")
		d := &decider{retry: Retry{MaxAttempts: most}.withDefaults()}
		m := &Message{Attempt: rapid.IntRange(1, 3).Draw(t, "attempt")}
		var a failures
		counted := m.Attempt - 1

		for {
			err := errTest
			if rapid.Bool().Draw(t, "transient") {
				err = mongo.CommandError{Code: 91}
			}

			a = a.note(err, m, time.Now())
			v := d.decide(err, m, a)
			if v.Uncounted {
				a.Spared++
				continue
			}

			counted++
			if dead := v.Action == actDeadLetter; dead != (counted >= most) {
				t.Fatalf("counted failure %d of at most %d: got %s", counted, most, v.Action)
			} else if dead {
				if len(a.History) > maxHistory {
					t.Fatalf("kept failures: got %d, want at most %d", len(a.History), maxHistory)
				}
				return
			}
		}
	})
}

func TestARuleThatPanicsMakesADeadLetter(t *testing.T) {
	t.Parallel()
	d := &decider{rules: []retryRule{{func(error) bool { panic("in a rule") }, Retry{}}}}
	if v := decideAfter(d, errTest, 1, 0); v.Action != actDeadLetter || v.Attempts.Failed != 1 {
		t.Errorf("got %+v, want a dead letter", v)
	}
}

func TestRetryForAnErrorComesBeforeTheDefault(t *testing.T) {
	t.Parallel()
	never := Retry{GiveUpAfter: -1, Then: ThenDiscard}.withDefaults()
	d := &decider{retry: Retry{}.withDefaults(), rules: []retryRule{
		{ErrorIs(ErrMalformed), never},
		{ErrorIs(errTest), NoRetry().withDefaults()},
	}}

	if v := decideAfter(d, errTest, 1, 0); v.Action != actDeadLetter {
		t.Errorf("NoRetry: got %s, want %s", v.Action, actDeadLetter)
	}
	if v := decideAfter(d, ErrMalformed, 100, 1000*time.Hour); v.Action != actAside {
		t.Errorf("without an end: got %s, want %s", v.Action, actAside)
	}
	if v := decideAfter(d, errors.New("another"), 1, 0); v.Action != actRetry {
		t.Errorf("another error: got %s, want %s", v.Action, actRetry)
	}

	if v := decideAfter(d, RetryIn(time.Hour, errors.New("another")), 100, 25*time.Hour); v.Action != actDeadLetter {
		t.Errorf("RetryIn after a day: got %s, want %s", v.Action, actDeadLetter)
	}
	if v := decideAfter(d, RetryIn(time.Hour, nil), 100, time.Hour); v.Action != actAside || v.Delay != time.Hour || !v.Uncounted {
		t.Errorf("RetryIn: got %+v", v)
	}
}

func TestMistakesInRetryAreListed(t *testing.T) {
	t.Parallel()
	for _, delay := range []time.Duration{0, -1, 30 * 24 * time.Hour} {
		var h handling
		WithRetryTopics(time.Second, delay).applyToHandler(&h)
		if err := h.validate(); err == nil || !strings.Contains(err.Error(), "WithRetryTopics") {
			t.Errorf("a retry topic with a delay of %v: got %v", delay, err)
		}
	}

	err := Retry{Min: time.Hour, Max: time.Minute, Then: 9}.findProblems("WithRetry")
	for _, want := range []string{"Min is 1h0m0s and Max is 1m0s", "Then is 9"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("findProblems: got %v, want it to contain %q", err, want)
		}
	}

	for _, r := range []Retry{{}, {Max: time.Second}, {Min: time.Hour}, NoRetry()} {
		if err := r.findProblems("WithRetry"); err != nil {
			t.Errorf("%+v: %v", r, err)
		}
	}
}

func TestASuspensionEndsWithASuccess(t *testing.T) {
	t.Parallel()
	r := Retry{Outage: 3, Min: time.Hour, Max: 2 * time.Hour}.withDefaults()
	var s suspension
	queue := func(name string) setaside.Digest { return setaside.KeyQueue([]byte(name)) }
	fail := func(name string) bool {
		_, began := s.noteFailure(queue(name), false, &r)
		return began
	}

	// Failures of one key, and failures with a success in between, are no outage.
	for _, name := range []string{"a", "a", "a", "b", "success", "c", "a"} {
		if name == "success" && s.noteSuccess() || name != "success" && fail(name) {
			t.Fatal("suspended without an outage")
		}
	}
	// Nor are retries of messages that were set aside before.
	for _, name := range []string{"d", "e", "f"} {
		if _, began := s.noteFailure(queue(name), true, &r); began {
			t.Fatal("retries suspended the handler")
		}
	}
	if !fail("b") {
		t.Fatal("three keys failed in a row, and the handler is not suspended")
	}
	now := time.Now()
	if p := s.mayStart(now); p.ok || p.wait < 40*time.Minute {
		t.Errorf("a suspended handler: got %+v", p)
	}

	// One probe at a time. A probe that fails doubles the wait.
	later := now.Add(time.Hour + time.Second)
	probe := s.mayStart(later)
	if !probe.ok || probe.probe == 0 || s.mayStart(later).ok {
		t.Fatalf("a probe: got %+v, and a second one at the same time", probe)
	}
	fail("d")
	if s.isProbe(probe.probe) {
		t.Error("a probe that failed still runs")
	}
	if p := s.mayStart(now); p.ok || p.wait < 90*time.Minute {
		t.Errorf("after a failed probe: got %+v", p)
	}

	// A probe without an outcome lets the next one begin.
	later = now.Add(3 * time.Hour)
	probe = s.mayStart(later)
	s.endProbe(probe.probe)
	if probe = s.mayStart(later); !probe.ok || !s.noteSuccess() || !s.mayStart(now).ok {
		t.Error("a successful probe did not end the suspension")
	}

	// Other successes do not shorten a suspension that the handler requested.
	s.suspendFor(time.Hour)
	if s.noteSuccess() || s.mayStart(time.Now()).ok {
		t.Error("a success ended a suspension that the handler requested")
	}
	s.suspendFor(untilResumed)
	if s.mayStart(now.Add(1000 * time.Hour)).ok {
		t.Error("a suspension until Resume ended without it")
	}
	if s.resume(); !s.mayStart(now).ok {
		t.Error("Resume did not end the suspension")
	}
}

// A handler that starts after many keys have failed tries one message at a time, and the first new message that fails suspends
// it. Retries of bad messages neither prolong that nor take the place of new messages.
func TestAHandlerInDoubtLetsNewMessagesDecide(t *testing.T) {
	t.Parallel()
	r := Retry{Outage: 3, Min: time.Hour, Max: 2 * time.Hour}.withDefaults()
	queue := setaside.KeyQueue([]byte("a"))
	var s suspension
	s.beginInDoubt()
	now := time.Now()
	if s.isSuspended() || s.mayRetry(now).ok {
		t.Error("a retry was the first probe, or the handler shows as suspended before a new message failed")
	}

	retryAt := s.retryAt
	if s.beginInDoubt(); s.retryAt != retryAt {
		t.Error("a rebalance has postponed the next retry")
	}

	// A retry gets its turn if no message arrives. Its failure changes nothing.
	later := now.Add(headStart + time.Second)
	if p := s.mayRetry(later); p.probe == 0 || s.mayStart(later).ok {
		t.Fatalf("a retry without a new message: got %+v, and a second attempt at the same time", p)
	}
	if _, began := s.noteFailure(queue, true, &r); began || s.isSuspended() {
		t.Error("a retry suspended the handler")
	}

	if p := s.mayStart(now); p.probe == 0 {
		t.Fatalf("a new message: got %+v", p)
	}
	if _, began := s.noteFailure(queue, false, &r); !began || !s.isSuspended() {
		t.Error("a new message failed, and the handler is not suspended")
	}
	if p := s.mayStart(now); p.ok || p.wait < 40*time.Minute || s.prefersRetries() {
		t.Errorf("after the failure of a new message: got %+v, want a wait for the next new one", p)
	}

	later = now.Add(time.Hour + time.Second)
	if p := s.mayStart(later); p.probe == 0 || !s.noteSuccess() || s.probesOnly() {
		t.Errorf("the success of a new message did not end doubt and suspension: %+v", p)
	}
}
