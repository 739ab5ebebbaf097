package setaside

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/cursor"
)

// stopsExpiry is how long the record of a member that was killed is valid.
const stopsExpiry = 30 * time.Second

// Stop describes a handler of a member that takes no messages.
type Stop struct {
	Handler string    `bson:"h"`           // its name; "" for the whole consumer, by Consumer.Pause
	Until   time.Time `bson:"u,omitempty"` // of the next attempt; zero if a program has paused the handler
	Reason  string    `bson:"r,omitempty"` // the last failure
}

// memberStops is the record of a member.
type memberStops struct {
	At   time.Time `bson:"at"`
	List []Stop    `bson:"list"`
}

// ReportStops records which handlers of a member are suspended or paused: see Store.
func (s *Collection) ReportStops(ctx context.Context, group, member string, stops []Stop) error {
	field := "stops." + member
	change := mongo.Pipeline{{{Key: "$unset", Value: field}}}
	if len(stops) > 0 {
		change = mongo.Pipeline{{{Key: "$set", Value: bson.D{{Key: field, Value: bson.D{
			{Key: "at", Value: "$$NOW"}, {Key: "list", Value: mongodb.Literal(stops)},
		}}}}}}
	}
	if _, err := s.counts.UpdateOne(ctx, bson.D{{Key: "_id", Value: group}}, change); err != nil {
		return fmt.Errorf("recording the suspended handlers of group %s: %w", group, err)
	}
	return nil
}

// freshStops returns the field stops without the records of members that were killed, for an update by pipeline.
func freshStops() bson.D {
	isFresh := bson.D{{Key: "$gte", Value: bson.A{"$$this.v.at", afterNow(-stopsExpiry)}}}
	all := bson.D{{Key: "$objectToArray", Value: mongodb.IfNull("$stops", bson.D{})}}
	return bson.D{{Key: "$arrayToObject", Value: bson.D{
		{Key: "$filter", Value: bson.D{{Key: "input", Value: all}, {Key: "cond", Value: isFresh}}},
	}}}
}

// GroupNote describes a consumer group of a database, by the records of its members.
type GroupNote struct {
	Group  string
	At     time.Time // when a member counted the messages last; a member that runs does so every CensusInterval
	Now    time.Time // by the server's clock
	Counts []Count
	Stops  []Stop // one for each member that has stopped a handler
}

// Groups returns what the members of all groups of the database have recorded, by the name of the group, or for the named group alone.
func (d *Desk) Groups(ctx context.Context, only string) ([]GroupNote, error) {
	match := bson.D{}
	if only != "" {
		match = bson.D{{Key: "_id", Value: only}}
	}
	cur, err := cursor.Aggregate(ctx, d.counts, mongo.Pipeline{
		{{Key: "$match", Value: match}},
		{{Key: "$sort", Value: bson.D{{Key: "_id", Value: 1}}}},
		{{Key: "$set", Value: bson.D{{Key: "now", Value: "$$NOW"}}}},
	})
	type note struct {
		Group  string                 `bson:"_id"`
		At     time.Time              `bson:"at"`
		Now    time.Time              `bson:"now"`
		Counts []Count                `bson:"counts"`
		Stops  map[string]memberStops `bson:"stops"`
	}
	docs, err := cursor.All[note](ctx, "reading the consumer groups of "+d.counts.Database().Name(), cur, err)
	if err != nil {
		return nil, err
	}

	notes := make([]GroupNote, len(docs))
	for i := range docs {
		doc := &docs[i]
		notes[i] = GroupNote{Group: doc.Group, At: doc.At, Now: doc.Now, Counts: doc.Counts}
		for _, member := range doc.Stops {
			if doc.Now.Sub(member.At) <= stopsExpiry {
				notes[i].Stops = append(notes[i].Stops, member.List...)
			}
		}
	}
	return notes, nil
}
