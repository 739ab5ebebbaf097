package setaside

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/cursor"
	"github.com/outrelay/outrelay/internal/mongodb/schema"
)

// Store stores messages that are set aside. Its methods join the transaction of their context. It is safe for concurrent
// use. Package setasidetest has its contract as tests.
type Store interface {
	// EnsureIndexes prepares the store. Call it before the first message.
	EnsureIndexes(ctx context.Context) error

	// Add stores messages, due after wait. A message without a failed attempt has no due time: it follows the messages of its
	// queue at once. A message that is stored already stays as it is. Call Add in the transaction that moves the watermark past the
	// messages. The error of a record that does not fit is ErrTooLarge.
	Add(ctx context.Context, wait time.Duration, messages ...*Message) error

	// Postpone stores the attempts of m, which failed again, and makes it due after wait. It ends the requests of operators for
	// the queue of m that are older than m.ReadAt.
	Postpone(ctx context.Context, m *Message, wait time.Duration) error

	// First returns the first message of a queue, or nil if the queue is empty.
	First(ctx context.Context, p Place, queue Digest) (*Message, error)

	// Take deletes m in the transaction of ctx, which has to handle the message. It returns false if m is not the first of
	// its queue any more: another member has handled it.
	Take(ctx context.Context, m *Message) (bool, error)

	// Remove deletes m. It returns false if m does not exist.
	Remove(ctx context.Context, m *Message) (bool, error)

	// Heads returns the queues of these places.
	Heads(ctx context.Context, places []Place) ([]Head, error)

	// Waiting returns those of the queues that have messages.
	Waiting(ctx context.Context, p Place, queues []Digest) ([]Digest, error)

	// Failing returns how many queues of a handler have a message that failed, at most limit.
	Failing(ctx context.Context, handler string, limit int) (int, error)

	// Census returns how many messages of a group wait. It reads one document. If the count in that document is older than
	// CensusInterval, and member is the keeper or the keeper is late, it counts all messages of the group: so one member counts
	// for all others. The keeper passes the places with messages to findUnread, which returns those that no member reads.
	// It records the member with its handlers if they have changed, and else every 15 seconds.
	Census(ctx context.Context, member Member, findUnread func(ctx context.Context, places []Place) ([]Place, error)) (Census, error)

	// Handlers returns the names of the handlers of the members that run, in order: of those that took a Census of the group in the
	// last 30 seconds, and did not leave. The list is empty if no member runs.
	Handlers(ctx context.Context, group string) ([]string, error)

	// Leave removes the record of a member that ends.
	Leave(ctx context.Context, group, member string) error

	// Requested returns the queues of a group for which operators have requested something: an attempt, or that messages are
	// given up.
	Requested(ctx context.Context, group string) ([]Request, error)

	// Discarded returns messages of a queue that operators have discarded, in order: at most MaxDiscarded, of which some may be gone
	// already. Call it again after these are given up.
	Discarded(ctx context.Context, queue Queue) ([]Message, error)

	// Stored returns those of the ids that messages have.
	Stored(ctx context.Context, ids []Digest) ([]Digest, error)
}

// Queue identifies a queue.
type Queue struct {
	Place  `bson:",inline"`
	Digest Digest `bson:"q"`
}

// Request is a queue for which operators have requested something.
type Request struct {
	Queue    `bson:",inline"`
	Discards int `bson:"discards"` // messages to give up
}

// Head is a queue with messages.
type Head struct {
	Queue
	Wait time.Duration // until the first message is due; 0 if it is due
}

// MaxDiscarded is how many messages Discarded returns at once. All of them are in memory, with their values.
const MaxDiscarded = 16

// DefaultCollection is the name of the collection of messages that are set aside.
const DefaultCollection = "inbox_waiting"

// CountsSuffix is the end of the name of the collection that has one document for each group, with its last Census.
const CountsSuffix = "_counts"

