package letters

import (
	"context"
	"errors"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
)

// Scan reads the matching letters in the order of their positions, in parts that fit a transaction. A letter that is
// changed during the scan is returned once or not at all.
type Scan struct {
	coll      *mongo.Collection
	filter    bson.D
	lastEntry *scanEntry
	exhausted bool
}

// NewScan returns a scan of the letters that match query and were committed before the call.
func NewScan(ctx context.Context, coll *mongo.Collection, query Query) (*Scan, error) {
	// Without this, majority reads may miss a letter that was written just before the call (N22).
	if err := mongodb.CatchUp(ctx, coll); err != nil {
		return nil, err
	}
	return &Scan{coll: mongodb.Majority(coll), filter: query.mongoFilter()}, nil
}

// scanEntry is the place of a letter in the scan.
type scanEntry struct {
	ID     string `bson:"_id"`
	Pos    string `bson:"pos"`
	Size   int    `bson:"size"`
	Chunks int    `bson:"chunks"`
}

// nextPart returns the next entries, at most the given number of letters and bytes, but at least
// one letter. It returns none at the end.
func (s *Scan) nextPart(ctx context.Context, letters, bytes int) ([]scanEntry, error) {
	if s.exhausted {
		return nil, nil
	}

	part, err := mongodb.FindAll[scanEntry](ctx, s.coll, "reading "+mongodb.Namespace(s.coll), s.remainingFilter(), options.Find().
		SetSort(ofStream.Sort()).
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

// remainingFilter returns the filter for the letters after lastEntry.
func (s *Scan) remainingFilter() bson.D {
	last := s.lastEntry
	if last == nil {
		return s.filter
	}
	return listing.All(s.filter, ofStream.After(last.Pos, last.ID))
}

// ofStream is the order of the events in the stream.
var ofStream = listing.Order{Field: "pos"}

// Next returns the next letters with their whole envelopes, at most the given number of letters and bytes, but at least
// one letter. It returns none at the end. It leaves out letters that were removed in the meantime.
func (s *Scan) Next(ctx context.Context, letters, bytes int) ([]*Dead, error) {
	for {
		part, err := s.nextPart(ctx, letters, bytes)
		if err != nil || len(part) == 0 {
			return nil, err
		}
		list, err := s.read(ctx, part)
		if err != nil || len(list) > 0 {
			return list, err
		}
	}
}

// read returns the letters of the entries in part that still exist, in the same order and with their whole envelopes.
func (s *Scan) read(ctx context.Context, part []scanEntry) ([]*Dead, error) {
	ids := make([]string, len(part))
	for i := range part {
		ids[i] = part[i].ID
	}
	found, err := mongodb.FindAll[*Dead](ctx, s.coll, "reading "+mongodb.Namespace(s.coll), idIn(ids))
	if err != nil {
		return nil, err
	}

	byID := make(map[string]*Dead, len(found))
	for _, d := range found {
		if d.Chunks > 0 {
			envelope, err := readChunks(ctx, s.coll, *d)
			if errors.Is(err, errMissingChunks) {
				// A discard is removing the letter, and removes the chunks first.
				continue
			}
			if err != nil {
				return nil, err
			}
			d.Envelope = envelope
		}
		byID[d.ID] = d
	}

	list := make([]*Dead, 0, len(found))
	for i := range part {
		if letter := byID[part[i].ID]; letter != nil {
			list = append(list, letter)
		}
	}
	return list, nil
}
