package waiting

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/slot"
)

// ExceptionScan reads the exceptions of a collection page by page, in the order of key and position (N15), which is that of
// the index: retry, blocked and parked ones together. A page sees everything that was committed before it was asked for,
// majority committed (N21). The zero value of each field but Coll leaves nothing out.
type ExceptionScan struct {
	Coll *mongo.Collection
	Keys []bson.RawValue // only these values of `key`
	Only []string        // only those that wait for one of these topics, or do not say for which
	Skip []string        // not those that wait for these topics only; may grow between two pages
	Part slot.Range      // only those of this slot (N28)

	begun bool
	rest  bool     // the key of last may have more
	leave []string // of the rest of this key, not those that wait for these topics only
	last  struct {
		key, pos bson.RawValue
		ids      bson.A // read with this very key and position
	}
	odd bson.A // ids of those read whose key is an array
}

// mostOdd bounds the exceptions of a scan whose keys are arrays. They are dead letters as soon as they are read.
const mostOdd = 1000

// ErrLeave ends a page early, when Leave was called.
var ErrLeave = errors.New("the rest of the key is left")

// Leave passes over those of the key that is being read that wait for these topics only, and over all of them if there are none. The
// next page goes on behind that. It is to be called from within take, which then returns ErrLeave.
func (s *ExceptionScan) Leave(topics []string) { s.rest, s.leave = topics != nil, topics }

// Page hands up to limit exceptions to take; the bytes are valid during the call only, and an error of take ends it. more
// is false behind the last page. After an error the same page is asked for again, from behind what take got.
func (s *ExceptionScan) Page(ctx context.Context, limit int, take func(bson.Raw) error) (more bool, err error) {
	err = mongodb.AfterCommitted(ctx, s.Coll, func(ctx context.Context) (err error) {
		more, err = s.page(ctx, limit, take)
		return err
	})
	return more, err
}

func (s *ExceptionScan) page(ctx context.Context, limit int, take func(bson.Raw) error) (more bool, err error) {
	for {
		rest := s.rest
		n, err := s.read(ctx, limit, take)
		switch {
		case errors.Is(err, ErrLeave):
			return true, nil
		case err != nil:
			return false, err
		case n == limit:
			return true, nil
		case !rest: // there is nothing behind it
			return false, nil
		}
		s.rest = false
		limit -= n
	}
}

// read makes one query: of the rest of the last key, or of all keys behind it.
func (s *ExceptionScan) read(ctx context.Context, limit int, take func(bson.Raw) error) (n int, err error) {
	cur, err := mongodb.Majority(s.Coll).Find(ctx, s.Part.AddFilter(s.filter()), options.Find().SetSort(s.sort()).
		SetLimit(int64(limit)).SetBatchSize(int32(limit)).SetAllowDiskUse(true)) // N21
	if err != nil {
		return 0, mongodb.DescribeRefusal(err, "reading exceptions of "+mongodb.Namespace(s.Coll), "find", mongodb.Namespace(s.Coll), "")
	}
	err = mongodb.EachDocument(ctx, cur, "reading exceptions of "+mongodb.Namespace(s.Coll), func(raw bson.Raw) error {
		n++
		s.reached(raw)
		return take(raw)
	})
	return n, err
}

