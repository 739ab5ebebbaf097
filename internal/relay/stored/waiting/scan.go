package waiting

import (
	"context"
	"errors"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
)

// Scan reads waiting envelopes page by page, in the order of outbox, key and position (N15), which is the order of the
// index. A page contains all that was committed before the call of Page, majority committed (N21). A field with its zero
// value excludes nothing.
type Scan struct {
	Store *Store
	NS    string   // only this outbox; required with Keys
	Keys  []string // only these keys
	Skip  []string // leaves out envelopes that wait only for these topics; may grow between two pages

	Where  bson.D // further conditions
	Fields bson.D // projection; nil: without history and error (N21)

	begun bool
	reach reach
	leave []string // leaves out envelopes of the rest of the current key that wait only for these topics
	last  struct {
		ns, key, pos string
		ids          bson.A // of the documents read with this key and position
	}
}

// reach is the part of the order that the next query reads.
type reach uint8

const (
	restOfKey    reach = iota // the current key, from the last position on
	restOfOutbox              // the following keys of the current outbox
	restOfStore               // the following outboxes
)

// ErrLeave ends a page early, when Leave was called.
var ErrLeave = errors.New("the rest of the key is left")

// Leave skips the remaining envelopes of the current key that wait only for topics. If topics is nil, it skips all remaining
// envelopes of the key. The next page continues after them. Call Leave within take, and return ErrLeave.
func (s *Scan) Leave(topics []string) {
	s.leave = topics
	if topics == nil {
		s.reach = restOfOutbox
	}
}

// Page calls take for up to limit envelopes. The bytes are valid only during the call, and an error of take ends the
// page. more is false after the last page. After an error, the next call continues after the last envelope that take
// received.
func (s *Scan) Page(ctx context.Context, limit int, take func(raw bson.Raw) error) (more bool, err error) {
	err = mongodb.AfterCommitted(ctx, s.Store.coll, func(ctx context.Context) (err error) {
		more, err = s.readPage(ctx, limit, take)
		return err
	})
	return more, err
}

// ReadPage reads the next page of scan in the store, as [Scan.Page].
func (s *Store) ReadPage(ctx context.Context, scan *Scan, limit int, take func(raw bson.Raw) error) (more bool, err error) {
	scan.Store = s
	return scan.Page(ctx, limit, take)
}

// readPage reads the rest of the current key, then the following keys, then the following outboxes.
func (s *Scan) readPage(ctx context.Context, limit int, take func(raw bson.Raw) error) (more bool, err error) {
	for {
		first, part := !s.begun, s.reach
		n, err := s.runQuery(ctx, limit, take)
		switch {
		case errors.Is(err, ErrLeave):
			return true, nil
		case err != nil:
			return false, err
		case n == limit:
			return true, nil
		}

		// A first query covers everything. With an outbox, nothing follows its last key.
		last := restOfStore
		if s.NS != "" {
			last = restOfOutbox
		}
		if first || part >= last {
			return false, nil
		}

		// The query has moved the place if it found anything, and then ended within its part.
		s.reach = part + 1
		limit -= n
	}
}

// runQuery makes one query of the part of the order that s.reach names.
func (s *Scan) runQuery(ctx context.Context, limit int, take func(raw bson.Raw) error) (n int, err error) {
	fields := s.Fields
	if fields == nil {
		fields = bson.D{{Key: "history", Value: 0}, {Key: "error", Value: 0}}
	}
	err = mongodb.FindEach(ctx, s.Store.coll, "reading waiting envelopes", s.buildFilter(), func(raw bson.Raw) error {
		n++
		s.notePlace(raw)
		return take(raw)
	}, findOptions().SetSort(s.sortOrder()).SetLimit(int64(limit)).SetBatchSize(int32(limit)).SetProjection(fields))
	return n, err
}

// notePlace records that the scan has reached raw.
func (s *Scan) notePlace(raw bson.Raw) {
	ns, _ := raw.Lookup("ns").StringValueOK()
	key, _ := raw.Lookup("key").StringValueOK()
	pos, _ := raw.Lookup("pos").StringValueOK()
	id := mongodb.CloneValue(raw.Lookup("_id"))

	sameKey := s.begun && ns == s.last.ns && key == s.last.key
	if sameKey && pos == s.last.pos {
		s.last.ids = append(s.last.ids, id)
		return
	}
	if !sameKey {
		s.leave = nil
	}
	s.begun, s.reach = true, restOfKey
	s.last.ns, s.last.key, s.last.pos, s.last.ids = ns, key, pos, bson.A{id}
}

func (s *Scan) buildFilter() bson.D {
	var document bson.D
	skip := s.Skip
	keys := bson.E{Key: "key", Value: bson.D{{Key: "$in", Value: s.Keys}}}

	switch {
	case !s.begun:
		if s.NS != "" {
			document = append(document, bson.E{Key: "ns", Value: s.NS})
		}
		if s.Keys != nil {
			document = append(document, keys)
		}

	case s.reach == restOfKey:
		// Several envelopes may have the last position. Those that were read are left out by their ids.
		document = append(document, bson.E{Key: "ns", Value: s.last.ns}, bson.E{Key: "key", Value: s.last.key},
			bson.E{Key: "pos", Value: bson.D{{Key: "$gte", Value: s.last.pos}}},
			bson.E{Key: "_id", Value: bson.D{{Key: "$nin", Value: s.last.ids}}})
		skip = slices.Concat(s.Skip, s.leave)

	case s.reach == restOfOutbox:
		after := bson.D{{Key: "$gt", Value: s.last.key}}
		if s.Keys != nil {
			after = append(after, bson.E{Key: "$in", Value: s.Keys})
		}
		document = append(document, bson.E{Key: "ns", Value: s.last.ns}, bson.E{Key: "key", Value: after})

	default:
		document = append(document, bson.E{Key: "ns", Value: bson.D{{Key: "$gt", Value: s.last.ns}}})
	}
	if len(s.Where) > 0 {
		document = append(document, bson.E{Key: "$and", Value: bson.A{s.Where}})
	}
	return s.Store.filter(append(document, waitsOutside(skip)...)...)
}

// scanPlace is the place of a scan between two pages.
type scanPlace struct {
	NS  string `bson:"n"`
	Key string `bson:"k"`
	Pos string `bson:"p"`
	IDs bson.A `bson:"i"`
}

// encodePlace returns the place after the last page, as text.
func (s *Scan) encodePlace() (string, error) {
	return listing.EncodeCursor(scanPlace{s.last.ns, s.last.key, s.last.pos, s.last.ids})
}

// resume lets a new scan begin after a place. "" is the beginning.
func (s *Scan) resume(place string) error {
	if place == "" {
		return nil
	}
	var scanPlace scanPlace
	if err := listing.ParseCursor(place, &scanPlace); err != nil {
		return err
	}
	s.begun = true
	s.last.ns, s.last.key, s.last.pos, s.last.ids = scanPlace.NS, scanPlace.Key, scanPlace.Pos, scanPlace.IDs
	return nil
}

// sortOrder returns the order of a query. It leaves out the fields that the filter fixes.
func (s *Scan) sortOrder() bson.D {
	byPos := bson.E{Key: "pos", Value: 1}
	byKey := bson.E{Key: "key", Value: 1}
	switch {
	case s.begun && s.reach == restOfKey:
		return bson.D{byPos}
	case s.begun && s.reach == restOfOutbox || s.NS != "":
		return bson.D{byKey, byPos}
	}
	return bson.D{{Key: "ns", Value: 1}, byKey, byPos}
}
