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

// A watermark is {_id: {c, t, p, l}, g, n, e, at, by, id}: consumer, topic, partition and lane; generation, the offset after the
// last that was dealt with, the leader epoch of its record, and when. The document of lane -1 is the partition's own: its g
// is the current generation, and the watermark of a lane that has an older one does not count. So a generation begins with
// one write, whatever lanes there are and whoever writes to them at that moment. N29
const partitionLane = -1

type partition struct {
	consumer, topic string
	partition       int32
}

type lane struct {
	partition
	lane int32
}

func (l lane) id() bson.D {
	return bson.D{{Key: "c", Value: l.consumer}, {Key: "t", Value: l.topic}, {Key: "p", Value: l.partition.partition}, {Key: "l", Value: l.lane}}
}

func laneOf(e Entry) lane {
	return lane{partition{e.Key.Consumer, e.Place.Topic, e.Place.Partition}, e.Place.Lane}
}

// mark is a watermark document without its _id.
type mark struct {
	Generation int64 `bson:"g"`
	Next       int64 `bson:"n"`
	Epoch      int32 `bson:"e"`

	By string `bson:"by"` // of a partition's own document: the tenure that attached last
	ID string `bson:"id"` // and the id of the topic whose generation this is, "" where unknown
}

// marks are the watermark documents that were found.
type marks map[lane]mark

// generation is the current one of a partition. Should the partition's own document be lost, the lanes know it.
func (m marks) generation(p partition, lanes ...int32) int64 {
	g := m[lane{p, partitionLane}].Generation
	for _, l := range lanes {
		g = max(g, m[lane{p, l}].Generation)
	}
	return g
}

// next is the first offset of a lane that was not dealt with in that generation.
func (m marks) next(l lane, generation int64) int64 {
	if w, ok := m[l]; ok && w.Generation == generation {
		return w.Next
	}
	return 0
}

// laneIDs are the documents to be read for lanes: theirs and the partitions' own.
func laneIDs(lanes map[lane]struct{}) bson.A {
	ids := make(bson.A, 0, len(lanes)+1)
	own := make(map[partition]struct{})
	for l := range lanes {
		ids = append(ids, l.id())
		if _, ok := own[l.partition]; !ok {
			own[l.partition] = struct{}{}
			ids = append(ids, lane{l.partition, partitionLane}.id())
		}
	}
	return ids
}

// parseLane is the reverse of lane.id.
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

// readMarks reads the watermarks of lanes, and the documents of their partitions.
func (x *Inbox) readMarks(ctx context.Context, lanes map[lane]struct{}) (marks, error) {
	found := make(marks, len(lanes))
	if len(lanes) == 0 {
		return found, nil
	}
	cur, err := x.offsets.Find(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: laneIDs(lanes)}}}})
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

// move is where a lane's watermark goes: at least to next, in that generation.
type move struct {
	lane
	mark
}

// moves collects one move for each lane of the entries.
func moves(list []Entry, m marks) []move {
	to := make(map[lane]mark)
	for _, e := range list {
		if e.Place.Topic == "" {
			continue
		}
		l := laneOf(e)
		w, ok := to[l]
		if !ok {
			w = mark{Generation: m.generation(l.partition, l.lane), Epoch: -1}
		}
		w.Next = max(w.Next, e.Place.Offset+1)
		w.Epoch = max(w.Epoch, e.Place.LeaderEpoch)
		to[l] = w
	}
	all := make([]move, 0, len(to))
	for l, w := range to {
		if w.Next > m.next(l, w.Generation) {
			all = append(all, move{l, w})
		}
	}
	// Two batches that share lanes meet at the first of them rather than each holding what the other wants.
	slices.SortFunc(all, func(a, b move) int {
		return cmp.Or(cmp.Compare(a.consumer, b.consumer), cmp.Compare(a.topic, b.topic),
			cmp.Compare(a.partition.partition, b.partition.partition), cmp.Compare(a.lane.lane, b.lane.lane))
	})
	return all
}

// advance writes moves, one statement for each lane in one command. A watermark never goes back within a generation, and
// one of a later generation stays as it is.
func (x *Inbox) advance(ctx context.Context, list []move) error {
	if len(list) == 0 {
		return nil
	}
	models := make([]mongo.WriteModel, len(list))
	for i, m := range list {
		models[i] = mongo.NewUpdateOneModel().SetUpsert(true).
			SetFilter(bson.D{{Key: "_id", Value: m.id()}}).SetUpdate(m.update())
	}
	if _, err := x.offsets.BulkWrite(ctx, models, options.BulkWrite().SetOrdered(true)); err != nil {
		return fmt.Errorf("moving watermarks: %w", err)
	}
	return nil
}

func (m move) update() bson.A {
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
	return bson.A{bson.D{{Key: "$replaceWith", Value: bson.D{{Key: "$switch", Value: bson.D{
		{Key: "branches", Value: bson.A{
			bson.D{{Key: "case", Value: bson.D{{Key: "$lt", Value: bson.A{stored, m.Generation}}}}, {Key: "then", Value: fresh}},
			bson.D{{Key: "case", Value: bson.D{{Key: "$eq", Value: bson.A{stored, m.Generation}}}}, {Key: "then", Value: higher}},
		}},
		{Key: "default", Value: "$$ROOT"},
	}}}}}}
}
