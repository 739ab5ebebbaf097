package waiting

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/cursor"
)

// Store reads the waiting envelopes of one slot of a watcher. Its reads are majority reads on the primary (N21).
type Store struct {
	coll    *mongo.Collection
	watcher string
	slot    slot.Range
}

// NewStore returns the store of the watcher's slot in coll, the collection `waiting` of the state database.
func NewStore(coll *mongo.Collection, watcher string, slot slot.Range) *Store {
	return &Store{coll: mongodb.Majority(coll), watcher: watcher, slot: slot}
}

// Collection returns the collection of the store.
func (s *Store) Collection() *mongo.Collection { return s.coll }

// Watcher returns the name of the watcher.
func (s *Store) Watcher() string { return s.watcher }

// findOptions returns the options of every query of the store. Positions and keys are compared as bytes, also if somebody has created
// the collection with another collation.
func findOptions() *options.FindOptionsBuilder { return options.Find().SetCollation(bytewise) }

var bytewise = &options.Collation{Locale: "simple"}

// filter returns the condition for the documents of the slot that satisfy and.
func (s *Store) filter(and ...bson.E) bson.D {
	return s.slot.AddFilter(append(bson.D{{Key: "watcher", Value: s.watcher}}, and...))
}

// DueKey is a key with envelopes whose next attempt is due.
type DueKey struct {
	ID  bson.Binary `bson:"_id"`
	NS  string      `bson:"ns"`
	Key string      `bson:"key"`
}

// DocumentID returns the id of the document that is due.
func (k DueKey) DocumentID() (id [IDSize]byte) {
	copy(id[:], k.ID.Data)
	return id
}

// DueKeys returns the keys of up to limit envelopes that are due by the server's clock, the earliest first. A key may occur
// several times. It leaves out envelopes that wait only for topics in skip. near is about the server's time, and only selects the
// range of the index. It costs little if nothing is due.
func (s *Store) DueKeys(ctx context.Context, near time.Time, skip []string, limit int) ([]DueKey, error) {
	filter := s.filter(append(bson.D{
		{Key: "nextAt", Value: bson.D{{Key: "$lte", Value: bson.NewDateTimeFromTime(near.Add(time.Second))}}},
		{Key: "$expr", Value: bson.D{{Key: "$lte", Value: bson.A{"$nextAt", "$$NOW"}}}},
	}, waitsOutside(skip)...)...)
	return mongodb.FindAll[DueKey](ctx, s.coll, "looking for envelopes that are due", filter,
		findOptions().SetSort(bson.D{{Key: "nextAt", Value: 1}}).SetLimit(int64(limit)).
			SetProjection(mongodb.Fields("ns", "key")))
}

// waitsOutside returns the condition that an envelope waits for other topics than one of skip. One that lists no topics or several may
// wait for any.
func waitsOutside(skip []string) bson.D {
	if len(skip) == 0 {
		return nil
	}
	return bson.D{{Key: "$and", Value: bson.A{bson.D{{Key: "topics", Value: bson.D{{Key: "$nin", Value: skip}}}}}}}
}

// Each calls take for each waiting envelope, in the order of the index, without its envelope and history. It sees everything that was
// committed before the call, and holds one response in memory. The server reads only the index.
func (s *Store) Each(ctx context.Context, take func(document *Document) error) error {
	fields := append(mongodb.Fields("ns", "id", "delivery", "key", "pos", "topics", "reason", "origin"), bson.E{Key: "_id", Value: 0})
	return mongodb.AfterCommitted(ctx, s.coll, func(ctx context.Context) error {
		return mongodb.FindEach(ctx, s.coll, "reading waiting envelopes", s.filter(), func(raw bson.Raw) error {
			document := ReadDocument(raw)
			return take(&document)
		}, findOptions().SetBatchSize(5000).SetProjection(fields))
	})
}

// Unneeded returns those of the topics that no envelope waits for.
func (s *Store) Unneeded(ctx context.Context, topics []string) ([]string, error) {
	left := map[string]bool{}
	for _, name := range topics {
		left[name] = true
	}

	err := mongodb.AfterCommitted(ctx, s.coll, func(ctx context.Context) error {
		cur, err := cursor.Aggregate(ctx, s.coll, mongo.Pipeline{
			{{Key: "$match", Value: s.filter()}},
			{{Key: "$group", Value: bson.D{{Key: "_id", Value: "$topics"}}}},
		})
		if err != nil {
			return fmt.Errorf("reading the topics of waiting envelopes: %w", err)
		}
		return mongodb.EachDocument(ctx, cur, "reading the topics of waiting envelopes", func(raw bson.Raw) error {
			list, _ := raw.Lookup("_id").StringValueOK()
			for _, name := range splitTopics(list) {
				delete(left, name)
			}
			return nil
		})
	})
	return slices.Sorted(maps.Keys(left)), err
}

