package mongostore

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb/cursor"
	"github.com/outrelay/outrelay/internal/service/inbox"
)

// A watermark is the document {_id: {c, t, p, l}, g, n, e, at, by, id}. The _id contains consumer,
// topic, partition and lane. The fields are those of inbox.Mark, and the time of the last change.

// markID returns the _id of the watermark.
func markID(lane inbox.LaneKey) bson.D {
	return bson.D{
		{Key: "c", Value: lane.Consumer},
		{Key: "t", Value: lane.Topic},
		{Key: "p", Value: lane.Number},
		{Key: "l", Value: lane.Lane},
	}
}

// storedMark is the document of a watermark.
type storedMark struct {
	ID struct {
		Consumer  string `bson:"c"`
		Topic     string `bson:"t"`
		Partition int32  `bson:"p"`
		Lane      int32  `bson:"l"`
	} `bson:"_id"`
	Mark inbox.Mark `bson:",inline"`
	At   time.Time  `bson:"at"`
}

// lane is the inverse of markID.
func (d storedMark) lane() inbox.LaneKey {
	return inbox.LaneKey{
		Partition: inbox.Partition{Consumer: d.ID.Consumer, Topic: d.ID.Topic, Number: d.ID.Partition},
		Lane:      d.ID.Lane,
	}
}

// findMarks returns the watermarks that match the filter.
func (s *Store) findMarks(ctx context.Context, filter bson.D) ([]storedMark, error) {
	cur, err := cursor.Find(ctx, s.offsets, filter)
	return cursor.All[storedMark](ctx, "reading watermarks", cur, err)
}

// ReadMarks returns the stored watermarks of the lanes.
func (s *Store) ReadMarks(ctx context.Context, lanes []inbox.LaneKey) (inbox.Marks, error) {
	ids := make(bson.A, len(lanes))
	for i, l := range lanes {
		ids[i] = markID(l)
	}

	docs, err := s.findMarks(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}})
	if err != nil {
		return nil, err
	}

	found := make(inbox.Marks, len(docs))
	for _, d := range docs {
		found[d.lane()] = d.Mark
	}
	return found, nil
}

// AdvanceMarks writes the moves with one command.
func (s *Store) AdvanceMarks(ctx context.Context, moves []inbox.Move) error {
	models := make([]mongo.WriteModel, len(moves))
	for i, m := range moves {
		models[i] = mongo.NewUpdateOneModel().
			SetFilter(bson.D{{Key: "_id", Value: markID(m.LaneKey)}}).
			SetUpdate(advanceUpdate(m.Mark)).
			SetUpsert(true)
	}

	if _, err := s.offsets.BulkWrite(ctx, models, options.BulkWrite().SetOrdered(true)); err != nil {
		return fmt.Errorf("moving watermarks: %w", err)
	}
	return nil
}

// advanceUpdate returns the update that replaces a stored watermark by the result of its method Advance(mark).
func advanceUpdate(mark inbox.Mark) bson.A {
	apply := func(operator string, operands ...any) bson.D { return bson.D{{Key: operator, Value: bson.A(operands)}} }
	stored := apply("$ifNull", "$g", int64(-1))
	isSame := apply("$eq", stored, mark.Generation)
	isCovered := apply("$and", isSame, apply("$lte", mark.Next, "$n"), apply("$or", apply("$lte", mark.Epoch, "$e"), apply("$lt", "$e", 0)))
	keepsEpoch := apply("$and", isSame, mark.Epoch < 0)

	next := bson.D{
		{Key: "_id", Value: "$_id"},
		{Key: "g", Value: mark.Generation},
		{Key: "n", Value: mark.Next},
		{Key: "e", Value: apply("$cond", keepsEpoch, "$e", mark.Epoch)},
		{Key: "at", Value: "$$NOW"},
	}
	isKept := apply("$or", apply("$gt", stored, mark.Generation), isCovered)
	return bson.A{bson.D{{Key: "$replaceWith", Value: apply("$cond", isKept, "$$ROOT", next)}}}
}

// byValue returns the value of the field by. Null stands for no tenure, and also matches a missing
// field.
func byValue(mark inbox.Mark) any {
	if mark.By == "" {
		return nil
	}
	return mark.By
}

