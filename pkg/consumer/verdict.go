package consumer

import (
	"fmt"
	"slices"
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
	// Uncounted says that the failure is not the message's: it spends none of its attempts.
	Uncounted bool
	// Pause, with any action but the retries, pauses the consumer for that long once the message is disposed of.
	Pause time.Duration
	// Bare makes the letter one that can always be written: without key, body, headers, and the texts of its failures. It is
	// for messages whose whole letter cannot be written.
	Bare bool
	// Block keeps later messages of the key behind this one until it is done with, by the KeyGate of the Disposer.
	Block bool
	// Attempts is what the decision was made from.
	Attempts Attempts
}

// Attempts is what is known of the failures of one message in one handler.
type Attempts struct {
	// Failed counts the failures in this delivery, the present one included: 1 at first.
	Failed int
	// Total counts on through retry topics: the message's Attempt - 1 + Failed.
	Total int
	// Spared counts those of Failed that were Uncounted by their verdicts, so that Total - Spared attempts are spent.
	Spared int
	// Since is when the first of this delivery failed.
	Since time.Time
	// History is the latest failures of this delivery, oldest first, at most MaxHistory.
	History []Failure
}

// Failure is one failed attempt, as dead letters tell it.
type Failure struct {
	At      time.Time `bson:"at" json:"at"`
	Attempt int       `bson:"attempt" json:"attempt"`
	Class   string    `bson:"class" json:"class"`
	Reason  string    `bson:"reason" json:"reason"` // clipped to 512 bytes
}

// MaxHistory bounds the failures that are kept of one message, the latest ones.
const MaxHistory = 20

// Note is a with one more failure at that time. The caller counts Spared by the verdict that follows.
func (a Attempts) Note(err error, m *Message, at time.Time) Attempts {
	if a.Failed == 0 {
		a.Since = at
	}
	a.Failed++
	a.Total = max(m.Attempt, 1) - 1 + a.Failed
	kept := a.History[max(0, len(a.History)+1-MaxHistory):]
	a.History = append(slices.Clip(slices.Clone(kept)), Failure{At: at, Attempt: a.Total - a.Spared, Class: Class(err), Reason: errorText(err)})
	return a
}
