package consumer

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
)

// The defaults of Retry, whose fields give the reasons.
const (
	defaultFirstWait   = 5 * time.Second
	defaultLongestWait = 5 * time.Minute
	defaultGiveUpAfter = 24 * time.Hour
	defaultOutage      = 20
	defaultMaxWaiting  = 100_000
)

// defaultQuick are the waits of Retry.Quick. They cover write conflicts and lost connections.
var defaultQuick = []time.Duration{100 * time.Millisecond, 400 * time.Millisecond}

// retryJitter is the largest share by which a wait of Retry is shortened. Messages that failed together are then retried
// at different times.
const retryJitter = 0.2

// Retry defines what follows a failure of a handler. It is a plain value that can be read from a file. A zero field has the
// default, and a negative one means none.
//
// A failed message is tried again at once, after each of the waits in Quick. Then it is set aside in MongoDB together with
// the later messages of its key, and its offset passes, so that other keys go on. It is tried again after Min, then after
// twice as long, up to Max. At last it is given up.
//
// If Outage messages of different keys fail and none succeeds in between, the handler is suspended: a service that it needs
// is probably unavailable. A suspended handler takes no new messages, and tries a waiting one after Min up to Max. The
// first success ends the suspension. Until then, its messages stay in Kafka. Messages that all other handlers of the topic
// have finished are set aside untried, so that these handlers can go on.
type Retry struct {
	// Quick has the waits before attempts in place. The lane waits with the message. Defaults to 100 ms and 400 ms, which
	// cover write conflicts and lost connections. A negative wait ends the list, so {-1} means none.
	Quick []time.Duration
	// Min and Max are the first and the longest wait of a message that is set aside. Waits double, and each is shortened by
	// up to 20 %, so that messages that failed together are not retried together. Default to 5 s and 5 min: after an outage
	// of any length everything is retried within five minutes.
	Min, Max time.Duration
	// GiveUpAfter is the time since the first failure after which a failed message is given up. Defaults to 24 h, so that
	// people see a failure of the night by day. Negative means never.
	GiveUpAfter time.Duration
	// MaxAttempts also gives a message up after so many attempts. Defaults to no limit, because an outage is measured in
	// time. Negative means no limit.
	MaxAttempts int
	// Unordered lets later messages of the key be handled while this message is set aside. Defaults to false, which keeps
	// the order of the key.
	Unordered bool
	// Then defines what giving up means. Defaults to ThenDeadLetter.
	Then GiveUp

	// Outage and MaxWaiting belong to the handler: only those of WithRetry count.

	// Outage is how many messages of different keys must fail in a row before the handler is suspended. Defaults to 20: one
	// bad message, or a few, stop no handler. Retries of messages that are set aside do not count. Each running member of the group
	// counts on its own. A member that starts while as many keys of the group have failed tries one message at a time, and the
	// first new one that fails suspends it, so members that join or start again during an outage set one key aside for each
	// attempt. For several handlers that need the same service, see package breaker. Negative never suspends.
	Outage int
	// MaxWaiting is how many messages of the handler may be set aside in the whole group. Above it a failed message waits
	// in its lane. Defaults to 100,000, which is about 100 MB of small messages. Negative means none.
	MaxWaiting int
}

// GiveUp is the treatment of a message that is given up.
type GiveUp uint8

const (
	// ThenDeadLetter makes the message a dead letter.
	ThenDeadLetter GiveUp = iota
	// ThenDiscard skips the message.
	ThenDiscard
	// ThenSuspend suspends the handler until Consumer.ResumeHandler, and then tries the message again.
	ThenSuspend
)

// NoRetry returns a Retry that gives up at the first failure.
func NoRetry() Retry { return Retry{MaxAttempts: 1} }

// WithRetry sets the Retry of all errors that match no WithRetryFor.
func WithRetry(retry Retry) HandlerOption {
	return handlerOption(func(handling *handling) {
		handling.problems = append(handling.problems, retry.findProblems("WithRetry"))
		handling.retry = retry
	})
}

