package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/event"
)

// Schedule appends the event to be delivered at that time by the server's clock, to the millisecond; a time that is past
// means at once. It returns the event's id, for Cancel and Reschedule. Like Append it needs a transaction and returns the
// same errors.
//
// A scheduled event has no place in the order of its key: it is delivered when it is due.
func (b *Box) Schedule(ctx context.Context, ev event.Event, at time.Time, opts ...CallOption) (event.ID, error) {
	if err := b.AppendMany(ctx, []event.Event{ev.With(event.WithDueAt(at))}, opts...); err != nil {
		return event.ID{}, err
	}
	return ev.ID(), nil
}

// Cancel takes a scheduled event back. ErrNotScheduled says that it cannot be had any more. It joins a transaction that
// is in ctx and needs none; outside of one it returns when a majority has it.
func (b *Box) Cancel(ctx context.Context, id event.ID, opts ...CallOption) error {
	ctx = call(ctx, opts)
	filter, err := unclaimed(ctx, id)
	if err != nil {
		return fmt.Errorf("cancelling event %s: %w", id, err)
	}
	res, err := b.coll.DeleteOne(ctx, filter)
	if err != nil {
		unitOf(ctx).doom(err)
	} else if res.DeletedCount == 0 {
		err = ErrNotScheduled
	}
	if err != nil {
		return fmt.Errorf("cancelling event %s: %w", id, err)
	}
	return nil
}

// Reschedule moves a scheduled event to another time, otherwise as Cancel. An event that has expired by then will not be
// delivered: its expiry stays as it is.
func (b *Box) Reschedule(ctx context.Context, id event.ID, at time.Time, opts ...CallOption) error {
	ctx = call(ctx, opts)
	filter, err := unclaimed(ctx, id)
	if err == nil && (at.Year() < 1970 || at.Year() > 9999) {
		err = fmt.Errorf("the year %d; 1970 to 9999 is allowed", at.Year())
	}
	if err != nil {
		return fmt.Errorf("rescheduling event %s: %w", id, err)
	}
	set := bson.D{{Key: "$set", Value: bson.D{{Key: "dueAt", Value: bson.NewDateTimeFromTime(at)}}}}
	res, err := b.coll.UpdateOne(ctx, filter, set)
	if err != nil {
		unitOf(ctx).doom(err)
	} else if res.MatchedCount == 0 {
		err = ErrNotScheduled
	}
	if err != nil {
		return fmt.Errorf("rescheduling event %s: %w", id, err)
	}
	return nil
}

// unclaimed matches the scheduled envelope as long as no watcher has taken it to send: a claim, or a state that a claim or
// a failed attempt left, means that a record may be in Kafka already. N19
func unclaimed(ctx context.Context, id event.ID) (bson.D, error) {
	if id.IsZero() {
		return nil, errors.New("the id is zero")
	}
	if err := unitOf(ctx).err(); err != nil {
		return nil, err
	}
	return bson.D{
		{Key: "_id", Value: id},
		{Key: "dueAt", Value: bson.D{{Key: "$type", Value: "date"}}},
		{Key: "claim", Value: nil},
		{Key: "state", Value: nil},
	}, nil
}
