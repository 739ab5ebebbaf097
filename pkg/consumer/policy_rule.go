package consumer

import (
	"fmt"
	"slices"
	"time"
)

// Outcome is the treatment of a message after the last step of a rule.
type Outcome uint8

const (
	// ToDeadLetter makes the message a dead letter. It is the default.
	ToDeadLetter Outcome = iota
	// ToDiscard skips the message.
	ToDiscard
	// ToPark makes the message a dead letter that waits for a handler.
	ToPark
	// ToRequeue moves the message to the end of its topic after each failure.
	ToRequeue
	// ToPause pauses the consumer until Resume. Then the message is attempted again.
	ToPause
)

// UntilResumed is the delay of a PauseConsumer that ends only with Resume.
const UntilResumed time.Duration = -1

// Rung is one step of a ladder of retry topics.
type Rung struct {
	// Topic is the topic in which messages wait. Defaults to RetryTopicName of the message's
	// original topic, the group and the number of the rung.
	Topic string
	// Delay is the minimum time that messages wait.
	Delay time.Duration
}

// RetryTopicName returns the name of the n-th retry topic, from 1, of a topic for a group:
// "<topic>.<group>.retry.<n>". Topics with such names are consumed as long as they exist, even if
// no policy uses them any more. Delete an unused one when it is empty. A Rung with a Topic must
// stay in the policy until its topic is empty.
func RetryTopicName(topic, group string, n int) string {
	return fmt.Sprintf("%s.%s.retry.%d", topic, group, n)
}

// Rule decides about the failures of messages whose error it matches. Each failure takes the next
// of its steps. After the last step its Outcome follows. A Rule is a value: each method returns a
// changed copy.
type Rule struct {
	matchers                []Matcher
	steps                   []step
	outcome                 Outcome
	deadTopic               string
	reason                  string
	jitter                  float64
	backoffBase, backoffCap time.Duration // of RetryForever; 0 without
	uncounted               bool
	rungCount               int
	problems                []string
}

// step is the treatment after one failure.
type step struct {
	action Action
	delay  time.Duration
	pause  time.Duration
	topic  string
	rung   int // of RetryTopic, from 1
}

// On returns a rule for errors that one of ms matches. Without matchers the rule matches every error.
func On(ms ...Matcher) Rule { return Rule{matchers: ms} }

// Retry attempts the message again up to n times, each time after the next of waits. The last wait
// repeats. Without waits, it attempts the message again at once. The lane of the message waits. A waiting lane holds no
// transaction and does not count as running.
func (r Rule) Retry(n int, waits ...time.Duration) Rule {
	if n < 1 {
		return r.addProblem("Retry(%d): at least 1", n)
	}
	for i := range n {
		var d time.Duration
		if len(waits) > 0 {
			d = waits[min(i, len(waits)-1)]
		}
		r = r.addStep(step{action: RetryInline, delay: d})
	}
	return r
}

// RetryForever attempts the message again until it succeeds or another rule matches. The waits
// double from base to cap, with full jitter. Such failures spend no attempts.
func (r Rule) RetryForever(base, cap time.Duration) Rule {
	if base <= 0 || cap < base {
		return r.addProblem("RetryForever(%s, %s): the base must be positive and the cap at least the base", base, cap)
	}
	r.backoffBase, r.backoffCap, r.uncounted = base, cap, true
	return r
}

// RetryTopic moves the message to a retry topic for each of delays. It is handled again when the
// delay has passed. No lane of its topic waits for it. Later messages of its key are handled before
// it. A Retry keeps the order of the key.
func (r Rule) RetryTopic(delays ...time.Duration) Rule {
	return r.addSteps("RetryTopic", delays, func(d time.Duration) step { return step{action: RetryTopic, delay: d} })
}

// RetryTopics is like RetryTopic, with named topics.
func (r Rule) RetryTopics(rungs ...Rung) Rule {
	for _, g := range rungs {
		if g.Delay <= 0 {
			r = r.addProblem("RetryTopics: the delay of %q is %s; it must be positive", g.Topic, g.Delay)
		}
		r = r.addStep(step{action: RetryTopic, delay: g.Delay, topic: g.Topic})
	}
	return r
}

