package operate

import (
	"context"
	"iter"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// MessageFilter selects messages that handlers retry. A message matches if it fulfills all conditions that are set. An empty
// list of ids that is not nil selects nothing.
type MessageFilter struct {
	Database string // of a service
	Group    string // the consumer group
	Handler  string // the name of the handler
	Topic    string
	Key      string   // of the record
	Reason   string   // beginning of the reason of a failure
	IDs      []string // of messages, or places as topic/partition@offset
	All      bool     // permits an action without any condition
}

func (f MessageFilter) toAdmin() admin.HandlerWaitingFilter {
	return admin.HandlerWaitingFilter{
		Database: f.Database, Group: f.Group, Handler: f.Handler, Topic: f.Topic, Key: f.Key, Reason: f.Reason, IDs: f.IDs, All: f.All,
	}
}

// RetriedMessage is a message that a handler retries, or that follows such a message of its key.
type RetriedMessage struct {
	Database       string // of the service
	Group, Handler string
	Place          string // topic/partition@offset
	ID             string // of the message
	Type           string // name of the event
	Key            string // of the record
	AsideAt        time.Time
	Attempts       int       // failed attempts; 0 if it follows an earlier message of its key, untried
	Class          string    // of the last failure
	Reason         string    // of the last failure
	NextAt         time.Time // the next attempt; zero if it follows an earlier message of its key
	RequestedAt    time.Time // of a retry or a discard that no member has carried out yet; zero if there is none
}

// Retried returns the messages that handlers retry, without payloads, by database, handler, topic, partition and key. Messages
// in retry topics are in Kafka, and are not listed.
func (o *Operator) Retried(ctx context.Context, filter MessageFilter) iter.Seq2[RetriedMessage, error] {
	read := func(use admin.Operator, after string) ([]admin.HandlerMessage, string, error) {
		page, err := use.HandlerWaiting().List(ctx, filter.toAdmin(), admin.MaxPage, after)
		return page.Items, page.Next, err
	}
	return listAll(ctx, o, "list the messages that handlers retry", read, func(stored *admin.HandlerMessage) RetriedMessage {
		return RetriedMessage{
			Database: stored.Database, Group: stored.Group, Handler: stored.Handler, Place: stored.Place, ID: stored.ID, Type: stored.Type,
			Key: stored.Key, AsideAt: stored.AsideAt, Attempts: stored.Attempts, Class: stored.Class, Reason: stored.Reason,
			NextAt: timeOf(stored.NextAt), RequestedAt: timeOf(stored.RequestedAt),
		}
	})
}

// RetryMessages makes the matching messages due now, and returns their number. A member of the group tries them within about two
// seconds. It returns [ErrInvalid] for a filter without a condition, unless All is set.
func (o *Operator) RetryMessages(ctx context.Context, filter MessageFilter) (int64, error) {
	const doing = "retry messages"
	use, err := o.prepare(ctx)
	if err != nil {
		return 0, explain(doing, err)
	}
	outcome, err := use.HandlerWaiting().Retry(ctx, filter.toAdmin(), admin.ForReal)
	return outcome.Retried, explain(doing, err)
}

// DiscardMessages makes the matching messages dead letters without another attempt, and returns their number. A member of the
// group does so within about two seconds. It returns [ErrInvalid] for a filter without a condition, unless All is set.
func (o *Operator) DiscardMessages(ctx context.Context, filter MessageFilter) (int64, error) {
	const doing = "discard messages"
	use, err := o.prepare(ctx)
	if err != nil {
		return 0, explain(doing, err)
	}
	outcome, err := use.HandlerWaiting().Discard(ctx, filter.toAdmin(), admin.ForReal)
	return outcome.Discarded, explain(doing, err)
}
