package consumer

import (
	"fmt"
	"time"
)

// Action is what becomes of a message whose handler failed.
type Action uint8

const (
	// RetryInline runs it again at once, or after Delay, and holds its place among those that run.
	RetryInline Action = iota + 1
	// RetryAfter lets its lane wait for Delay: what is behind it in the lane waits too, other lanes do not.
	RetryAfter
	// RetryTopic moves it to the topic of the verdict, to be delivered after Delay.
	RetryTopic
	// Requeue moves it to the end of its own topic.
	Requeue
	// Schedule hands it to the outbox, to be delivered after Delay.
	Schedule
	// PauseConsumer pauses the whole consumer for Delay, and tries it again then.
	PauseConsumer
	// Discard lets it pass unhandled.
	Discard
	// DeadLetter moves it to the dead letters.
	DeadLetter
	// Park keeps it as a dead letter that nobody is to blame for: no handler took its type.
	Park
)

var actions = [...]string{
	RetryInline: "retry_inline", RetryAfter: "retry_after", RetryTopic: "retry_topic", Requeue: "requeue", Schedule: "schedule",
	PauseConsumer: "pause", Discard: "discard", DeadLetter: "dead_letter", Park: "park",
}

// String is a name fit for a label.
func (a Action) String() string {
	if int(a) < len(actions) && actions[a] != "" {
		return actions[a]
	}
	return fmt.Sprintf("action_%d", uint8(a))
}

// Verdict is what a policy decides.
type Verdict struct {
	Action Action
	Delay  time.Duration
	Topic  string // of RetryTopic, and of DeadLetter where there is one
	// Reason is a class fit for a label, as "attempts_exhausted"; "" leaves it to the Disposer.
	Reason string
}

// Attempts is what is known of the failures of one message in one handler.
type Attempts struct {
	// Failed counts the failures in this delivery, the present one included: 1 at first.
	Failed int
	// Total counts on through retry topics: the message's Attempt - 1 + Failed.
	Total int
	// Since is when the first of this delivery failed.
	Since time.Time
}
