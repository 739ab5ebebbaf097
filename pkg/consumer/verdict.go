package consumer

import (
	"fmt"
	"slices"
	"time"
)

// Action is the treatment of a message whose handler failed.
type Action uint8

const (
	// RetryInline attempts the message again in place, at once or after Delay. Its lane waits for it.
	RetryInline Action = iota + 1
	// RetryAfter attempts the message again after Delay, for a cause outside of the message. Its lane
	// waits for it. If the message is set aside, only its key waits.
	RetryAfter
	// RetryTopic moves the message to the topic of the verdict, to be delivered after Delay.
	RetryTopic
	// Requeue moves the message to the end of its own topic.
	Requeue
	// Schedule appends the message to the outbox, to be delivered after Delay.
	Schedule
	// PauseConsumer pauses the whole consumer for Delay. Then the message is attempted again.
	PauseConsumer
	// Skip skips the message.
	Skip
	// DeadLetter moves the message to the dead letters.
	DeadLetter
	// Park stores the message as a dead letter that waits for a handler: no handler takes its type.
	Park
	// SetAside keeps the message in MongoDB and attempts it again after Delay. Later messages of its key
	// wait too, unless Unordered is set. If it cannot be set aside, its lane waits for Delay.
	SetAside
	// SuspendHandler sets the message aside, and the handler takes no message for Delay in this process.
	SuspendHandler
)

var actions = [...]string{
	RetryInline: "retry_inline", RetryAfter: "retry_after", RetryTopic: "retry_topic", Requeue: "requeue", Schedule: "schedule",
	PauseConsumer: "pause", Skip: "discard", DeadLetter: "dead_letter", Park: "park", SetAside: "set_aside", SuspendHandler: "suspend",
}

// String returns the name of the action, for metric labels.
func (a Action) String() string {
	if int(a) < len(actions) && actions[a] != "" {
		return actions[a]
	}
	return fmt.Sprintf("action_%d", uint8(a))
}

// Verdict is the decision of a policy.
type Verdict struct {
	Action Action
	Delay  time.Duration
	Topic  string // of RetryTopic; optional for DeadLetter
	// Reason is a class for metric labels, such as "attempts_exhausted". If it is "", the Disposer
	// chooses one.
	Reason string
	// Uncounted is set if the message is not to blame for the failure. It spends no attempt.
	Uncounted bool
	// Pause is how long the consumer is paused after the message was moved. RetryInline and
	// RetryAfter ignore it.
	Pause time.Duration
	// Bare writes a dead letter without key, body, headers and failure texts, which can always be
	// written. It is used if the complete letter cannot be written.
	Bare bool
	// Unordered lets later messages of the key be handled while the message is set aside.
	Unordered bool
	// Attempts has the failures on which the decision is based.
	Attempts Attempts
}

// Attempts counts the failures of one message in one handler.
type Attempts struct {
	// Failed counts the failures in this delivery, including the current one. It is 1 after the
	// first failure.
	Failed int
	// Total includes earlier deliveries by retry topics: the message's Attempt - 1 + Failed.
	Total int
	// Spared counts the failures in Failed whose verdict was Uncounted. So Total - Spared attempts
	// are spent.
	Spared int
	// Since is the time of the first failure of this delivery.
	Since time.Time
	// History has the latest failures of this delivery, oldest first, at most MaxHistory.
	History []Failure
}

// Failure is one failed attempt, as recorded in dead letters.
type Failure struct {
	At      time.Time `bson:"at" json:"at"`
	Attempt int       `bson:"attempt" json:"attempt"`
	Class   string    `bson:"class" json:"class"`
	Reason  string    `bson:"reason" json:"reason"` // clipped to 512 bytes
}

// MaxHistory is how many of its latest failures are kept of one message.
const MaxHistory = 20

// Note returns a with one more failure at the given time. If the verdict is Uncounted, the caller
// increments Spared.
func (a Attempts) Note(err error, m *Message, at time.Time) Attempts {
	if a.Failed == 0 {
		a.Since = at
	}
	a.Failed++
	a.Total = max(m.Attempt, 1) - 1 + a.Failed

	kept := a.History[max(0, len(a.History)+1-MaxHistory):]
	failure := Failure{At: at, Attempt: a.Total - a.Spared, Class: Class(err), Reason: errorText(err)}
	a.History = append(slices.Clip(slices.Clone(kept)), failure)
	return a
}