// Collection is the Store in a collection of MongoDB. Outside of transactions its writes have majority write concern.
type Collection struct {
	coll   *mongo.Collection
	counts *mongo.Collection // of Census
}

// New returns the store in the collection name of db. It does no I/O: call EnsureIndexes before the first message.
func New(db *mongo.Database, name string) *Collection {
	return &Collection{coll: mongodb.Majority(db.Collection(name)), counts: mongodb.Majority(db.Collection(name + CountsSuffix))}
}

// queueFields are the fields of the index "queues", in order.
var queueFields = []string{"h", "t", "p", "q", "g", "o", "due", "since"}

// EnsureIndexes creates the collection and its indexes.
func (s *Collection) EnsureIndexes(ctx context.Context) error {
	var keys bson.D
	for _, field := range queueFields {
		keys = append(keys, bson.E{Key: field, Value: 1})
	}

	err := schema.Change(ctx, s.coll, func(ctx context.Context) error {
		_, err := s.coll.Indexes().CreateMany(ctx, []mongo.IndexModel{
			{Keys: keys, Options: options.Index().SetName("queues")},
			{
				Keys: bson.D{
					{Key: "h", Value: 1},
					{Key: "t", Value: 1},
					{Key: "p", Value: 1},
					{Key: "q", Value: 1},
					{Key: "rq", Value: 1},
					{Key: "dc.at", Value: 1},
				},
				Options: options.Index().SetName("requested").SetPartialFilterExpression(isRequested),
			},
		})
		return err
	})
	if err != nil {
		return fmt.Errorf("creating the indexes of %s: %w", s.coll.Name(), err)
	}
	return nil
}

// Add stores messages, due after wait: see Store.
func (s *Collection) Add(ctx context.Context, wait time.Duration, messages ...*Message) error {
	if len(messages) == 0 {
		return nil
	}
	var models []mongo.WriteModel
	for _, message := range messages {
		if err := message.CheckSize(); err != nil {
			return err
		}
		models = append(models, addition(message, wait))
	}

	_, err := s.coll.BulkWrite(ctx, models, options.BulkWrite().SetOrdered(false))
	switch {
	case areDuplicates(err):
		// Another process has stored the messages at the same time.
		return nil
	case IsTooLarge(err):
		return fmt.Errorf("%w: %w", ErrTooLarge, err)
	case err != nil:
		return fmt.Errorf("setting messages aside: %w", err)
	}
	return nil
}

// addition returns the write that stores message, unless it exists.
func addition(message *Message, wait time.Duration) mongo.WriteModel {
	added := bson.D{{Key: "at", Value: "$$NOW"}}
	// An untried message has no due time: it waits for the message before it. The server calculates the times, because
	// the clocks of processes differ.
	if message.Failed > 0 {
		added = append(added,
			bson.E{Key: "since", Value: mongodb.AfterNow(-message.Elapsed)},
			bson.E{Key: "due", Value: mongodb.AfterNow(wait)})
	}
	if message.Requested {
		added = append(added, bson.E{Key: "rq", Value: "$$NOW"})
	}

	// The fields of a document that exists win, so a repetition changes nothing.
	merged := bson.D{{Key: "$mergeObjects", Value: bson.A{bson.D{{Key: "$literal", Value: message}}, added, "$$ROOT"}}}
	update := mongo.Pipeline{{{Key: "$replaceWith", Value: merged}}}
	return mongo.NewUpdateOneModel().SetFilter(byID(message.ID)).SetUpdate(update).SetUpsert(true)
}

// areDuplicates reports whether err is only of writes that met a document of another process.
func areDuplicates(err error) bool {
	bulk, ok := errors.AsType[mongo.BulkWriteException](err)
	if !ok || bulk.WriteConcernError != nil {
		return false
	}
	return !slices.ContainsFunc(bulk.WriteErrors, func(e mongo.BulkWriteError) bool { return !mongo.IsDuplicateKeyError(e.WriteError) })
}