// WithRetryFor sets the Retry of errors that match, for example of ErrorIs. The first match counts. The rules of a handler
// come before the rules of New. match must be a pure function.
func WithRetryFor(match func(err error) bool, retry Retry) HandlerOption {
	return handlerOption(func(handling *handling) {
		handling.problems = append(handling.problems, retry.findProblems("WithRetryFor"))
		if match == nil {
			handling.problems = append(handling.problems, errors.New("WithRetryFor: the function is nil"))
		}
		handling.retryRules = append(handling.retryRules[:len(handling.retryRules):len(handling.retryRules)], retryRule{match, retry.withDefaults()})
	})
}

// ErrorIs matches the errors for which errors.Is is true for one of the targets.
func ErrorIs(targets ...error) func(err error) bool {
	return func(err error) bool {
		return slices.ContainsFunc(targets, func(cause error) bool { return errors.Is(err, cause) })
	}
}

// WithRetryTopics lets a failed message wait in Kafka instead of MongoDB. After the waits of Retry.Quick it moves to the
// topic "<topic>.<group>.retry.1" for the first of delays, then to "….retry.2" for the second, and so on. After the last one
// it is given up. Later messages of its key are handled before it. Missing topics are created with as many partitions as the
// message's own topic, and keep a message for seven days longer than its delay. Create others so too: Kafka deletes a message at the
// end of the retention, also before it is handled. A delay must be positive and at most seven days.
//
// Existing topics with such names are consumed even if no handler uses them any more. Delete an unused one when it is empty.
func WithRetryTopics(delays ...time.Duration) HandlerOption {
	return handlerOption(func(handling *handling) {
		for _, d := range delays {
			if d <= 0 || d > maxRetryDelay {
				handling.problems = append(handling.problems,
					fmt.Errorf("WithRetryTopics: the delay is %v: it must be positive and at most %v", d, maxRetryDelay))
			}
		}
		handling.retryTopics = delays
	})
}

// findProblems returns the problems of r. option is the name of the option in the text.
func (r Retry) findProblems(option string) error {
	var errs []error
	addProblem := func(wrong bool, format string, args ...any) {
		if wrong {
			errs = append(errs, fmt.Errorf("%s: %s", option, fmt.Sprintf(format, args...)))
		}
	}

	retry := r.withDefaults()
	addProblem(retry.Min < 0 || retry.Max < retry.Min, "Min is %v and Max is %v: Min must be positive and at most Max", retry.Min, retry.Max)
	addProblem(r.Then > ThenSuspend, "Then is %d: use ThenDeadLetter, ThenDiscard or ThenSuspend", r.Then)
	return errors.Join(errs...)
}

// withDefaults returns r with the defaults in its zero fields.
func (r Retry) withDefaults() Retry {
	if len(r.Quick) == 0 {
		r.Quick = defaultQuick
	}
	r.Min = cmp.Or(r.Min, min(defaultFirstWait, cmp.Or(r.Max, defaultFirstWait)))
	r.Max = cmp.Or(r.Max, max(defaultLongestWait, r.Min))
	r.GiveUpAfter = cmp.Or(r.GiveUpAfter, defaultGiveUpAfter)
	r.Outage = cmp.Or(r.Outage, defaultOutage)
	r.MaxWaiting = cmp.Or(r.MaxWaiting, defaultMaxWaiting)
	return r
}

// quickWaits returns the waits before attempts in place.
func (r *Retry) quickWaits() []time.Duration {
	if end := slices.IndexFunc(r.Quick, func(wait time.Duration) bool { return wait < 0 }); end >= 0 {
		return r.Quick[:end]
	}
	return r.Quick
}

// waitAfter returns the wait after the n-th failure, from 1, of a message that is set aside.
func (r *Retry) waitAfter(n int) time.Duration {
	wait := float64(r.Min) * math.Pow(2, float64(max(n, 1)-1))
	return addJitter(time.Duration(min(wait, float64(r.Max))), retryJitter)
}

// isOverdue reports whether the message has failed for GiveUpAfter.
func (r *Retry) isOverdue(failures failures) bool {
	return r.GiveUpAfter >= 0 && failures.Failed > 1 && time.Since(failures.Since) >= r.GiveUpAfter
}

// giveUp returns the verdict on a message that is given up.
func (r *Retry) giveUp() verdict {
	switch r.Then {
	case ThenDiscard:
		return verdict{Action: actDiscard, Reason: classDiscarded}
	case ThenSuspend:
		return verdict{Action: actSuspend, Delay: untilResumed, Uncounted: true}
	default:
		return verdict{Action: actDeadLetter}
	}
}