// EachWithoutPayload calls take for each envelope that waits for one of topics, or lists no topics, in no order, without history: an earlier
// owner may have sent it, and only its id and topics matter. So an envelope has no headers and a null payload, unless it lists no topics: then
// its topics may depend on them. It sees everything that was committed before the call, and holds one response in memory.
func (s *Store) EachWithoutPayload(ctx context.Context, topics []string, take func(document *Document) error) error {
	ifUnlisted := func(value string, otherwise any) bson.D {
		return bson.D{{Key: "$cond", Value: bson.A{bson.D{{Key: "$eq", Value: bson.A{"$topics", ""}}}, value, otherwise}}}
	}
	pipeline := mongo.Pipeline{
		{{Key: "$match", Value: s.filter(bson.E{Key: "topics", Value: bson.D{
			{Key: "$in", Value: append(bson.A{"", bson.Regex{Pattern: ","}}, anyOf(topics)...)},
		}})}},
		{{Key: "$unset", Value: bson.A{"history", "error"}}},
		{{Key: "$set", Value: bson.D{
			{Key: "envelope.headers", Value: ifUnlisted("$envelope.headers", "$$REMOVE")},
			{Key: "envelope.payload", Value: ifUnlisted("$envelope.payload", nil)},
		}}},
	}

	const doing = "reading waiting envelopes that an earlier owner may have sent"
	return mongodb.AfterCommitted(ctx, s.coll, func(ctx context.Context) error {
		cur, err := cursor.Aggregate(ctx, s.coll, pipeline, options.Aggregate().SetCollation(bytewise).SetBatchSize(1000))
		if err != nil {
			return mongodb.DescribeError(err, doing, "find", mongodb.Namespace(s.coll))
		}
		return mongodb.EachDocument(ctx, cur, doing, func(raw bson.Raw) error {
			document := ReadDocument(raw)
			return take(&document)
		})
	})
}

func anyOf(list []string) bson.A {
	out := make(bson.A, len(list))
	for i, text := range list {
		out[i] = text
	}
	return out
}

// OfOutbox returns up to limit waiting envelopes of the outbox coll of db, with positions before
// a position, without their envelopes. It sees everything that was committed before the call.
func (s *Store) OfOutbox(ctx context.Context, db, coll, before string, limit int) (list []Document, err error) {
	filter := s.filterOutbox(db, coll, before)
	fields := mongodb.Fields("ns", "key", "pos", "topics", "origin")

	err = mongodb.AfterCommitted(ctx, s.coll, func(ctx context.Context) error {
		return mongodb.FindEach(ctx, s.coll, "reading the waiting events of a dropped collection", filter, func(raw bson.Raw) error {
			list = append(list, ReadDocument(raw))
			return nil
		}, findOptions().SetLimit(int64(limit)).SetProjection(fields))
	})
	return list, err
}

// CountOfOutbox returns how many envelopes OfOutbox returns without a limit.
func (s *Store) CountOfOutbox(ctx context.Context, db, coll, before string) (n int64, err error) {
	err = mongodb.AfterCommitted(ctx, s.coll, func(ctx context.Context) (err error) {
		n, err = s.coll.CountDocuments(ctx, s.filterOutbox(db, coll, before))
		return mongodb.DescribeError(err, "counting the waiting events of a dropped collection", "find", mongodb.Namespace(s.coll))
	})
	return n, err
}

// filterOutbox returns the condition for the envelopes of an outbox before a position.
func (s *Store) filterOutbox(db, coll, before string) bson.D {
	return s.filter(bson.E{Key: "ns", Value: db + "." + coll}, bson.E{Key: "pos", Value: bson.D{{Key: "$lt", Value: before}}})
}

// EachStamp calls take for each waiting envelope of a first delivery, in no order, with its namespace, id and topics, and the stamp alone of
// the envelope.
func (s *Store) EachStamp(ctx context.Context, take func(document *Document) error) error {
	fields := mongodb.Fields("ns", "id", "delivery", "topics", "envelope.ts")
	return mongodb.AfterCommitted(ctx, s.coll, func(ctx context.Context) error {
		return mongodb.FindEach(ctx, s.coll, "reading waiting envelopes", s.filter(), func(raw bson.Raw) error {
			document := ReadDocument(raw)
			if document.Delivery > 0 {
				return nil
			}
			return take(&document)
		}, findOptions().SetBatchSize(5000).SetProjection(fields))
	})
}

// OfIDs calls take for the waiting envelopes of the outbox ns whose ids are in list.
func (s *Store) OfIDs(ctx context.Context, ns string, list []bson.RawValue, take func(document *Document) error) error {
	filter := bson.D{{Key: "ns", Value: ns}, {Key: "id", Value: bson.D{{Key: "$in", Value: list}}}, {Key: "watcher", Value: s.watcher}}
	return mongodb.AfterCommitted(ctx, s.coll, func(ctx context.Context) error {
		return mongodb.FindEach(ctx, s.coll, "looking for waiting envelopes", filter, func(raw bson.Raw) error {
			document := ReadDocument(raw)
			return take(&document)
		}, findOptions())
	})
}