// Postpone stores the attempts of message: see Store.
func (s *Collection) Postpone(ctx context.Context, message *Message, wait time.Duration) error {
	update := mongo.Pipeline{{{Key: "$set", Value: bson.D{
		{Key: "n", Value: message.Failed},
		{Key: "s", Value: message.Spared},
		{Key: "hist", Value: bson.D{{Key: "$literal", Value: message.History}}},
		// A message that was untried fails for the first time now.
		{Key: "since", Value: bson.D{{Key: "$ifNull", Value: bson.A{"$since", mongodb.AfterNow(-message.Elapsed)}}}},
		{Key: "due", Value: mongodb.AfterNow(wait)},
	}}}}
	if _, err := s.coll.UpdateOne(ctx, byID(message.ID), update); err != nil {
		return fmt.Errorf("postponing a message that is set aside: %w", err)
	}

	// The attempt was the one that was requested, for the whole queue. A later request is about an attempt after it.
	requests := append(inQueue(message.Place, message.Queue),
		bson.E{Key: "rq", Value: bson.D{{Key: "$gt", Value: time.Time{}}, {Key: "$lte", Value: message.ReadAt}}},
		bson.E{Key: "dc", Value: nil})
	end := bson.D{{Key: "$unset", Value: bson.D{{Key: "rq", Value: ""}}}}
	if _, err := s.coll.UpdateMany(ctx, requests, end); err != nil {
		return fmt.Errorf("ending the requests for a message that is set aside: %w", err)
	}
	return nil
}

// First returns the first message of a queue: see Store.
func (s *Collection) First(ctx context.Context, place Place, queue Digest) (first *Message, err error) {
	first, err = s.readFirst(ctx, place, queue)
	if first != nil || err != nil {
		return first, err
	}
	// Its caller forgets an empty queue.
	err = s.afterCommitted(ctx, func(ctx context.Context) (err error) {
		first, err = s.readFirst(ctx, place, queue)
		return err
	})
	return first, err
}

// afterCommitted calls a read whose caller acts on what does not exist: it must not miss a message that was stored before. A
// transaction reads the latest state anyway.
func (s *Collection) afterCommitted(ctx context.Context, read func(ctx context.Context) error) error {
	if mongo.SessionFromContext(ctx) != nil {
		return read(ctx)
	}
	return mongodb.AfterCommitted(ctx, s.coll, read)
}

func (s *Collection) readFirst(ctx context.Context, place Place, queue Digest) (*Message, error) {
	type message struct {
		Message     `bson:",inline"`
		Elapsed     *int64     `bson:"elapsed"` // milliseconds; nil while untried
		RequestedAt *time.Time `bson:"rq"`
		Now         time.Time  `bson:"now"`
	}
	docs, err := aggregate[message](ctx, s, "reading a queue of messages that are set aside", mongo.Pipeline{
		{{Key: "$match", Value: inQueue(place, queue)}},
		{{Key: "$sort", Value: queueOrder}},
		{{Key: "$limit", Value: 1}},
		{{Key: "$set", Value: bson.D{
			{Key: "elapsed", Value: bson.D{{Key: "$subtract", Value: bson.A{"$$NOW", "$since"}}}},
			{Key: "now", Value: "$$NOW"},
		}}},
	})
	if err != nil || len(docs) == 0 {
		return nil, err
	}

	m := &docs[0].Message
	m.Requested, m.ReadAt = docs[0].RequestedAt != nil, docs[0].Now
	if docs[0].Elapsed != nil {
		m.Elapsed = max(0, time.Duration(*docs[0].Elapsed)*time.Millisecond)
	}
	return m, nil
}

