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
	lastEntry   *scanEntry
	exhausted  bool
}

// scanEntry is a letter's place in the scan.
type scanEntry struct {
	ID     ID     `bson:"_id"`
	Pos    string `bson:"pos"`
	Size   int    `bson:"size"`
	Chunks int    `bson:"chunks"`
}

// nextPart are those of the next part of at most so many letters and bytes; none at the end. A letter that is changed
// meanwhile is met once or not at all.
func (s *scan) nextPart(ctx context.Context, letters, bytes int) ([]scanEntry, error) {
	if s.exhausted {
		return nil, nil
	}
	cur, err := s.dead.Find(ctx, s.remainingFilter(), options.Find().SetSort(bson.D{{Key: "pos", Value: 1}, {Key: "_id", Value: 1}}).
		SetLimit(int64(letters)).SetProjection(bson.D{{Key: "pos", Value: 1}, {Key: "size", Value: 1}, {Key: "chunks", Value: 1}}))
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", store.Namespace(s.dead), err)
	}
	var part []scanEntry
	if err := cur.All(ctx, &part); err != nil {
		return nil, fmt.Errorf("reading %s: %w", store.Namespace(s.dead), err)
	}
	s.exhausted = len(part) < letters
	total := 0
	for i := range part {
		if total += part[i].Size + 512; i > 0 && total > bytes {
			part, s.exhausted = part[:i], false
			break
		}
	}
	if len(part) > 0 {
		s.lastEntry = &part[len(part)-1]
	}
	return part, nil
}

// remainingFilter is the filter for what comes after the last place. Letters without a position come first.
func (s *scan) remainingFilter() bson.D {
	switch {
	case s.lastEntry == nil:
		return s.filter
	case s.lastEntry.Pos == "":
		return joinFilters(s.filter, bson.D{{Key: "$or", Value: bson.A{
			bson.D{{Key: "pos", Value: bson.D{{Key: "$gt", Value: ""}}}},
			bson.D{{Key: "pos", Value: nil}, {Key: "_id", Value: bson.D{{Key: "$gt", Value: s.lastEntry.ID}}}},
		}}})
	}
	return joinFilters(s.filter, bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: "pos", Value: bson.D{{Key: "$gt", Value: s.lastEntry.Pos}}}},
		bson.D{{Key: "pos", Value: s.lastEntry.Pos}, {Key: "_id", Value: bson.D{{Key: "$gt", Value: s.lastEntry.ID}}}},
	}}})
}

// readLetters reads the letters of these places, whole and in their order; those that are gone are left out.
func (s *scan) readLetters(ctx context.Context, part []scanEntry) ([]*Dead, error) {
	ids := make([]ID, len(part))
	for i := range part {
		ids[i] = part[i].ID
	}
	cur, err := s.dead.Find(ctx, fieldIn("_id", ids))
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
			whole, err := readChunks(ctx, s.dead, *d)
			if errors.Is(err, errMissingChunks) {
				continue // discarded at this moment
			} else if err != nil {
				return nil, err
			}
			d.Envelope = whole
		}
		byID[d.ID.mapKey()] = d
	}
	out := make([]*Dead, 0, len(found))
	for i := range part {
		if d := byID[part[i].ID.mapKey()]; d != nil {
			out = append(out, d)
		}
	}
	return out, nil
}
