package inbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// Exists says whether there is a marker that the message was handled. It joins a transaction that is in ctx. It knows
// nothing of watermarks: Check does.
func (x *Inbox) Exists(ctx context.Context, k Key) (bool, error) {
	e := Entry{Key: k}
	if err := e.validate(); err != nil {
		return false, err
	}
	id, err := x.identity(e, 0)
	if err != nil {
		return false, err
	}
	var there bool
	err = x.join(ctx, func(ctx context.Context) error {
		err := x.markers.FindOne(ctx, bson.D{{Key: "_id", Value: id}, {Key: "s", Value: stateHandled}},
			options.FindOne().SetProjection(bson.D{{Key: "_id", Value: 1}})).Err()
		if there = err == nil; errors.Is(err, mongo.ErrNoDocuments) {
			return nil
		}
		return err
	})
	if err != nil {
		return false, fmt.Errorf("looking for %s: %w", k, err)
	}
	return there, nil
}

// Counts are the sizes of the inbox.
type Counts struct {
	Markers int64 // handled and claimed, from the collection's metadata: near enough after a crash, and free
	Claimed int64 // messages that somebody holds, or held until the lease ran out
	Expired int64 // of those, the ones whose lease is over
}

// Counts counts. It costs as much as there are claims.
func (x *Inbox) Counts(ctx context.Context) (Counts, error) {
	var c Counts
	var errs [3]error
	c.Markers, errs[0] = x.markers.EstimatedDocumentCount(ctx)
	c.Claimed, errs[1] = x.claims.CountDocuments(ctx, bson.D{})
	c.Expired, errs[2] = x.claims.CountDocuments(ctx, over("until"))
	if err := errors.Join(errs[:]...); err != nil {
		return Counts{}, fmt.Errorf("counting: %w", err)
	}
	return c, nil
}

// over matches documents whose date in that field is past by the server's clock.
func over(field string) bson.D {
	return bson.D{{Key: "$expr", Value: bson.D{{Key: "$lte", Value: bson.A{"$" + field, "$$NOW"}}}}}
}

// Watermark is how far one consumer is in one lane.
type Watermark struct {
	Consumer   string
	Place      Place // Offset is the first that was not dealt with
	Generation int64
	Current    bool // whether that is the partition's current generation, which is the only one that counts
	At         time.Time
}

// Watermarks lists those of a consumer, or of all if it is empty, in no particular order. It reads all that there are.
func (x *Inbox) Watermarks(ctx context.Context, consumer string) ([]Watermark, error) {
	filter := bson.D{}
	if consumer != "" {
		filter = bson.D{{Key: "_id.c", Value: consumer}}
	}
	cur, err := x.offsets.Find(ctx, filter)
	if err != nil {
		return nil, fmt.Errorf("listing watermarks: %w", err)
	}
	var docs []struct {
		ID   bson.Raw  `bson:"_id"`
		Mark mark      `bson:",inline"`
		At   time.Time `bson:"at"`
	}
	if err := cur.All(ctx, &docs); err != nil {
		return nil, fmt.Errorf("listing watermarks: %w", err)
	}
	current := make(map[partition]int64)
	all := make([]Watermark, 0, len(docs))
	for _, d := range docs {
		l, err := parseLane(d.ID)
		if err != nil {
			return nil, err
		}
		current[l.partition] = max(current[l.partition], d.Mark.Generation)
		if l.lane == partitionLane {
			continue
		}
		all = append(all, Watermark{
			Consumer: l.consumer, Generation: d.Mark.Generation, At: d.At,
			Place: Place{Topic: l.topic, Partition: l.partition.partition, Lane: l.lane, Offset: d.Mark.Next, LeaderEpoch: d.Mark.Epoch},
		})
	}
	for i, w := range all {
		all[i].Current = w.Generation == current[partition{w.Consumer, w.Place.Topic, w.Place.Partition}]
	}
	return all, nil
}

// Forget removes the watermarks of a consumer, of one topic or, if that is "", of all, and says how many documents. They are
// kept for ever otherwise: call it for a consumer or a topic that is no more. A record that such a consumer gets again is
// refused only while its marker is kept.
func (x *Inbox) Forget(ctx context.Context, consumer, topic string) (removed int64, err error) {
	if consumer == "" {
		return 0, fmt.Errorf("forgetting watermarks: %w: the consumer is empty", ErrInvalid)
	}
	filter := bson.D{{Key: "_id.c", Value: consumer}}
	if topic != "" {
		filter = append(filter, bson.E{Key: "_id.t", Value: topic})
	}
	res, err := x.offsets.DeleteMany(ctx, filter)
	if err != nil {
		return 0, fmt.Errorf("forgetting watermarks of %s: %w", consumer, err)
	}
	return res.DeletedCount, nil
}

// Limits bound one Sweep. A zero is the default.
type Limits struct {
	PerStatement int // default 5,000
	Statements   int // default 20
}

// Sweep removes markers whose retention is over by the server's clock, the oldest first, and says how many, and whether
// there may be more. It is what the TTL index does, on demand and within limits.
func (x *Inbox) Sweep(ctx context.Context, l Limits) (removed int64, more bool, err error) {
	if l.PerStatement < 0 || l.Statements < 0 {
		return 0, false, fmt.Errorf("sweeping: %w: negative limits", ErrInvalid)
	}
	if l.PerStatement == 0 {
		l.PerStatement = 5000
	}
	if l.Statements == 0 {
		l.Statements = 20
	}
	for range l.Statements {
		n, full, err := x.sweep(ctx, l.PerStatement)
		removed += n
		if err != nil {
			return removed, true, fmt.Errorf("sweeping: %w", err)
		}
		if !full {
			return removed, false, nil
		}
	}
	return removed, true, nil
}

// sweep removes at most limit; full says that it found as many.
func (x *Inbox) sweep(ctx context.Context, limit int) (removed int64, full bool, err error) {
	find := options.Find().SetSort(bson.D{{Key: "k", Value: 1}}).SetLimit(int64(limit)).SetProjection(bson.D{{Key: "_id", Value: 1}})
	cur, err := x.markers.Find(ctx, over("k"), find)
	if err != nil {
		return 0, false, err
	}
	var docs []struct {
		ID bson.Raw `bson:"_id"`
	}
	if err := cur.All(ctx, &docs); err != nil || len(docs) == 0 {
		return 0, false, err
	}
	ids := make(bson.A, len(docs))
	for i, d := range docs {
		ids[i] = d.ID
	}
	// Asked once more: a claim that was taken since has a new date.
	res, err := x.markers.DeleteMany(ctx, append(bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}, over("k")...))
	if err != nil {
		return 0, false, err
	}
	return res.DeletedCount, len(docs) == limit, nil
}