// Take deletes message if it is the first of its queue: see Store.
func (s *Collection) Take(ctx context.Context, message *Message) (bool, error) {
	var first struct {
		ID Digest `bson:"_id"`
	}
	opts := options.FindOne().SetSort(queueOrder).SetProjection(bson.D{{Key: "_id", Value: 1}})
	err := s.coll.FindOne(ctx, inQueue(message.Place, message.Queue), opts).Decode(&first)
	if errors.Is(err, mongo.ErrNoDocuments) || err == nil && first.ID != message.ID {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("checking the order of a queue: %w", err)
	}
	return s.Remove(ctx, message)
}

// Remove deletes message: see Store.
func (s *Collection) Remove(ctx context.Context, message *Message) (bool, error) {
	res, err := s.coll.DeleteOne(ctx, byID(message.ID))
	if err != nil {
		return false, fmt.Errorf("removing a message that was set aside: %w", err)
	}
	return res.DeletedCount > 0, nil
}

// Waiting returns those of the queues that have messages: see Store.
func (s *Collection) Waiting(ctx context.Context, place Place, queues []Digest) ([]Digest, error) {
	if len(queues) == 0 {
		return nil, nil
	}

	match := append(inPlace(place), bson.E{Key: "q", Value: bson.D{{Key: "$in", Value: queues}}})
	type waiting struct {
		Queue Digest `bson:"_id"`
	}
	var docs []waiting
	err := s.afterCommitted(ctx, func(ctx context.Context) (err error) {
		docs, err = aggregate[waiting](ctx, s, "looking for waiting messages of a key", mongo.Pipeline{
			{{Key: "$match", Value: match}},
			{{Key: "$group", Value: bson.D{{Key: "_id", Value: "$q"}}}},
		})
		return err
	})
	found := make([]Digest, len(docs))
	for i, d := range docs {
		found[i] = d.Queue
	}
	return found, err
}

// Failing returns how many queues of a handler have a message that failed: see Store.
func (s *Collection) Failing(ctx context.Context, handler string, limit int) (int, error) {
	// An untried message has no due time. The index "queues" has all fields, so no document is read.
	queue := bson.D{{Key: "_id", Value: 0}, {Key: "t", Value: 1}, {Key: "p", Value: 1}, {Key: "q", Value: 1}}
	type count struct {
		N int `bson:"n"`
	}

	docs, err := aggregate[count](ctx, s, "counting the keys that failed", mongo.Pipeline{
		{{Key: "$match", Value: bson.D{{Key: "h", Value: handler}, {Key: "due", Value: bson.D{{Key: "$gt", Value: time.Time{}}}}}}},
		{{Key: "$project", Value: queue}},
		{{Key: "$group", Value: bson.D{{Key: "_id", Value: "$$ROOT"}}}},
		{{Key: "$limit", Value: limit}},
		{{Key: "$count", Value: "n"}},
	})

	// $count returns no document for none.
	if err != nil || len(docs) == 0 {
		return 0, err
	}
	return docs[0].N, nil
}

// Requested returns the queues of a group for which operators have requested something: see Store. It reads the index alone.
func (s *Collection) Requested(ctx context.Context, group string) ([]Request, error) {
	oneIfDiscarded := bson.D{{Key: "$cond", Value: bson.A{bson.D{{Key: "$gt", Value: bson.A{"$dc.at", nil}}}, 1, 0}}}
	return aggregate[Request](ctx, s, "looking for requests of operators", mongo.Pipeline{
		{{Key: "$match", Value: append(inGroup(group), isRequested...)}},
		{{Key: "$group", Value: bson.D{{Key: "_id", Value: queueID}, {Key: "discards", Value: bson.D{{Key: "$sum", Value: oneIfDiscarded}}}}}},
		{{Key: "$replaceWith", Value: bson.D{{Key: "$mergeObjects", Value: bson.A{"$_id", bson.D{{Key: "discards", Value: "$discards"}}}}}}},
	})
}

