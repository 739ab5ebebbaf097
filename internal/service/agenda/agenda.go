// Package agenda reads and changes the scheduled events of an outbox: the documents with a due time. A claim takes an event out of
// the outbox, or turns its due time into another field, so no function finds a claimed event. Services use it through an
// outbox.Box, operators directly.
//
// The functions run in the transaction of their context, if it has one. They expect a collection with majority
// concerns on the primary.
package agenda

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/pkg/event"
)

// Query selects scheduled events. An event must match all conditions that are set. See outbox.ScheduledQuery.
type Query struct {
	IDs           []event.ID
	Name          string
	AggregateType string
	From, Before  time.Time
	Mapping       *envelope.Mapping // reads the documents; nil: they are envelopes of the contract
}

// IsEmpty reports whether no condition is set. A list of ids without elements is a condition.
func (q Query) IsEmpty() bool {
	return q.IDs == nil && q.Name == "" && q.AggregateType == "" && q.From.IsZero() && q.Before.IsZero()
}

// buildFilter returns a filter for the events that q selects. It fails if an id is zero. N19
func (q Query) buildFilter() (bson.D, error) {
	var window bson.D
	if !q.From.IsZero() {
		window = append(window, bson.E{Key: "$gte", Value: bson.NewDateTimeFromTime(q.From)})
	}
	if !q.Before.IsZero() {
		window = append(window, bson.E{Key: "$lt", Value: bson.NewDateTimeFromTime(q.Before)})
	}

	document := bson.D{envelope.Scheduled(window...)}
	// An empty list of ids selects nothing, and nil selects by the other conditions.
	if q.IDs != nil {
		for _, id := range q.IDs {
			if id.IsZero() {
				return nil, errors.New("an id is zero")
			}
		}
		document = append(document, bson.E{Key: "_id", Value: bson.D{{Key: "$in", Value: q.IDs}}})
	}

	if q.Name != "" {
		document = append(document, bson.E{Key: cmp.Or(q.Mapping.Name("type"), "type"), Value: q.Name})
	}
	if q.AggregateType != "" {
		document = append(document, bson.E{Key: cmp.Or(q.Mapping.Name("aggregatetype"), "aggregatetype"), Value: q.AggregateType})
	}

	return document, nil
}

// Cancel removes the event id, and reports whether it was scheduled.
func Cancel(ctx context.Context, coll *mongo.Collection, id event.ID) (bool, error) {
	filter, err := scheduledFilter(id)
	if err != nil {
		return false, err
	}

	res, err := coll.DeleteOne(ctx, filter)
	return err == nil && res.DeletedCount > 0, err
}

// CancelMatching removes the events that query selects and returns their number. Without a transaction each event is
// removed separately, and after an error some of them may be gone.
func CancelMatching(ctx context.Context, coll *mongo.Collection, query Query) (int64, error) {
	filter, err := query.buildFilter()
	if err != nil {
		return 0, err
	}

	res, err := coll.DeleteMany(ctx, filter)
	if err != nil {
		return 0, err
	}
	return res.DeletedCount, nil
}

// Move sets the due time of the event id to dueAt, and reports whether it was scheduled.
func Move(ctx context.Context, coll *mongo.Collection, id event.ID, dueAt time.Time) (bool, error) {
	filter, err := scheduledFilter(id)
	if err == nil {
		err = CheckTime(dueAt)
	}
	if err != nil {
		return false, err
	}

	set := bson.D{{Key: "$set", Value: bson.D{{Key: "dueAt", Value: bson.NewDateTimeFromTime(dueAt)}}}}
	res, err := coll.UpdateOne(ctx, filter, set)
	return err == nil && res.MatchedCount > 0, err
}

// ServerTime returns the time by the clock of the primary, in one round trip. ctx must have no transaction.
func ServerTime(ctx context.Context, db *mongo.Database) (time.Time, error) {
	var response struct {
		Now time.Time `bson:"localTime"`
	}
	primary := options.RunCmd().SetReadPreference(readpref.Primary())
	if err := db.RunCommand(ctx, bson.D{{Key: "hello", Value: 1}}, primary).Decode(&response); err != nil {
		return time.Time{}, fmt.Errorf("reading the server's time: %w", err)
	}
	return response.Now, nil
}

// CheckTime returns an error if no event can be moved to the time dueAt.
func CheckTime(dueAt time.Time) error {
	if dueAt.Year() < 1970 || dueAt.Year() > 9999 {
		return fmt.Errorf("invalid year %d: it must be between 1970 and 9999", dueAt.Year())
	}
	return nil
}

// scheduledFilter returns a filter for the scheduled envelope id, which matches only while no watcher has claimed it. N19
func scheduledFilter(id event.ID) (bson.D, error) {
	if id.IsZero() {
		return nil, errors.New("the id is zero")
	}

	return bson.D{{Key: "_id", Value: id}, envelope.Scheduled()}, nil
}
