package deadletter

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/store"
)

// scan walks the letters of one outbox that match, in the order of the stream, in parts that fit a transaction.
type scan struct {
	dead   *mongo.Collection
	filter bson.D
	last   *entry
	ended  bool
}

// entry is a letter's place in the scan.
type entry struct {
	ID     ID     `bson:"_id"`
	Pos    string `bson:"pos"`
	Size   int    `bson:"size"`
	Chunks int    `bson:"chunks"`
}

// places are those of the next part of at most so many letters and bytes; none at the end. A letter that is changed
// meanwhile is met once or not at all.
func (s *scan) places(ctx context.Context, letters, bytes int) ([]entry, error) {
	if s.ended {
		return nil, nil
	}
	cur, err := s.dead.Find(ctx, s.rest(), options.Find().SetSort(bson.D{{Key: "pos", Value: 1}, {Key: "_id", Value: 1}}).
		SetLimit(int64(letters)).SetProjection(bson.D{{Key: "pos", Value: 1}, {Key: "size", Value: 1}, {Key: "chunks", Value: 1}}))
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", store.Namespace(s.dead), err)
	}
	var part []entry
	if err := cur.All(ctx, &part); err != nil {
		return nil, fmt.Errorf("reading %s: %w", store.Namespace(s.dead), err)
	}
	s.ended = len(part) < letters
	total := 0
	for i := range part {
		if total += part[i].Size + 512; i > 0 && total > bytes {
			part, s.ended = part[:i], false
			break
		}
	}
	if len(part) > 0 {
		s.last = &part[len(part)-1]
	}
	return part, nil
}

// rest is the filter for what comes after the last place. Letters without a position come first.
func (s *scan) rest() bson.D {
	switch {
	case s.last == nil:
		return s.filter
	case s.last.Pos == "":
		return and(s.filter, bson.D{{Key: "$or", Value: bson.A{
			bson.D{{Key: "pos", Value: bson.D{{Key: "$gt", Value: ""}}}},
			bson.D{{Key: "pos", Value: nil}, {Key: "_id", Value: bson.D{{Key: "$gt", Value: s.last.ID}}}},
		}}})
	}
	return and(s.filter, bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: "pos", Value: bson.D{{Key: "$gt", Value: s.last.Pos}}}},
		bson.D{{Key: "pos", Value: s.last.Pos}, {Key: "_id", Value: bson.D{{Key: "$gt", Value: s.last.ID}}}},
	}}})
}

// letters reads the letters of these places, whole and in their order; those that are gone are left out.
func (s *scan) letters(ctx context.Context, part []entry) ([]*Dead, error) {
	ids := make([]ID, len(part))
	for i := range part {
		ids[i] = part[i].ID
	}
	cur, err := s.dead.Find(ctx, in("_id", ids))
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", store.Namespace(s.dead), err)
	}
	var found []*Dead
	if err := cur.All(ctx, &found); err != nil {
		return nil, fmt.Errorf("reading %s: %w", store.Namespace(s.dead), err)
	}
	byID := make(map[string]*Dead, len(found))
	for _, d := range found {
		if d.Chunks > 0 {
			whole, err := assemble(ctx, s.dead, *d)
			if errors.Is(err, errIncomplete) {
				continue // discarded at this moment
			} else if err != nil {
				return nil, err
			}
			d.Envelope = whole
		}
		byID[d.ID.key()] = d
	}
	out := make([]*Dead, 0, len(found))
	for i := range part {
		if d := byID[part[i].ID.key()]; d != nil {
			out = append(out, d)
		}
	}
	return out, nil
}