// Discarded returns the messages of a queue that operators have discarded: see Store.
func (s *Collection) Discarded(ctx context.Context, queue Queue) ([]Message, error) {
	filter := slices.Concat(inQueue(queue.Place, queue.Digest), isRequested, isDiscarded)
	cur, err := cursor.Find(ctx, s.coll, filter, options.Find().SetLimit(MaxDiscarded))
	list, err := cursor.All[Message](ctx, "reading discarded messages", cur, err)
	// The index of the requests has no offsets.
	slices.SortFunc(list, func(a, b Message) int {
		return cmp.Or(cmp.Compare(a.Generation, b.Generation), cmp.Compare(a.Offset, b.Offset))
	})
	return list, err
}

// Stored returns those of the ids that messages have: see Store.
func (s *Collection) Stored(ctx context.Context, ids []Digest) ([]Digest, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	type stored struct {
		ID Digest `bson:"_id"`
	}
	opts := options.Find().SetProjection(bson.D{{Key: "_id", Value: 1}})
	cur, err := cursor.Find(ctx, s.coll, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}, opts)
	docs, err := cursor.All[stored](ctx, "looking for messages that are set aside", cur, err)
	if err != nil {
		return nil, err
	}

	found := make([]Digest, len(docs))
	for i, d := range docs {
		found[i] = d.ID
	}
	return found, nil
}

// Retire removes all messages of a handler that no longer exists. It returns their number.
func (s *Collection) Retire(ctx context.Context, handler string) (int64, error) {
	res, err := s.coll.DeleteMany(ctx, bson.D{{Key: "h", Value: handler}})
	if err != nil {
		return 0, fmt.Errorf("removing the messages of %s: %w", handler, err)
	}
	return res.DeletedCount, nil
}

// aggregate returns what pipeline produces. doing names the purpose in errors.
func aggregate[T any](ctx context.Context, collection *Collection, doing string, pipeline mongo.Pipeline) ([]T, error) {
	cur, err := cursor.Aggregate(ctx, collection.coll, pipeline)
	return cursor.All[T](ctx, doing, cur, err)
}

// queueOrder is the order of the messages of a queue.
var queueOrder = bson.D{{Key: "g", Value: 1}, {Key: "o", Value: 1}}

// queueID groups messages by their Queue.
var queueID = bson.D{{Key: "h", Value: "$h"}, {Key: "t", Value: "$t"}, {Key: "p", Value: "$p"}, {Key: "q", Value: "$q"}}

// isRequested matches messages with a request of an operator. Another comparison would not use the partial index.
var isRequested = bson.D{{Key: "rq", Value: bson.D{{Key: "$gt", Value: time.Time{}}}}}

// isDiscarded matches messages that an operator has discarded.
var isDiscarded = bson.D{{Key: "dc.at", Value: bson.D{{Key: "$gt", Value: time.Time{}}}}}

// inGroup matches the messages of a group. "0" follows "/", so the range of the index has exactly the handlers with that prefix. They
// may be of another group: the name of a group may have slashes, the name of a handler has none.
func inGroup(group string) bson.D {
	return bson.D{{Key: "h", Value: bson.D{
		{Key: "$gt", Value: group + "/"},
		{Key: "$lt", Value: group + "0"},
		{Key: "$regex", Value: "^" + regexp.QuoteMeta(group) + "/[^/]*$"},
	}}}
}

func byID(id Digest) bson.D { return bson.D{{Key: "_id", Value: id}} }

func inPlace(place Place) bson.D {
	return bson.D{{Key: "h", Value: place.Handler}, {Key: "t", Value: place.Topic}, {Key: "p", Value: place.Partition}}
}

func inQueue(place Place, queue Digest) bson.D {
	return append(inPlace(place), bson.E{Key: "q", Value: queue})
}

// IsTooLarge reports whether the server or the driver rejected a document because of its size.
func IsTooLarge(err error) bool {
	const bsonObjectTooLarge = 10334
	return mongodb.HasCode(err, bsonObjectTooLarge, 17419, 17420) ||
		err != nil && strings.Contains(err.Error(), "an inserted document is too large")
}
