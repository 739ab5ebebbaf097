package inbox

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// A watermark is the document {_id: {c, t, p, l}, g, n, e, at, by, id}. The _id contains consumer,
// topic, partition and lane. The fields are generation, offset after the last handled record,
// leader epoch of that record, and time. The document of lane −1 belongs to the partition: its g is
// the current generation, and watermarks of an older one have no effect. So one write begins a
// generation, regardless of the lanes that exist and of concurrent writes. N29
const partitionLane = -1

// partition identifies a partition for a consumer.
type partition struct {
	consumer, topic string
	partition       int32
}

// lane identifies a lane of a partition for a consumer.
type lane struct {
	partition
	lane int32
}

// documentID returns the _id of the watermark.
func (l lane) documentID() bson.D {
	return bson.D{
		{Key: "c", Value: l.consumer},
		{Key: "t", Value: l.topic},
		{Key: "p", Value: l.partition.partition},
		{Key: "l", Value: l.lane},
	}
}

// entryLane returns the lane of an entry, which must have a place.
func entryLane(e Entry) lane {
	return lane{partition{e.Key.Consumer, e.Place.Topic, e.Place.Partition}, e.Place.Lane}
}

// mark is the document of a watermark without its _id.
type mark struct {
	Generation int64 `bson:"g"`
	Next       int64 `bson:"n"`
	Epoch      int32 `bson:"e"`

	// Only the document of a partition has these fields.
	By string `bson:"by"` // the tenure that attached last
	ID string `bson:"id"` // id of the topic of this generation, or "" if unknown
}

// marks contains the stored documents of watermarks.
type marks map[lane]mark

// currentGeneration returns the current generation of a partition. If the document of the partition
// is missing, the documents of the lanes determine it.
func (m marks) currentGeneration(p partition, lanes ...int32) int64 {
	g := m[lane{p, partitionLane}].Generation
	for _, l := range lanes {
		g = max(g, m[lane{p, l}].Generation)
	}
	return g
}

// nextOffset returns the first offset of a lane that was not handled in this generation.
func (m marks) nextOffset(l lane, generation int64) int64 {
	if w, ok := m[l]; ok && w.Generation == generation {
		return w.Next
	}
	return 0
}

// watermarkIDs returns the ids of the documents for the lanes and for their partitions.
func watermarkIDs(lanes map[lane]struct{}) bson.A {
	ids := make(bson.A, 0, len(lanes)+1)
	own := make(map[partition]struct{})
	for l := range lanes {
		ids = append(ids, l.documentID())
		if _, ok := own[l.partition]; !ok {
			own[l.partition] = struct{}{}
			ids = append(ids, lane{l.partition, partitionLane}.documentID())
		}
	}

	return ids
}

// parseLane is the inverse of lane.documentID.
func parseLane(id bson.Raw) (lane, error) {
	var d struct {
		C string `bson:"c"`
		T string `bson:"t"`
		P int32  `bson:"p"`
		L int32  `bson:"l"`
	}
	if err := bson.Unmarshal(id, &d); err != nil {
		return lane{}, fmt.Errorf("reading a watermark's _id: %w", err)
	}

	return lane{partition{d.C, d.T, d.P}, d.L}, nil
}

// readMarks reads the watermarks of the lanes, and the documents of their partitions.
func (x *Inbox) readMarks(ctx context.Context, lanes map[lane]struct{}) (marks, error) {
	found := make(marks, len(lanes))
	if len(lanes) == 0 {
		return found, nil
	}

	cur, err := x.offsets.Find(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: watermarkIDs(lanes)}}}})
	if err != nil {
		return nil, fmt.Errorf("reading watermarks: %w", err)
	}

	var docs []struct {
		ID   bson.Raw `bson:"_id"`
		Mark mark     `bson:",inline"`
	}
	if err := cur.All(ctx, &docs); err != nil {
		return nil, fmt.Errorf("reading watermarks: %w", err)
	}

	for _, d := range docs {
		l, err := parseLane(d.ID)
		if err != nil {
			return nil, err
		}

		found[l] = d.Mark
	}

	return found, nil
}

// move moves the watermark of a lane to at least mark.Next, in that generation.
type move struct {
	lane
	mark
}

// collectMoves returns one move for each lane of the entries.
func collectMoves(list []Entry, m marks) []move {
	to := make(map[lane]mark)
	for _, e := range list {
		if e.Place.Topic == "" {
			continue
		}

		l := entryLane(e)
		w, ok := to[l]
		if !ok {
			w = mark{Generation: m.currentGeneration(l.partition, l.lane), Epoch: -1}
		}

		w.Next = max(w.Next, e.Place.Offset+1)
		w.Epoch = max(w.Epoch, e.Place.LeaderEpoch)
		to[l] = w
	}

	all := make([]move, 0, len(to))
	for l, w := range to {
		if w.Next > m.nextOffset(l, w.Generation) {
			all = append(all, move{l, w})
		}
	}

	// All batches write in the same order. So two batches with common lanes conflict at the first
	// one, and cannot deadlock.
	slices.SortFunc(all, func(a, b move) int {
		return cmp.Or(
			cmp.Compare(a.consumer, b.consumer),
			cmp.Compare(a.topic, b.topic),
			cmp.Compare(a.partition.partition, b.partition.partition),
			cmp.Compare(a.lane.lane, b.lane.lane))
	})
	return all
}

// advanceWatermarks writes the moves with one command. Within a generation a watermark never goes
// back. A watermark of a later generation stays unchanged.
func (x *Inbox) advanceWatermarks(ctx context.Context, list []move) error {
	if len(list) == 0 {
		return nil
	}

	models := make([]mongo.WriteModel, len(list))
	for i, m := range list {
		models[i] = mongo.NewUpdateOneModel().
			SetFilter(bson.D{{Key: "_id", Value: m.documentID()}}).
			SetUpdate(m.updatePipeline()).
			SetUpsert(true)
	}

	if _, err := x.offsets.BulkWrite(ctx, models, options.BulkWrite().SetOrdered(true)); err != nil {
		return fmt.Errorf("moving watermarks: %w", err)
	}

	return nil
}

// updatePipeline returns the update of the watermark for the move.
func (m move) updatePipeline() bson.A {
	stored := bson.D{{Key: "$ifNull", Value: bson.A{"$g", int64(-1)}}}
	fresh := bson.D{
		{Key: "_id", Value: "$_id"},
		{Key: "g", Value: m.Generation},
		{Key: "n", Value: m.Next},
		{Key: "e", Value: m.Epoch},
		{Key: "at", Value: "$$NOW"},
	}

	higher := bson.D{{Key: "$mergeObjects", Value: bson.A{"$$ROOT", bson.D{
		{Key: "n", Value: bson.D{{Key: "$max", Value: bson.A{"$n", m.Next}}}},
		{Key: "e", Value: bson.D{{Key: "$max", Value: bson.A{"$e", m.Epoch}}}},
		{Key: "at", Value: "$$NOW"},
	}}}}

	// An older generation is replaced, the same one moves up, and a newer one stays.
	return bson.A{bson.D{{Key: "$replaceWith", Value: bson.D{{Key: "$switch", Value: bson.D{
		{Key: "branches", Value: bson.A{
			bson.D{{Key: "case", Value: bson.D{{Key: "$lt", Value: bson.A{stored, m.Generation}}}}, {Key: "then", Value: fresh}},
			bson.D{{Key: "case", Value: bson.D{{Key: "$eq", Value: bson.A{stored, m.Generation}}}}, {Key: "then", Value: higher}},
		}},
		{Key: "default", Value: "$$ROOT"},
	}}}}}}
}
