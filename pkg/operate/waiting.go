package operate

import (
	"context"
	"iter"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// WaitingFilter selects waiting events. An event matches if it fulfills all conditions that are set. An empty list of ids that is not nil
// selects nothing.
type WaitingFilter struct {
	Collection string   // the outbox, as database.collection
	Reason     string   // retry, blocked, parked or queued
	Topic      string   // the event waits for this topic
	Key        string   // the ordering key
	IDs        []string // ids of events
	Failed     bool     // only events that Kafka rejected and that wait for another attempt
	All        bool     // permits an action without any condition
}

func (f WaitingFilter) toAdmin() admin.WaitingFilter {
	return admin.WaitingFilter{Collection: f.Collection, Reason: f.Reason, Topic: f.Topic, Key: f.Key, IDs: f.IDs, Failed: f.Failed, All: f.All}
}

// WaitingEvent is an event that the relay could not send in the order of the stream. The relay stores it until it is sent.
type WaitingEvent struct {
	Collection string // of the outbox, as database.collection
	ID         string
	Delivery   int    // 0 is the first delivery; each requeue adds one
	Type       string // name of the event
	Key        string // the ordering key

	// Reason is why it waits: parked (its topic cannot be written), blocked (an earlier event of its key waits), retry
	// (Kafka rejected it, and there are attempts left), or queued (it is sent next).
	Reason string

	Topics   []string       // topics that it waits for; empty means all that it routes to
	Origin   string         // stream, sweep, scheduled, requeue or replay
	Attempts int            // failed attempts
	NextAt   time.Time      // when it is tried again; zero if it waits for an obstacle to go away
	Failure  *FailedAttempt // the last failed attempt; nil if none failed
}

// FailedAttempt is an attempt to send or to handle an event that failed.
type FailedAttempt struct {
	At     time.Time
	Class  string // the kind of failure
	Reason string // for people; it contains no payload
	Topic  string // the topic that rejected the event; "" if no topic did
	Node   string // of the relay; "" for a handler
}

// Waiting returns the waiting events that match, without payloads, sorted by collection and key. Within a key, they have
// the order in which they will be sent.
func (o *Operator) Waiting(ctx context.Context, filter WaitingFilter) iter.Seq2[WaitingEvent, error] {
	read := func(use admin.Operator, after string) ([]admin.WaitingEnvelope, string, error) {
		page, err := use.Waiting().List(ctx, filter.toAdmin(), admin.MaxPage, after)
		return page.Items, page.Next, err
	}
	return listAll(ctx, o, "list the waiting events", read, newWaitingEvent)
}

func newWaitingEvent(stored *admin.WaitingEnvelope) WaitingEvent {
	event := WaitingEvent{
		Collection: stored.Collection, ID: stored.ID, Delivery: int(stored.Delivery), Type: stored.Type, Key: stored.Key,
		Reason: stored.Reason, Topics: stored.Topics, Origin: stored.Origin, Attempts: int(stored.Attempts), NextAt: timeOf(stored.NextAt),
	}
	if attempt := stored.Error; attempt != nil {
		event.Failure = &FailedAttempt{At: attempt.At, Class: attempt.Class, Reason: attempt.Reason, Topic: attempt.Topic, Node: attempt.Node}
	}
	return event
}

// timeOf returns the zero time for nil.
func timeOf(moment *time.Time) time.Time {
	if moment == nil {
		return time.Time{}
	}
	return *moment
}

// RetryOptions change a retry. The zero value is the default.
type RetryOptions struct {
	Reset  bool // clear the failed attempts, so that the events are tried as often as new ones
	DryRun bool // only count
}

// RetryWaiting makes the failed events that match due now, and returns their number. Events that wait for another reason are sent when the obstacle is gone, and are not changed.
func (o *Operator) RetryWaiting(ctx context.Context, filter WaitingFilter, options RetryOptions) (int64, error) {
	const doing = "retry waiting events"
	use, err := o.prepare(ctx)
	if err != nil {
		return 0, explain(doing, err)
	}
	outcome, err := use.Waiting().Retry(ctx, filter.toAdmin(), admin.Attempts(options.Reset), admin.Effect(options.DryRun))
	if options.DryRun {
		return outcome.Failed, explain(doing, err)
	}
	return outcome.Done, explain(doing, err)
}
