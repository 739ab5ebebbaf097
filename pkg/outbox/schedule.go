package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/transaction"
	"github.com/outrelay/outrelay/pkg/event"
)

// Schedule appends the event for delivery at the time at, which has millisecond precision and
// refers to the server's clock. If at is in the past, the event is delivered at once. Schedule
// returns the id of the event, for Cancel and Reschedule. Like Append, it needs a transaction and
// returns the same errors.
//
// A scheduled event is not ordered with the other events of its key. It is delivered when it is
// due.
func (b *Box) Schedule(ctx context.Context, ev event.Event, at time.Time) (event.ID, error) {
	if err := b.AppendMany(ctx, []event.Event{ev.With(event.WithDueAt(at))}); err != nil {
		return event.ID{}, err
	}
	return ev.ID(), nil
}

// Cancel removes a scheduled event. It returns ErrNotScheduled if the event does not wait any more.
// If ctx has a transaction, Cancel joins it. Otherwise it returns after a majority has stored the
// change.
func (b *Box) Cancel(ctx context.Context, id event.ID) error {
	filter, err := unclaimedFilter(ctx, id)
	if err != nil {
		return fmt.Errorf("canceling event %s: %w", id, err)
	}

	res, err := b.coll.DeleteOne(ctx, filter)
	if err != nil {
		transaction.SetRollbackOnly(ctx, err)
	} else if res.DeletedCount == 0 {
		err = ErrNotScheduled
	}
	if err != nil {
		return fmt.Errorf("canceling event %s: %w", id, err)
	}
	return nil
}

// Reschedule moves a scheduled event to the time at, whose year must be between 1970 and 9999. It
// returns the same errors as Cancel and treats transactions in the same way. The expiry of the
// event does not change: an event that has expired at its new due time is not delivered.
func (b *Box) Reschedule(ctx context.Context, id event.ID, at time.Time) error {
	filter, err := unclaimedFilter(ctx, id)
	if err == nil && (at.Year() < 1970 || at.Year() > 9999) {
		err = fmt.Errorf("invalid year %d: it must be between 1970 and 9999", at.Year())
	}
	if err != nil {
		return fmt.Errorf("rescheduling event %s: %w", id, err)
	}

	set := bson.D{{Key: "$set", Value: bson.D{{Key: "dueAt", Value: bson.NewDateTimeFromTime(at)}}}}
	res, err := b.coll.UpdateOne(ctx, filter, set)
	if err != nil {
		transaction.SetRollbackOnly(ctx, err)
	} else if res.MatchedCount == 0 {
		err = ErrNotScheduled
	}
	if err != nil {
		return fmt.Errorf("rescheduling event %s: %w", id, err)
	}
	return nil
}

// unclaimedFilter returns a filter for the scheduled envelope id that matches only while no watcher
// has claimed it. A claim, or a state that a claim or a failed attempt has set, means that a record
// may be in Kafka already. N19
func unclaimedFilter(ctx context.Context, id event.ID) (bson.D, error) {
	if id.IsZero() {
		return nil, errors.New("the id is zero")
	}
	if err := transaction.CheckOptional(ctx); err != nil {
		return nil, err
	}

	return bson.D{
		{Key: "_id", Value: id},
		{Key: "dueAt", Value: bson.D{{Key: "$type", Value: "date"}}},
		{Key: "claim", Value: nil},
		{Key: "state", Value: nil},
	}, nil
}