func (s *ExceptionScan) reached(raw bson.Raw) {
	key, pos, id := raw.Lookup("key"), raw.Lookup("pos"), mongodb.CloneValue(raw.Lookup("_id"))
	if key.Type == bson.TypeArray { // it stands at its least element, and compares greater than all text: nothing is behind it
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

func (s *ExceptionScan) filter() bson.D {
	d := outboxes.IsException()
	read := s.odd
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
	return append(d, waiting(s.Only, skip)...)
}

// keyIn matches documents with one of the keys. A service may have stored a document or a regular expression as a key; in a
// filter the server would take it for an operator.
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

// sort leaves the key out where there is only one: the server merges the three states only by what is behind their bounds.
func (s *ExceptionScan) sort() bson.D {
	if s.begun && s.rest {
		return bson.D{{Key: "pos", Value: 1}}
	}
	return bson.D{{Key: "key", Value: 1}, {Key: "pos", Value: 1}}
}

// waiting is the condition on the targets that an exception waits for.
func waiting(only, skip []string) bson.D {
	var and bson.A
	either := func(cond bson.D) {
		and = append(and, bson.D{{Key: "$or", Value: bson.A{
			bson.D{{Key: "pending", Value: nil}}, bson.D{{Key: "pending", Value: cond}},
		}}})
	}
	if only != nil {
		either(bson.D{{Key: "$in", Value: only}})
	}
	if len(skip) > 0 {
		either(bson.D{{Key: "$elemMatch", Value: bson.D{{Key: "$nin", Value: skip}}}})
	}
	if and == nil {
		return nil
	}
	return bson.D{{Key: "$and", Value: and}}
}

func orNull(v bson.RawValue) any {
	if v.Type == 0 {
		return nil
	}
	return v
}

// ExceptionKey is how an exception names its ordering key: Key as stored, which may be missing, and the text of what stands
// in for it.
type ExceptionKey struct {
	Key         bson.RawValue `bson:"key"`
	AggregateID bson.RawValue `bson:"aggregateid"`
}

// DueRetries are the keys of up to limit exceptions whose next attempt is due by the server's clock, the earliest first; a
// key may be named several times. near is about the server's time, and only chooses the range of the index. Those that wait
// only for topics of skip are left out. It is one read of an index range, cheap where nothing is due.
func DueRetries(ctx context.Context, coll *mongo.Collection, near time.Time, skip []string, limit int, p slot.Range) ([]ExceptionKey, error) {
	cur, err := mongodb.Majority(coll).Find(ctx, p.AddFilter(dueFilter(near, skip)), options.Find().SetSort(bson.D{{Key: "nextAt", Value: 1}}).SetLimit(int64(limit)).
		SetProjection(bson.D{{Key: "_id", Value: 0}, {Key: "key", Value: 1}, {Key: "aggregateid", Value: 1}}))
	if err != nil {
		return nil, mongodb.DescribeRefusal(err, "looking for due retries in "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll), "")
	}
	var out []ExceptionKey
	if err := cur.All(ctx, &out); err != nil {
		return nil, fmt.Errorf("looking for due retries in %s: %w", mongodb.Namespace(coll), err)
	}
	return out, nil
}

func dueFilter(near time.Time, skip []string) bson.D {
	return append(bson.D{
		{Key: "nextAt", Value: bson.D{{Key: "$lte", Value: bson.NewDateTimeFromTime(near.Add(time.Second))}}},
		{Key: "state", Value: "retry"},
		{Key: "$expr", Value: bson.D{{Key: "$lte", Value: bson.A{"$nextAt", "$$NOW"}}}},
	}, waiting(nil, skip)...)
}

// EachException hands the place of each exception of coll to take, in no order: its id, key, pos, pending and origin. The
// bytes are valid during the call only. It sees everything that was committed before the call. It holds one reply in memory.
func EachException(ctx context.Context, coll *mongo.Collection, p slot.Range, take func(bson.Raw) error) error {
	return mongodb.AfterCommitted(ctx, coll, func(ctx context.Context) error {
		cur, err := mongodb.Majority(coll).Find(ctx, p.AddFilter(outboxes.IsException()),
			options.Find().SetBatchSize(5000).SetProjection(bson.D{
				{Key: "key", Value: 1}, {Key: "aggregateid", Value: 1}, {Key: "pos", Value: 1}, {Key: "pending", Value: 1}, {Key: "origin", Value: 1},
			}))
		if err != nil {
			return mongodb.DescribeRefusal(err, "reading exceptions of "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll), "")
		}
		return mongodb.EachDocument(ctx, cur, "reading exceptions of "+mongodb.Namespace(coll), take)
	})
}
