package consumer

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/retry"
)

// Policy decides what becomes of messages whose handler failed: by the first of its rules that matches the error, and by
// how often the message failed before. It is immutable and safe for concurrent use.
//
// Failures are counted over the whole way of a message, retries in place, retry topics and requeues together, so a rule
// takes one step further with each, whatever the errors before were. What is redelivered after a crash starts anew.
type Policy struct {
	rules []Rule
}

// NewPolicy makes a policy of rules. What none of them matches is decided by DefaultPolicy. Mistakes are kept and reported by
// Validate, which the consumer calls.
func NewPolicy(rules ...Rule) *Policy { return &Policy{rules: slices.Clone(rules)} }

// defaultPolicy is the policy of errors that nobody said anything about.
var defaultPolicy = NewPolicy(
	On(Transient()).RetryForever(100*time.Millisecond, 30*time.Second),
	On(Is(ErrNoHandler)).Then(ToPark),
	On(As[*ExpiredError](), Is(ErrValidation)).DeadLetter(),
	On().Retry(3, 50*time.Millisecond, 100*time.Millisecond, 250*time.Millisecond).Jitter(0.25).DeadLetter(),
)

// DefaultPolicy is what happens unless somebody says otherwise: what the database is to blame for is tried for ever, with
// backoff up to 30 s, and spends no attempts; what no handler takes is parked; what is expired, invalid or cannot be
// decoded becomes a dead letter at once; everything else is tried three times more, after 50, 100 and 250 ms, and then
// becomes a dead letter.
func DefaultPolicy() *Policy { return defaultPolicy }

// Or is a policy with the rules of p first and then those of base: a handler's own policy over the consumer's. A nil policy
// has no rules.
func (p *Policy) Or(base *Policy) *Policy {
	var all []Rule
	for _, q := range []*Policy{p, base} {
		if q != nil {
			all = append(all, q.rules...)
		}
	}
	return &Policy{rules: all}
}

// Validate lists everything that is wrong with the rules. Errors are ErrConfiguration.
func (p *Policy) Validate() error {
	if p == nil {
		return fmt.Errorf("%w: the policy is nil", ErrConfiguration)
	}
	var errs []error
	delays := map[string]time.Duration{}
	for i := range p.rules {
		r := &p.rules[i]
		for _, s := range r.problems {
			errs = append(errs, fmt.Errorf("%w: rule %d of the policy: %s", ErrConfiguration, i+1, s))
		}
		for _, s := range r.steps {
			if s.action != RetryTopic {
				continue
			}
			if s.delay > maxRetryDelay {
				errs = append(errs, fmt.Errorf("%w: rule %d of the policy: a retry topic cannot delay for %s, only for %s: use Schedule", ErrConfiguration, i+1, s.delay, maxRetryDelay))
			}
			name := s.topic
			if name == "" {
				name = RetryTopicName("<topic>", "<group>", s.rung)
			}
			if d, ok := delays[name]; ok && d != s.delay {
				errs = append(errs, fmt.Errorf("%w: rule %d of the policy: retry topic %s waits %s here and %s elsewhere; the longer would hold up the shorter: name one of them with RetryTopics",
					ErrConfiguration, i+1, name, s.delay, d))
			}
			delays[name] = s.delay
		}
		if r.outcome == ToRequeue && r.blockKey && r.rungCount == 0 {
			errs = append(errs, fmt.Errorf("%w: rule %d of the policy: BlockKey with an endless Requeue needs a RetryTopic", ErrConfiguration, i+1))
		}
	}
	return errors.Join(errs...)
}

