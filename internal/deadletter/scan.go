package deadletter

import (
	"context"
	"errors"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// scan reads the matching letters of one outbox in the order of the stream, in parts that fit a
// transaction.
type scan struct {
	dead      *mongo.Collection
	filter    bson.D
	lastEntry *scanEntry
	exhausted bool
}

// scanEntry is the place of a letter in the scan.
type scanEntry struct {
	ID     ID     `bson:"_id"`
	Pos    string `bson:"pos"`
	Size   int    `bson:"size"`
	Chunks int    `bson:"chunks"`
}

// nextPart returns the next entries, at most the given number of letters and bytes, but at least
// one letter. It returns none at the end. A letter that is changed during the scan is returned once
// or not at all.
func (s *scan) nextPart(ctx context.Context, letters, bytes int) ([]scanEntry, error) {
	if s.exhausted {
		return nil, nil
	}

	part, err := mongodb.FindAll[scanEntry](ctx, s.dead, "reading "+mongodb.Namespace(s.dead), s.remainingFilter(), options.Find().
		SetSort(bson.D{{Key: "pos", Value: 1}, {Key: "_id", Value: 1}}).
		SetLimit(int64(letters)).
		SetProjection(mongodb.Fields("pos", "size", "chunks")))
	if err != nil {
		return nil, err
	}
	s.exhausted = len(part) < letters

	total := 0
	for i := range part {
		// The envelope is not read yet, so this is an estimate of the memory that it needs.
		total += part[i].Size + 512
		if i > 0 && total > bytes {
			part = part[:i]
			s.exhausted = false
			break
		}
	}
	if len(part) > 0 {
		s.lastEntry = &part[len(part)-1]
	}
	return part, nil
}

// remainingFilter returns the filter for the letters after lastEntry. Letters without a position
// come first.
func (s *scan) remainingFilter() bson.D {
	if s.lastEntry == nil {
		return s.filter
	}

	afterID := bson.D{{Key: "$gt", Value: s.lastEntry.ID}}
	if s.lastEntry.Pos == "" {
		return joinFilters(s.filter, bson.D{{Key: "$or", Value: bson.A{
			bson.D{{Key: "pos", Value: bson.D{{Key: "$gt", Value: ""}}}},
			bson.D{{Key: "pos", Value: nil}, {Key: "_id", Value: afterID}},
		}}})
	}
	return joinFilters(s.filter, bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: "pos", Value: bson.D{{Key: "$gt", Value: s.lastEntry.Pos}}}},
		bson.D{{Key: "pos", Value: s.lastEntry.Pos}, {Key: "_id", Value: afterID}},
	}}})
}

// readLetters returns the letters of the entries in part, in the same order and with their whole
// envelopes. It leaves out letters that no longer exist.
func (s *scan) readLetters(ctx context.Context, part []scanEntry) ([]*Dead, error) {
	ids := make([]ID, len(part))
	for i := range part {
		ids[i] = part[i].ID
	}
	found, err := mongodb.FindAll[*Dead](ctx, s.dead, "reading "+mongodb.Namespace(s.dead), idIn(ids))
	if err != nil {
		return nil, err
	}

	byID := make(map[string]*Dead, len(found))
	for _, d := range found {
		if d.Chunks > 0 {
			envelope, err := readChunks(ctx, s.dead, *d)
			if errors.Is(err, errMissingChunks) {
				// A discard is removing the letter, and removes the chunks first.
				continue
			}
			if err != nil {
				return nil, err
			}
			d.Envelope = envelope
		}
		byID[d.ID.mapKey()] = d
	}

	letters := make([]*Dead, 0, len(found))
	for i := range part {
		if d := byID[part[i].ID.mapKey()]; d != nil {
			letters = append(letters, d)
		}
	}
	return letters, nil
}
