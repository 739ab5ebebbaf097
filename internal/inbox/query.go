package inbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// Exists reports whether there is a marker for a handled message. It ignores watermarks, unlike
// Check. If ctx has a transaction, Exists joins it.
func (x *Inbox) Exists(ctx context.Context, k Key) (bool, error) {
	e := Entry{Key: k}
	if err := e.validateEntry(); err != nil {
		return false, err
	}

	id, err := x.markerID(e, 0)
	if err != nil {
		return false, err
	}

	var found bool
	err = x.joinTransaction(ctx, func(ctx context.Context) error {
		filter := bson.D{{Key: "_id", Value: id}, {Key: "s", Value: stateHandled}}
		projection := bson.D{{Key: "_id", Value: 1}}
		err := x.markers.FindOne(ctx, filter, options.FindOne().SetProjection(projection)).Err()
		found = err == nil
		if errors.Is(err, mongo.ErrNoDocuments) {
			return nil
		}
		return err
	})
	if err != nil {
		return false, fmt.Errorf("looking for %s: %w", k, err)
	}

	return found, nil
}

// Counts contains the sizes of the inbox.
type Counts struct {
	// Markers is the number of handled and claimed messages. It comes from the metadata of the
	// collection, so it costs nothing, but may be inaccurate after a crash of the server.
	Markers int64

	// Claimed is the number of claims, including expired ones.
	Claimed int64

	// Expired is the number of claims whose lease has expired.
	Expired int64
}

// Counts returns the sizes of the inbox. Its cost grows with the number of claims.
func (x *Inbox) Counts(ctx context.Context) (Counts, error) {
	var c Counts
	var errs [3]error
	c.Markers, errs[0] = x.markers.EstimatedDocumentCount(ctx)
	c.Claimed, errs[1] = x.claims.CountDocuments(ctx, bson.D{})
	c.Expired, errs[2] = x.claims.CountDocuments(ctx, expiredFilter("until"))
	if err := errors.Join(errs[:]...); err != nil {
		return Counts{}, fmt.Errorf("counting: %w", err)
	}
	return c, nil
}

// expiredFilter returns a filter for documents whose date in the field is in the past, by the
// server's clock.
func expiredFilter(field string) bson.D {
	return bson.D{{Key: "$expr", Value: bson.D{{Key: "$lte", Value: bson.A{"$" + field, "$$NOW"}}}}}
}

// Watermark is the progress of one consumer in one lane.
type Watermark struct {
	// Consumer is the name of the consumer.
	Consumer string

	// Place is the place of the lane. Its Offset is the first one that was not handled.
	Place Place

	// Generation is the generation of the partition.
	Generation int64

	// Current reports whether Generation is the current one. Other watermarks have no effect.
	Current bool

	// At is the time of the last change, by the server's clock.
	At time.Time
}

// Watermarks returns the watermarks of a consumer, or of all consumers if consumer is empty, in no
// particular order. It reads all documents at once.
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
			Consumer:   l.consumer,
			Generation: d.Mark.Generation,
			At:         d.At,
			Place: Place{
				Topic:       l.topic,
				Partition:   l.partition.partition,
				Lane:        l.lane,
				Offset:      d.Mark.Next,
				LeaderEpoch: d.Mark.Epoch,
			},
		})
	}

	// Only now the current generation of each partition is known.
	for i, w := range all {
		all[i].Current = w.Generation == current[partition{w.Consumer, w.Place.Topic, w.Place.Partition}]
	}

	return all, nil
}

// Forget deletes the watermarks of a consumer and returns the number of documents. If topic is not
// empty, it deletes only those of this topic. Watermarks are never deleted otherwise, so call
// Forget for a consumer or a topic that no longer exists. If such a consumer receives a record
// again, only a marker can reject it.
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

// Limits of Sweep.
const (
	defaultSweep = 100_000
	sweepBatch   = 5_000 // markers that one statement deletes
)

// Sweep deletes markers whose retention is over by the server's clock, the oldest first and at most
// limit, and returns their number. A limit of 0 means 100,000. It does the work of the TTL index on
// demand and within limits.
func (x *Inbox) Sweep(ctx context.Context, limit int) (removed int64, err error) {
	if limit < 0 {
		return 0, fmt.Errorf("sweeping: %w: negative limit", ErrInvalid)
	}

	for left := cmp.Or(limit, defaultSweep); left > 0; left -= sweepBatch {
		n, full, err := x.sweepOnce(ctx, min(left, sweepBatch))
		removed += n
		if err != nil {
			return removed, fmt.Errorf("sweeping: %w", err)
		}
		if !full {
			break
		}
	}

	return removed, nil
}

// sweepOnce deletes at most limit markers. full reports whether it found that many.
func (x *Inbox) sweepOnce(ctx context.Context, limit int) (removed int64, full bool, err error) {
	find := options.Find().
		SetSort(bson.D{{Key: "k", Value: 1}}).
		SetLimit(int64(limit)).
		SetProjection(bson.D{{Key: "_id", Value: 1}})

	// A deletion has no limit, so the ids are read first.
	cur, err := x.markers.Find(ctx, expiredFilter("k"), find)
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

	// The condition is checked again, because a message that was claimed in the meantime has a new
	// date.
	filter := append(bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}, expiredFilter("k")...)
	res, err := x.markers.DeleteMany(ctx, filter)
	if err != nil {
		return 0, false, err
	}

	return res.DeletedCount, len(docs) == limit, nil
}
