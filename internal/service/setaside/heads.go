package setaside

import (
	"context"
	"maps"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// Heads returns the queues of places: see Store. It is one statement for all of them.
func (s *Collection) Heads(ctx context.Context, places []Place) (heads []Head, err error) {
	if len(places) == 0 {
		return nil, nil
	}
	err = s.afterCommitted(ctx, func(ctx context.Context) (err error) {
		heads, err = s.readHeads(ctx, places)
		return err
	})
	return heads, err
}

func (s *Collection) readHeads(ctx context.Context, places []Place) (heads []Head, err error) {
	// The index `queues` has this order, so the server does not sort in memory.
	order := append(bson.D{{Key: "h", Value: 1}, {Key: "t", Value: 1}, {Key: "p", Value: 1}, {Key: "q", Value: 1}}, queueOrder...)
	type head struct {
		Queue Queue  `bson:"_id"`
		Wait  *int64 `bson:"wait"` // milliseconds; nil while the first message is untried
	}
	docs, err := aggregate[head](ctx, s, "reading the queues of messages that are set aside", mongo.Pipeline{
		{{Key: "$match", Value: bson.D{
			{Key: "h", Value: isAny(places, func(place Place) string { return place.Handler })},
			{Key: "t", Value: isAny(places, func(place Place) string { return place.Topic })},
			{Key: "p", Value: isAny(places, func(place Place) int32 { return place.Partition })},
		}}},
		{{Key: "$sort", Value: order}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: queueID},
			{Key: "due", Value: bson.D{{Key: "$first", Value: "$due"}}},
		}}},
		{{Key: "$project", Value: bson.D{{Key: "wait", Value: bson.D{{Key: "$subtract", Value: bson.A{"$due", "$$NOW"}}}}}}},
	})

	wanted := map[Place]bool{}
	for _, place := range places {
		wanted[place] = true
	}
	for _, d := range docs {
		head := Head{Queue: d.Queue}
		if d.Wait != nil {
			head.Wait = max(0, time.Duration(*d.Wait)*time.Millisecond)
		}
		// Another member may read the partition of that number in one of the topics.
		if wanted[head.Place] {
			heads = append(heads, head)
		}
	}
	return heads, err
}

// isAny returns a condition for the values of a field of the places.
func isAny[T comparable](places []Place, field func(place Place) T) bson.D {
	values := map[T]bool{}
	for _, place := range places {
		values[field(place)] = true
	}
	return bson.D{{Key: "$in", Value: slices.Collect(maps.Keys(values))}}
}
