package consumer

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// action is the treatment of a message whose handler failed.
type action uint8

const (
	// actRetry attempts the message again in place, after the delay. Its lane waits for it.
	actRetry action = iota + 1
	// actWait attempts the message again after the delay, for a cause outside of the message. Its lane waits for it. If the
	// message is set aside, only its key waits.
	actWait
	// actRetryTopic moves the message to the topic of the verdict, to be delivered after the delay.
	actRetryTopic
	// actDiscard skips the message.
	actDiscard
	// actDeadLetter moves the message to the dead letters.
	actDeadLetter
	// actAside keeps the message in MongoDB and attempts it again after the delay. Later messages of its key wait too, unless
	// Unordered is set. If it cannot be set aside, its lane waits for the delay.
	actAside
	// actSuspend sets the message aside, and the handler takes no message for the delay in this process.
	actSuspend
)

var actions = [...]string{
	actRetry: "retry", actWait: "wait", actRetryTopic: "retry_topic", actDiscard: "discard", actDeadLetter: "dead_letter",
	actAside: "set_aside", actSuspend: "suspend",
}

// String returns the name of the action, for metric labels and HandlerError.
func (a action) String() string {
	if int(a) < len(actions) && actions[a] != "" {
		return actions[a]
	}
	return fmt.Sprintf("action_%d", uint8(a))
}

// untilResumed is the delay of an actSuspend that ends only with ResumeHandler.
const untilResumed time.Duration = -1

// verdict is the decision about a message whose handler failed.
type verdict struct {
	Action action
	Delay  time.Duration
	Topic  string // of actRetryTopic
	// Reason is a class for dead letters and metric labels. If it is "", the class of the error is used.
	Reason string
	// Uncounted is set if the message is not to blame for the failure. It spends no attempt.
	Uncounted bool
	// Unordered lets later messages of the key be handled while the message is set aside.
	Unordered bool
	// Attempts has the failures on which the decision is based.
	Attempts failures
}

// failures counts the failures of one message in one handler.
type failures struct {
	// Failed counts the failures in this delivery, including the current one.
	Failed int
	// Total includes earlier deliveries by retry topics: the message's Attempt - 1 + Failed.
	Total int
	// Spared counts the failures in Failed whose verdict was Uncounted. So Total - Spared attempts
	// are spent.
	Spared int
	// Since is the time of the first failure of this delivery.
	Since time.Time
	// History has the latest failures of this delivery, oldest first, at most maxHistory.
	History []deadletter.Failure
}

// maxHistory is how many of its latest failures are kept of one message.
const maxHistory = 20

// note returns a with one more failure at the given time. If the verdict is Uncounted, the caller
// increments Spared.
func (a failures) note(err error, message *Message, failedAt time.Time) failures {
	if a.Failed == 0 {
		a.Since = failedAt
	}
	a.Failed++
	a.Total = max(message.Attempt, 1) - 1 + a.Failed

	kept := a.History[max(0, len(a.History)+1-maxHistory):]
	failure := deadletter.Failure{At: failedAt, Attempt: a.Total - a.Spared, Class: classOf(err), Reason: errorText(err)}
	a.History = append(slices.Clip(slices.Clone(kept)), failure)
	return a
}

// retryRule is a Retry for some errors.
type retryRule struct {
	match func(err error) bool
	retry Retry
}

// decider decides what follows a failure of one handler. It does no I/O.
type decider struct {
	retry  Retry
	rules  []retryRule
	topics []time.Duration // the delays of the retry topics

	// fixed is the verdict on all messages of a handler of the consumer itself.
	fixed *verdict
}

// decide returns the verdict on message after err. If a function of WithRetryFor does not return, the message becomes a dead letter.
func (d *decider) decide(err error, message *Message, failures failures) (decided verdict) {
	if d.fixed != nil {
		decided = *d.fixed
	} else if failed := runGuarded(func() error { decided = d.chooseVerdict(err, message, failures); return nil }); failed != nil {
		decided = verdict{Action: actDeadLetter}
	}
	decided.Attempts = failures
	return decided
}

// chooseVerdict returns the verdict without the attempts. Errors of the consumer and errors that the handler made with
// RetryIn, Suspend, Reject or Discard have a fixed meaning. For other errors the Retry decides.
func (d *decider) chooseVerdict(err error, message *Message, failures failures) verdict {
	// The inbox has the message already.
	if errors.Is(err, inbox.ErrDuplicate) {
		return verdict{Action: actDiscard, Reason: classDuplicate}
	}
	if notDue, ok := errors.AsType[*notDueError](err); ok {
		return verdict{Action: actWait, Delay: notDue.Wait(time.Now()), Uncounted: true, Reason: classNotDue}
	}

	retry, matched := d.retryFor(err)
	asked, ok := errors.AsType[*requestError](err)
	switch {
	case ok:
		return asked.chooseVerdict(retry, failures)
	case matched:
		return d.chooseByRetry(retry, message, failures)
	case isTransient(err):
		// A message that fails for long may do so alone: it has a slow query, or conflicts with its own writes.
		if failures.Failed > mostInLane || time.Since(failures.Since) > longestInLane {
			return verdict{Action: actAside, Uncounted: true, Delay: retry.waitAfter(failures.Failed), Unordered: retry.Unordered}
		}
		// The database is away. To set the message aside, the consumer would need it.
		bound := 100 * time.Millisecond << min(max(failures.Failed-1, 0), 10)
		return verdict{Action: actWait, Uncounted: true, Delay: addJitter(min(bound, 30*time.Second), 1)}
	case errors.Is(err, codec.ErrUnavailable):
		// The registry of a codec is away, for all messages of the handler.
		return verdict{Action: actSuspend, Uncounted: true, Delay: retry.waitAfter(failures.Failed), Unordered: retry.Unordered}
	case errors.Is(err, ErrMalformed) || errors.As(err, new(*expiredError)):
		return verdict{Action: actDeadLetter}
	}
	return d.chooseByRetry(retry, message, failures)
}

// mostInLane and longestInLane bound the failures that wait in their lane for a database that seems to be away.
const (
	mostInLane    = 5
	longestInLane = time.Minute
)

// retryFor returns the Retry for err, and whether a rule of the user matches err.
func (d *decider) retryFor(err error) (retry *Retry, matched bool) {
	for i := range d.rules {
		if d.rules[i].match(err) {
			return &d.rules[i].retry, true
		}
	}
	return &d.retry, false
}

// chooseByRetry returns the verdict of retry after the failures in a.
func (d *decider) chooseByRetry(retry *Retry, message *Message, failures failures) verdict {
	// The number of the failed attempt.
	n := max(max(failures.Total, 1)-failures.Spared, 1)
	quick := retry.quickWaits()
	later := n - len(quick)

	switch {
	case retry.MaxAttempts > 0 && n >= retry.MaxAttempts, retry.isOverdue(failures):
		return retry.giveUp()
	case later <= 0:
		return verdict{Action: actRetry, Delay: quick[n-1]}
	case later <= len(d.topics):
		return verdict{Action: actRetryTopic, Delay: d.topics[later-1], Topic: transport.RetryTopicName(originOf(message).Topic, message.Group, later)}
	// With retry topics, the message is given up after the last of them.
	case len(d.topics) > 0:
		return retry.giveUp()
	}
	return verdict{Action: actAside, Delay: retry.waitAfter(later), Unordered: retry.Unordered}
}

// addJitter returns a random duration in [d·(1-f), d].
func addJitter(duration time.Duration, factor float64) time.Duration {
	if share := time.Duration(float64(duration) * factor); share > 0 {
		return duration - rand.N(share)
	}
	return duration
}
