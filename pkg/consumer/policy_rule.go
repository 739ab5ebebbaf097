package consumer

import (
	"fmt"
	"slices"
	"time"
)

// Outcome is where a message goes for which a rule has no further step.
type Outcome uint8

const (
	// ToDeadLetter keeps it among the dead letters. It is the default.
	ToDeadLetter Outcome = iota
	// ToDiscard lets it pass unhandled.
	ToDiscard
	// ToPark keeps it as a letter that waits for a handler.
	ToPark
	// ToRequeue moves it to the end of its topic each time.
	ToRequeue
	// ToPause pauses the consumer until somebody resumes it; the message is tried again then.
	ToPause
)

// UntilResumed is the delay of a PauseConsumer that ends only when somebody resumes the consumer.
const UntilResumed time.Duration = -1

// Rung is one step of a ladder of retry topics.
type Rung struct {
	// Topic is where messages wait. Defaults to RetryTopicName of the topic that the message came from, the group, and
	// the number of the rung.
	Topic string
	// Delay is how long they wait at least.
	Delay time.Duration
}

// RetryTopicName is the name of the n-th retry topic, from 1, of a topic for a group: "<topic>.<group>.retry.<n>".
// Topics of these names are read as long as they exist, also after the policy that had them has changed: delete one when it is
// empty. A Rung with a Topic of its own has to stay in the policy until its topic is empty.
func RetryTopicName(topic, group string, n int) string {
	return fmt.Sprintf("%s.%s.retry.%d", topic, group, n)
}

// Rule says what follows the failures of a message whose error it matches: its steps in their order, one for each
// failure, then its outcome. It is a value; each method returns a changed copy.
type Rule struct {
	matchers                []Matcher
	steps                   []step
	outcome                 Outcome
	deadTopic               string
	reason                  string
	jitter                  float64
	backoffBase, backoffCap time.Duration // of RetryForever; 0 without
	blockKey                bool
	uncounted               bool
	rungCount               int
	problems                []string
}

// step is what follows one failure.
type step struct {
	action Action
	delay  time.Duration
	pause  time.Duration
	topic  string
	rung   int // of RetryTopic, from 1
}

// On begins a rule for errors that one of ms matches; without any, for every error.
func On(ms ...Matcher) Rule { return Rule{matchers: ms} }

// Retry runs the message again up to n times, each after the next of waits, the last of which repeats; without any, at
// once. Its lane waits meanwhile.
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

// Cooldown runs the message again after each of waits. In contrast to Retry it is for waits so long that its lane gives
// up what it holds: the transaction, a place among those that run at once.
func (r Rule) Cooldown(waits ...time.Duration) Rule {
	return r.addSteps("Cooldown", waits, func(d time.Duration) step { return step{action: RetryAfter, delay: d} })
}

// RetryForever runs the message again until it succeeds or another rule matches, with waits that double from base to cap,
// drawn with full jitter. Such failures spend no attempts.
func (r Rule) RetryForever(base, cap time.Duration) Rule {
	if base <= 0 || cap < base {
		return r.addProblem("RetryForever(%s, %s): the base must be positive and the cap at least the base", base, cap)
	}
	r.backoffBase, r.backoffCap, r.uncounted = base, cap, true
	return r
}

// RetryTopic moves the message to a retry topic for each of delays, from where it comes back not before the delay has
// passed. Nothing waits meanwhile, so later messages of its key are handled before it, unless BlockKey is set too.
func (r Rule) RetryTopic(delays ...time.Duration) Rule {
	return r.addSteps("RetryTopic", delays, func(d time.Duration) step { return step{action: RetryTopic, delay: d} })
}

// RetryTopics is RetryTopic with named topics.
func (r Rule) RetryTopics(rungs ...Rung) Rule {
	for _, g := range rungs {
		if g.Delay <= 0 {
			r = r.addProblem("RetryTopics: the delay of %q is %s; it must be positive", g.Topic, g.Delay)
		}
		r = r.addStep(step{action: RetryTopic, delay: g.Delay, topic: g.Topic})
	}
	return r
}

// Requeue moves the message to the end of its topic, up to n times. Later messages of its key are handled before it,
// unless BlockKey is set too.
func (r Rule) Requeue(n int) Rule {
	if n < 1 {
		return r.addProblem("Requeue(%d): at least 1", n)
	}
	for range n {
		r = r.addStep(step{action: Requeue})
	}
	return r
}

// Schedule hands the message to the outbox as a scheduled event for each of delays; the relay brings it back to its topic
// when it is due. It needs a DisposerConfig with an Outbox, and an allowed topic. Order is as with Requeue.
func (r Rule) Schedule(delays ...time.Duration) Rule {
	return r.addSteps("Schedule", delays, func(d time.Duration) step { return step{action: Schedule, delay: d} })
}

// Pause pauses the whole consumer for each of delays and tries the message again then; UntilResumed has no end.
func (r Rule) Pause(delays ...time.Duration) Rule {
	for _, d := range delays {
		if d <= 0 && d != UntilResumed {
			r = r.addProblem("Pause: %s must be positive, or UntilResumed", d)
		}
		r = r.addStep(step{action: PauseConsumer, delay: d})
	}
	return r
}

// PauseThenRequeue moves the message to the end of its topic and pauses the whole consumer, for each of delays.
func (r Rule) PauseThenRequeue(delays ...time.Duration) Rule {
	return r.addSteps("PauseThenRequeue", delays, func(d time.Duration) step { return step{action: Requeue, pause: d} })
}

// Jitter shortens each wait of Retry and Cooldown by a random share of up to f, between 0 and 1. Defaults to 0.
func (r Rule) Jitter(f float64) Rule {
	if f < 0 || f > 1 {
		return r.addProblem("Jitter(%g): between 0 and 1", f)
	}
	r.jitter = f
	return r
}

// BlockKey keeps later messages of the key, for this handler, behind one that this rule moved away, until it was handled
// or given up. It needs a KeyGate, by BlockingKeys, and a RetryTopic in the rule, in whose first topic those wait that are
// kept behind; without one their lane waits.
func (r Rule) BlockKey() Rule {
	r.blockKey = true
	return r
}

// Uncounted makes the rule's failures spend no attempts: the first step is taken each time.
func (r Rule) Uncounted() Rule {
	r.uncounted = true
	return r
}

// As sets the class of the dead letter. Defaults to Class of the error.
func (r Rule) As(class string) Rule {
	r.reason = class
	return r
}

// DeadTopic names the topic of the dead letter, in place of the Disposer's.
func (r Rule) DeadTopic(topic string) Rule {
	r.deadTopic = topic
	return r
}

// Then sets where a message goes after the last step. Defaults to ToDeadLetter.
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

func (r Rule) addStep(s step) Rule {
	if s.action == RetryTopic {
		r.rungCount++
		s.rung = r.rungCount
	}
	r.steps = append(slices.Clip(r.steps), s)
	return r
}

func (r Rule) addProblem(format string, args ...any) Rule {
	r.problems = append(slices.Clip(r.problems), fmt.Sprintf(format, args...))
	return r
}

func (r *Rule) matches(err error) bool {
	return len(r.matchers) == 0 || slices.ContainsFunc(r.matchers, func(m Matcher) bool { return m(err) })
}
