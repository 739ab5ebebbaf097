package consumer

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/retry"
)

// Policy decides about messages whose handler failed, by its first rule that matches the error and
// by the number of earlier failures. It is immutable and safe for concurrent use.
//
// Retries in place, retry topics and requeues of a message count together. Each failure takes a
// rule one step further, whatever the earlier errors were. A message that is redelivered after a
// crash starts again at its first step.
type Policy struct {
	rules []Rule
}

// NewPolicy returns a policy of rules. If no rule matches an error, DefaultPolicy decides. Invalid
// rules are reported by Validate, which the consumer calls.
func NewPolicy(rules ...Rule) *Policy { return &Policy{rules: slices.Clone(rules)} }

// defaultPolicy is the policy for errors that no other rule matches.
var defaultPolicy = NewPolicy(
	On(Transient()).RetryForever(100*time.Millisecond, 30*time.Second),
	On(Is(ErrNoHandler)).Then(ToPark),
	On(As[*ExpiredError](), Is(ErrValidation)).DeadLetter(),
	On().Retry(3, 50*time.Millisecond, 100*time.Millisecond, 250*time.Millisecond).Jitter(0.25).DeadLetter(),
)

// DefaultPolicy returns the policy for errors that no other rule matches:
//   - Errors of the database are retried forever, with a backoff of up to 30 s. They spend no attempts.
//   - Messages that no handler takes are parked.
//   - Messages that are expired, invalid or cannot be decoded become dead letters at once.
//   - All other failures are retried three times, after 50, 100 and 250 ms. Then the message becomes a dead letter.
func DefaultPolicy() *Policy { return defaultPolicy }

// Or returns a policy with the rules of p followed by the rules of base, for example of a handler's
// policy and the consumer's. A nil policy has no rules.
func (p *Policy) Or(base *Policy) *Policy {
	var all []Rule
	for _, q := range []*Policy{p, base} {
		if q != nil {
			all = append(all, q.rules...)
		}
	}
	return &Policy{rules: all}
}

// Validate returns all problems of the rules. Its errors are ErrConfiguration.
func (p *Policy) Validate() error {
	if p == nil {
		return fmt.Errorf("%w: the policy is nil", ErrConfiguration)
	}

	var errs []error
	delays := map[string]time.Duration{} // by retry topic
	for i := range p.rules {
		r := &p.rules[i]
		addError := func(format string, args ...any) {
			errs = append(errs, fmt.Errorf("%w: rule %d of the policy: %s", ErrConfiguration, i+1, fmt.Sprintf(format, args...)))
		}

		for _, problem := range r.problems {
			addError("%s", problem)
		}
		for _, s := range r.steps {
			if s.action != RetryTopic {
				continue
			}
			if s.delay > maxRetryDelay {
				addError("a retry topic cannot delay for %s, only for %s: use Schedule", s.delay, maxRetryDelay)
			}

			// A lane of a retry topic waits for its first message, so all messages of the topic
			// need the same delay.
			name := s.topic
			if name == "" {
				name = RetryTopicName("<topic>", "<group>", s.rung)
			}
			if d, ok := delays[name]; ok && d != s.delay {
				addError("retry topic %s delays for %s here and for %s in another rule; the longer delay would hold up the "+
					"shorter one: name one of the topics with RetryTopics", name, s.delay, d)
			}
			delays[name] = s.delay
		}
	}
	return errors.Join(errs...)
}

// Topics returns the retry topics of a topic and a group. A consumer of the topic also consumes them.
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

// needsOutbox reports whether the rules need the outbox of a disposer.
func (p *Policy) needsOutbox() bool {
	return slices.ContainsFunc(p.rules, func(r Rule) bool {
		return slices.ContainsFunc(r.steps, func(s step) bool { return s.action == Schedule })
	})
}

// retryTopic returns the retry topic of the step, or the topic in s if it has another action.
func (s *step) retryTopic(group, topic string) string {
	if s.action != RetryTopic || s.topic != "" {
		return s.topic
	}
	return RetryTopicName(topic, group, s.rung)
}

// Decide returns the verdict on m after err. It does no I/O. Its result depends only on its
// arguments, except for the jitter of delays and the remaining time of a message that is not due.
//
// Some errors of the consumer have the same meaning in every policy. After
// inbox.ErrDuplicate the message is skipped. A message that is not due waits without spending an
// attempt.
func (p *Policy) Decide(err error, m *Message, a Attempts) Verdict {
	v, ok := decideConsumerError(err)
	if !ok {
		v = p.decideByRule(err, m, a)
	}
	v.Attempts = a
	return v
}

// decideConsumerError decides about the errors of the consumer itself. It returns false for all
// other errors.
func decideConsumerError(err error) (Verdict, bool) {
	if isDuplicate(err) {
		return Verdict{Action: Skip, Reason: ClassDuplicate}, true
	}

	if e, ok := errors.AsType[*NotDueError](err); ok {
		return Verdict{Action: RetryAfter, Delay: e.Wait(now()), Uncounted: true, Reason: ClassNotDue}, true
	}
	return Verdict{}, false
}

// decideByRule returns the verdict of the first matching rule of p, or of the default policy.
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

// chooseVerdict returns the verdict of the rule after the failures in a.
func (r *Rule) chooseVerdict(m *Message, a Attempts) Verdict {
	if r.backoffBase > 0 {
		bound := float64(r.backoffBase) * math.Pow(2, float64(max(a.Failed-1, 0)))
		d := time.Duration(min(bound, float64(r.backoffCap)))
		return Verdict{Action: RetryAfter, Delay: addJitter(d, 1), Uncounted: true, Reason: r.reason}
	}

	v := Verdict{Reason: r.reason, Uncounted: r.uncounted}
	n := max(max(a.Total, 1)-a.Spared, 1) // the number of the failed attempt
	if r.uncounted {
		n = 1
	}

	if n <= len(r.steps) {
		s := &r.steps[n-1]
		v.Action, v.Delay, v.Pause = s.action, s.delay, s.pause
		v.Topic = s.retryTopic(m.Group, originOf(m).Topic)
		if s.action == RetryInline {
			v.Delay = addJitter(s.delay, r.jitter)
		}
		return v
	}

	switch r.outcome {
	case ToDiscard:
		v.Action = Skip
	case ToPark:
		v.Action = Park
	case ToRequeue:
		v.Action = Requeue
	case ToPause:
		v.Action, v.Delay = PauseConsumer, UntilResumed
	default:
		v.Action, v.Topic = DeadLetter, r.deadTopic
	}
	return v
}

// addJitter returns a random duration in [d·(1-f), d].
func addJitter(d time.Duration, f float64) time.Duration {
	share := time.Duration(float64(d) * f)
	if share <= 0 {
		return d
	}
	return d - share + retry.Policy{Base: share, Cap: share}.Delay(0)
}

// now returns the time that is compared with times written by other processes.
func now() time.Time { return time.Now() }