// Requeue moves the message to the end of its topic, up to n times. Later messages of its key are
// handled before it.
func (r Rule) Requeue(n int) Rule {
	if n < 1 {
		return r.addProblem("Requeue(%d): at least 1", n)
	}
	for range n {
		r = r.addStep(step{action: Requeue})
	}
	return r
}

// Schedule appends the message to the outbox as a scheduled event, for each of delays. The relay
// sends it to its topic when it is due. It needs a DisposerConfig with an Outbox, and the topic
// must be allowed. The order is that of Requeue.
func (r Rule) Schedule(delays ...time.Duration) Rule {
	return r.addSteps("Schedule", delays, func(d time.Duration) step { return step{action: Schedule, delay: d} })
}

// Pause pauses the whole consumer for each of delays and then attempts the message again.
// UntilResumed pauses until Resume.
func (r Rule) Pause(delays ...time.Duration) Rule {
	for _, d := range delays {
		if d <= 0 && d != UntilResumed {
			r = r.addProblem("Pause: %s must be positive, or UntilResumed", d)
		}
		r = r.addStep(step{action: PauseConsumer, delay: d})
	}
	return r
}

// PauseThenRequeue moves the message to the end of its topic and pauses the whole consumer, for
// each of delays.
func (r Rule) PauseThenRequeue(delays ...time.Duration) Rule {
	return r.addSteps("PauseThenRequeue", delays, func(d time.Duration) step { return step{action: Requeue, pause: d} })
}

// Jitter shortens each wait of Retry by a random share of up to f, between 0 and 1.
// Defaults to 0.
func (r Rule) Jitter(f float64) Rule {
	if f < 0 || f > 1 {
		return r.addProblem("Jitter(%g): between 0 and 1", f)
	}
	r.jitter = f
	return r
}

// Uncounted makes the rule's failures spend no attempts: each of them takes the first step.
func (r Rule) Uncounted() Rule {
	r.uncounted = true
	return r
}

// As sets the class of the dead letter. Defaults to Class of the error.
func (r Rule) As(class string) Rule {
	r.reason = class
	return r
}

// DeadTopic sets the topic of the dead letter. It replaces the topic of the Disposer.
func (r Rule) DeadTopic(topic string) Rule {
	r.deadTopic = topic
	return r
}

// Then sets the Outcome after the last step. Defaults to ToDeadLetter.
func (r Rule) Then(o Outcome) Rule {
	if o > ToPause {
		return r.addProblem("Then(%d): no such outcome", o)
	}
	r.outcome = o
	return r
}

// Discard is Then(ToDiscard).
func (r Rule) Discard() Rule { return r.Then(ToDiscard) }

// DeadLetter is Then(ToDeadLetter).
func (r Rule) DeadLetter() Rule { return r.Then(ToDeadLetter) }

// addSteps adds a step for each of delays, which must be positive. what names the method in problems.
func (r Rule) addSteps(what string, delays []time.Duration, make func(time.Duration) step) Rule {
	if len(delays) == 0 {
		return r.addProblem("%s: without a delay", what)
	}
	for _, d := range delays {
		if d <= 0 {
			r = r.addProblem("%s: %s must be positive", what, d)
		}
		r = r.addStep(make(d))
	}
	return r
}

// addStep returns a copy with one more step. It numbers the rungs of retry topics.
func (r Rule) addStep(s step) Rule {
	if s.action == RetryTopic {
		r.rungCount++
		s.rung = r.rungCount
	}
	r.steps = append(slices.Clip(r.steps), s)
	return r
}

// addProblem returns a copy with one more problem, for Validate.
func (r Rule) addProblem(format string, args ...any) Rule {
	r.problems = append(slices.Clip(r.problems), fmt.Sprintf(format, args...))
	return r
}

func (r *Rule) matches(err error) bool {
	return len(r.matchers) == 0 || slices.ContainsFunc(r.matchers, func(m Matcher) bool { return m(err) })
}