// Topics are the retry topics of a topic and a group: a consumer of the topic joins them as well.
func (p *Policy) Topics(group, topic string) []string {
	var names []string
	for i := range p.rules {
		for _, s := range p.rules[i].steps {
			if name := s.retryTopic(group, topic); name != "" && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}

// listNeeds is what the rules want of a disposer beside topics.
func (p *Policy) listNeeds() (outbox, gate bool) {
	for i := range p.rules {
		gate = gate || p.rules[i].blockKey
		outbox = outbox || slices.ContainsFunc(p.rules[i].steps, func(s step) bool { return s.action == Schedule })
	}
	return outbox, gate
}

func (s *step) retryTopic(group, topic string) string {
	if s.action != RetryTopic || s.topic != "" {
		return s.topic
	}
	return RetryTopicName(topic, group, s.rung)
}

// Decide says what becomes of m after err. It does no I/O, and is a function of its arguments but for the jitter of waits and
// the time that is left for a message that is not due.
//
// Some errors mean the same whatever the rules say: ErrDrop and inbox.ErrDuplicate let the message pass; a message that is not due, is kept behind
// another of its key, or meets an open circuit breaker waits, and spends no attempt.
func (p *Policy) Decide(err error, m *Message, a Attempts) Verdict {
	v, ok := p.decideConsumerError(err, m, a)
	if !ok {
		v = p.decideByRule(err, m, a)
	}
	v.Attempts = a
	return v
}

// blockedWait is how long a lane waits for an earlier message of the key where no retry topic can keep what comes behind.
const blockedWait = time.Second

// decideConsumerError decides about the consumer's own errors.
func (p *Policy) decideConsumerError(err error, m *Message, a Attempts) (Verdict, bool) {
	if errors.Is(err, ErrDrop) {
		return Verdict{Action: Discard, Reason: ClassDropped}, true
	}
	if isDuplicate(err) {
		return Verdict{Action: Discard, Reason: ClassDuplicate}, true
	}
	if e, ok := errors.AsType[*NotDueError](err); ok {
		return Verdict{Action: RetryAfter, Delay: e.Wait(now()), Uncounted: true, Reason: ClassNotDue}, true
	}
	if e, ok := errors.AsType[*BreakerOpenError](err); ok {
		v := Verdict{Action: RetryAfter, Delay: e.Wait, Uncounted: true, Reason: ClassBreaker}
		if e.Consumer {
			v.Action = PauseConsumer
		}
		return v, true
	}
	if _, ok := errors.AsType[*BlockedError](err); ok {
		v := Verdict{Action: RetryAfter, Delay: blockedWait, Uncounted: true, Block: true, Reason: ClassBlocked}
		for i := range p.rules {
			for _, s := range p.rules[i].steps {
				if p.rules[i].blockKey && s.action == RetryTopic {
					v.Action, v.Delay, v.Topic = RetryTopic, s.delay, s.retryTopic(m.Group, originOf(m).Topic)
					return v, true
				}
			}
		}
		return v, true
	}
	return Verdict{}, false
}

// decideByRule decides by the first rule that matches, or the default.
func (p *Policy) decideByRule(err error, m *Message, a Attempts) Verdict {
	for _, rules := range [][]Rule{p.rules, defaultPolicy.rules} {
		for i := range rules {
			if rules[i].matches(err) {
				return rules[i].chooseVerdict(m, a)
			}
		}
	}
	return Verdict{Action: DeadLetter} // the last default rule matches everything
}

func (r *Rule) chooseVerdict(m *Message, a Attempts) Verdict {
	if r.backoffBase > 0 {
		bound := float64(r.backoffBase) * math.Pow(2, float64(max(a.Failed-1, 0)))
		d := time.Duration(min(bound, float64(r.backoffCap)))
		return Verdict{Action: RetryAfter, Delay: addJitter(d, 1), Uncounted: true, Reason: r.reason}
	}
	v := Verdict{Reason: r.reason, Uncounted: r.uncounted}
	n := max(max(a.Total, 1)-a.Spared, 1) // the number of the attempt that failed
	if r.uncounted {
		n = 1
	}
	if n <= len(r.steps) {
		s := &r.steps[n-1]
		v.Action, v.Delay, v.Pause, v.Topic = s.action, s.delay, s.pause, s.retryTopic(m.Group, originOf(m).Topic)
		switch s.action {
		case RetryInline, RetryAfter:
			v.Delay = addJitter(s.delay, r.jitter)
		case RetryTopic, Requeue, Schedule:
			v.Block = r.blockKey
		default:
		}
		return v
	}
	switch r.outcome {
	case ToDiscard:
		v.Action = Discard
	case ToPark:
		v.Action = Park
	case ToRequeue:
		v.Action, v.Block = Requeue, r.blockKey
	case ToPause:
		v.Action, v.Delay = PauseConsumer, UntilResumed
	default:
		v.Action, v.Topic = DeadLetter, r.deadTopic
	}
	return v
}

// addJitter draws from [d·(1-f), d].
func addJitter(d time.Duration, f float64) time.Duration {
	share := time.Duration(float64(d) * f)
	if share <= 0 {
		return d
	}
	return d - share + retry.Policy{Base: share, Cap: share}.Delay(0)
}

// now is the clock of what is compared with times that other processes wrote.
func now() time.Time { return time.Now() }