// WriteGeneration writes the watermark of the partition if it is still seen, or if it still does not
// exist and seen is nil. ok reports whether it did.
func (s *Store) WriteGeneration(ctx context.Context, partition inbox.Partition, seen *inbox.Mark, next inbox.Mark) (ok bool, err error) {
	id := bson.E{Key: "_id", Value: markID(inbox.LaneKey{Partition: partition, Lane: inbox.PartitionLane})}
	// A document without g was created by a lane before the partition had a generation.
	filter := bson.D{id, {Key: "g", Value: bson.D{{Key: "$exists", Value: false}}}}
	if seen != nil {
		filter = bson.D{id, {Key: "g", Value: seen.Generation}, {Key: "by", Value: byValue(*seen)}}
	}

	set := bson.D{
		{Key: "g", Value: next.Generation},
		{Key: "e", Value: next.Epoch},
		{Key: "id", Value: next.ID},
		{Key: "by", Value: byValue(next)},
		{Key: "at", Value: "$$NOW"},
	}
	update := bson.A{bson.D{{Key: "$set", Value: set}}}
	res, err := s.offsets.UpdateOne(ctx, filter, update, options.UpdateOne().SetUpsert(true))
	// Another process has written the first generation at the same time.
	if mongo.IsDuplicateKeyError(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("writing the generation of partition %d of %s: %w", partition.Number, partition.Topic, err)
	}

	return res.MatchedCount+res.UpsertedCount == 1, nil
}

// WriteTopicIDs writes the ids into the watermarks of inbox.TopicLane.
func (s *Store) WriteTopicIDs(ctx context.Context, ids map[inbox.Partition]string) error {
	models := make([]mongo.WriteModel, 0, len(ids))
	for p, id := range ids {
		// The driver repeats no update of many documents: see Heartbeat.
		models = append(models, mongo.NewUpdateManyModel().
			SetFilter(bson.D{{Key: "_id", Value: markID(inbox.LaneKey{Partition: p, Lane: inbox.TopicLane})}}).
			SetUpdate(bson.A{bson.D{{Key: "$set", Value: bson.D{{Key: "id", Value: id}, {Key: "at", Value: "$$NOW"}}}}}).
			SetUpsert(true))
	}

	if _, err := s.offsets.BulkWrite(ctx, models, options.BulkWrite().SetOrdered(false)); err != nil {
		return fmt.Errorf("storing the ids of topics: %w", err)
	}
	return nil
}

// Watermark is the progress of one consumer in one lane.
type Watermark struct {
	// Lane is the lane, and Mark its watermark.
	Lane inbox.LaneKey
	Mark inbox.Mark

	// Current reports whether the generation is the current one. Other watermarks have no effect.
	Current bool

	// At is the time of the last change, by the server's clock.
	At time.Time
}

// Watermarks returns the watermarks of all consumers, in no particular order. It reads all documents at
// once.
func (s *Store) Watermarks(ctx context.Context) ([]Watermark, error) {
	docs, err := s.findMarks(ctx, bson.D{})
	if err != nil {
		return nil, err
	}

	current := make(map[inbox.Partition]int64)
	for _, d := range docs {
		partition := d.lane().Partition
		current[partition] = max(current[partition], d.Mark.Generation)
	}

	all := make([]Watermark, 0, len(docs))
	for _, d := range docs {
		lane := d.lane()
		if lane.Lane >= 0 {
			all = append(all, Watermark{Lane: lane, Mark: d.Mark, Current: d.Mark.Generation == current[lane.Partition], At: d.At})
		}
	}
	return all, nil
}

// Forget deletes the watermarks of a consumer and returns the number of documents. If topic is not
// empty, it deletes only those of this topic. Watermarks are never deleted otherwise, so call
// Forget for a consumer or a topic that no longer exists. If such a consumer receives a record
// again, only a marker can reject it.
func (s *Store) Forget(ctx context.Context, consumer, topic string) (removed int64, err error) {
	if consumer == "" {
		return 0, fmt.Errorf("forgetting watermarks: %w: the consumer is empty", inbox.ErrInvalid)
	}

	filter := bson.D{{Key: "_id.c", Value: consumer}}
	if topic != "" {
		filter = append(filter, bson.E{Key: "_id.t", Value: topic})
	}

	res, err := s.offsets.DeleteMany(ctx, filter)
	if err != nil {
		return 0, fmt.Errorf("forgetting watermarks of %s: %w", consumer, err)
	}

	return res.DeletedCount, nil
}
