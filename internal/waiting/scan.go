package waiting

import (
	"context"
	"errors"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/slot"
)

// ExceptionScan reads the exceptions of a collection page by page, in the order of key and position (N15), which is
// the order of the index. Retry, blocked and parked exceptions come together. A page contains all exceptions that were
// committed before the call of Page, majority committed (N21). Except for Coll, a field with its zero value excludes
// nothing.
type ExceptionScan struct {
	Coll *mongo.Collection
	Keys []bson.RawValue // only these values of `key`
	Skip []string        // leaves out exceptions that wait only for these topics; may grow between two pages
	Slot slot.Range      // only exceptions of this slot (N28)

	begun bool
	rest  bool     // the key of last may have more
	leave []string // leaves out exceptions of the rest of this key that wait only for these topics
	last  struct {
		key, pos bson.RawValue
		ids      bson.A // of the exceptions read with this key and position
	}
	odd bson.A // ids of the exceptions read whose key is an array
}

// mostOdd bounds the exceptions with array keys in one scan. They become dead letters when they are read.
const mostOdd = 1000

// errLeave ends a page early, when Leave was called.
var errLeave = errors.New("the rest of the key is left")

// Leave skips the remaining exceptions of the current key that wait only for topics. If topics is nil, it skips all
// remaining exceptions of the key. The next page continues after them. Call Leave within take, and return errLeave.
func (s *ExceptionScan) Leave(topics []string) { s.rest, s.leave = topics != nil, topics }

// Page calls take for up to limit exceptions. The bytes are valid only during the call, and an error of take ends the
// page. more is false after the last page. After an error, the next call continues after the last exception that take
// received.
func (s *ExceptionScan) Page(ctx context.Context, limit int, take func(bson.Raw) error) (more bool, err error) {
	err = mongodb.AfterCommitted(ctx, s.Coll, func(ctx context.Context) (err error) {
		more, err = s.readPage(ctx, limit, take)
		return err
	})
	return more, err
}

// readPage reads the rest of the last key, and then the following keys.
func (s *ExceptionScan) readPage(ctx context.Context, limit int, take func(bson.Raw) error) (more bool, err error) {
	for {
		rest := s.rest
		n, err := s.runQuery(ctx, limit, take)
		switch {
		case errors.Is(err, errLeave):
			return true, nil
		case err != nil:
			return false, err
		case n == limit:
			return true, nil
		case !rest:
			// The query covered all following keys.
			return false, nil
		}

		s.rest = false
		limit -= n
	}
}

// runQuery makes one query: for the rest of the last key, or for all following keys.
func (s *ExceptionScan) runQuery(ctx context.Context, limit int, take func(bson.Raw) error) (n int, err error) {
	err = mongodb.FindEach(ctx, mongodb.Majority(s.Coll), "reading exceptions of "+mongodb.Namespace(s.Coll), s.Slot.AddFilter(s.buildFilter()),
		func(raw bson.Raw) error {
			n++
			s.notePlace(raw)
			return take(raw)
		}, options.Find().SetSort(s.sortOrder()).SetLimit(int64(limit)).SetBatchSize(int32(limit)).SetAllowDiskUse(true)) // N21
	return n, err
}

// notePlace records that the scan has reached raw.
func (s *ExceptionScan) notePlace(raw bson.Raw) {
	key, pos, id := raw.Lookup("key"), raw.Lookup("pos"), mongodb.CloneValue(raw.Lookup("_id"))
	// The index sorts an array by its least element, but $gt treats it as greater than all text. The scan cannot
	// continue after such a key.
	if key.Type == bson.TypeArray {
		s.odd = append(s.odd, id)
		return
	}

	if s.begun && key.Equal(s.last.key) && pos.Equal(s.last.pos) {
		s.last.ids = append(s.last.ids, id)
		return
	}

	if !s.begun || !key.Equal(s.last.key) {
		s.leave = nil
	}
	s.begun, s.rest = true, true
	s.last.key, s.last.pos, s.last.ids = mongodb.CloneValue(key), mongodb.CloneValue(pos), bson.A{id}
}

func (s *ExceptionScan) buildFilter() bson.D {
	d := outboxes.IsException()
	read := s.odd
	// A filter cannot name any number of ids. Later scans read the others.
	if len(s.odd) >= mostOdd {
		d = append(d, bson.E{Key: "key", Value: bson.D{{Key: "$not", Value: bson.D{{Key: "$type", Value: "array"}}}}})
		read = nil
	}

	if s.begun && s.rest {
		read = slices.Concat(read, s.last.ids)
	}
	if len(read) > 0 {
		d = append(d, bson.E{Key: "_id", Value: bson.D{{Key: "$nin", Value: read}}})
	}

	switch {
	case !s.begun && s.Keys != nil:
		d = append(d, keyIn(s.Keys...))
	case !s.begun:
	case s.rest:
		d = append(d, keyIn(s.last.key))
		if s.last.pos.Type == bson.TypeString {
			// Several exceptions may have this position. Those that were read are left out by their
			// ids.
			d = append(d, bson.E{Key: "pos", Value: bson.D{{Key: "$gte", Value: s.last.pos}}})
		}
	default:
		if s.Keys != nil {
			d = append(d, keyIn(s.Keys...))
		}
		// $expr compares across types, as the index does.
		d = append(d, bson.E{Key: "$expr", Value: bson.D{{Key: "$gt", Value: bson.A{"$key", mongodb.Literal(orNull(s.last.key))}}}})
	}

	skip := s.Skip
	if s.begun && s.rest {
		skip = slices.Concat(s.Skip, s.leave)
	}
	return append(d, waitsOutside(skip)...)
}

// keyIn returns the condition for one of the keys. A service may have stored a document or a regular expression as a key. In
// a filter, the server would treat it as an operator.
func keyIn(keys ...bson.RawValue) bson.E {
	values, odd := bson.A{}, bson.A{}
	for _, k := range keys {
		switch k.Type {
		case bson.TypeEmbeddedDocument, bson.TypeArray, bson.TypeRegex:
			odd = append(odd, k)
		default:
			values = append(values, orNull(k))
		}
	}

	in := bson.E{Key: "key", Value: bson.D{{Key: "$in", Value: values}}}
	if len(odd) == 0 {
		return in
	}

	return bson.E{Key: "$or", Value: bson.A{bson.D{in}, bson.D{{Key: "$expr", Value: bson.D{{Key: "$in", Value: bson.A{"$key", mongodb.Literal(odd)}}}}}}}
}

// sortOrder returns the order of a query. If there is only one key, it leaves out the key: then the server can merge the
// index ranges of the three states by position.
func (s *ExceptionScan) sortOrder() bson.D {
	if s.begun && s.rest {
		return bson.D{{Key: "pos", Value: 1}}
	}
	return bson.D{{Key: "key", Value: 1}, {Key: "pos", Value: 1}}
}

// waitsOutside returns the condition that an exception waits for a topic that is not in skip. An exception that lists no
// topics may wait for any.
func waitsOutside(skip []string) bson.D {
	if len(skip) == 0 {
		return nil
	}

	outside := bson.D{{Key: "$elemMatch", Value: bson.D{{Key: "$nin", Value: skip}}}}
	return bson.D{{Key: "$and", Value: bson.A{bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: "pending", Value: nil}}, bson.D{{Key: "pending", Value: outside}},
	}}}}}}
}

func orNull(v bson.RawValue) any {
	if v.Type == 0 {
		return nil
	}
	return v
}

// ExceptionKey has the fields that determine the ordering key of an exception: the key, which may be missing, and the
// aggregate id, which replaces a missing key.
type ExceptionKey struct {
	Key         bson.RawValue `bson:"key"`
	AggregateID bson.RawValue `bson:"aggregateid"`
}

// DueRetries returns the keys of up to limit exceptions whose next attempt is due by the server's clock, the earliest first.
// It leaves out exceptions that wait only for topics in skip. A key may occur several times. near is about the server's
// time, and only selects the range of the index. It reads one range of an index, and costs little if nothing is due.
func DueRetries(ctx context.Context, coll *mongo.Collection, near time.Time, skip []string, limit int, p slot.Range) ([]ExceptionKey, error) {
	return mongodb.FindAll[ExceptionKey](ctx, mongodb.Majority(coll), "looking for due retries in "+mongodb.Namespace(coll),
		p.AddFilter(dueFilter(near, skip)), options.Find().SetSort(bson.D{{Key: "nextAt", Value: 1}}).SetLimit(int64(limit)).
			SetProjection(bson.D{{Key: "_id", Value: 0}, {Key: "key", Value: 1}, {Key: "aggregateid", Value: 1}}))
}

func dueFilter(near time.Time, skip []string) bson.D {
	return append(bson.D{
		{Key: "nextAt", Value: bson.D{{Key: "$lte", Value: bson.NewDateTimeFromTime(near.Add(time.Second))}}},
		{Key: "state", Value: "retry"},
		{Key: "$expr", Value: bson.D{{Key: "$lte", Value: bson.A{"$nextAt", "$$NOW"}}}},
	}, waitsOutside(skip)...)
}

// EachException calls take for each exception of coll, in no order, with its id, key, pos, pending and origin. The bytes are
// valid only during the call. It sees everything that was committed before the call, and holds one reply in memory.
func EachException(ctx context.Context, coll *mongo.Collection, p slot.Range, take func(bson.Raw) error) error {
	return mongodb.AfterCommitted(ctx, coll, func(ctx context.Context) error {
		fields := mongodb.Fields("key", "aggregateid", "pos", "pending", "origin")
		return mongodb.FindEach(ctx, mongodb.Majority(coll), "reading exceptions of "+mongodb.Namespace(coll),
			p.AddFilter(outboxes.IsException()), take, options.Find().SetBatchSize(5000).SetProjection(fields))
	})
}
