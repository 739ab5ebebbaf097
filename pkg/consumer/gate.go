package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// DefaultGates is the name of the collection of a KeyGate.
const DefaultGates = "inbox_gates"

// MaxBehind is how many messages of one key may wait behind each other. Above it the lane waits for room.
const MaxBehind = 10_000

// KeyGate keeps the order of a key while one of its messages waits elsewhere: in a retry topic, at the end of its topic, or
// in the outbox. It has one document for each key of which something waits, with the identities that wait, in order; only
// the first of them may be handled, and every other message of the key follows into the first retry topic.
//
// A handler that is inside of its Middleware pays one read for each message; a key that is blocked costs one more write for
// each message that is moved, and one for each that is handled. What waits behind a message goes round in the retry topic
// until its turn has come, so a long ladder under a busy key costs records.
type KeyGate struct {
	coll *mongo.Collection
}

// NewKeyGate makes a gate in db, in the collection DefaultGates unless name is another. It does no I/O and needs no index.
func NewKeyGate(db *mongo.Database, name string) (*KeyGate, error) {
	if db == nil {
		return nil, fmt.Errorf("%w: key gate: the database is nil", ErrConfiguration)
	}
	if name == "" {
		name = DefaultGates
	}
	return &KeyGate{coll: majorityCollection(db, name)}, nil
}

// gateID names a key of a handler. Retry topics have the gate of the topic that their messages came from.
type gateID struct {
	Group   string `bson:"group"`
	Handler string `bson:"handler"`
	Topic   string `bson:"topic"`
	Key     []byte `bson:"key"`
}

func gateIDOf(m *Message, handler string) gateID {
	return gateID{Group: m.Group, Handler: handler, Topic: originOf(m).Topic, Key: m.Key}
}

// waiterID is how a message is named in the list of a gate.
func waiterID(m *Message) string { return m.Namespace + "/" + dedupID(m) }

type gateDoc struct {
	ID      gateID   `bson:"_id"`
	Waiting []string `bson:"waiting"`
}

// Middleware lets a message through whose key has nothing waiting before it, and takes it out of the list in the
// transaction in which it is handled. Others get a *BlockedError, by which a policy moves them behind. It is to be the
// outermost, for it goes by the record's own key; BlockingKeys gives it to the handlers. A message without a key passes.
func (g *KeyGate) Middleware() Middleware {
	return func(next Handler) Handler {
		return HandlerFunc(func(ctx context.Context, m *Message) error {
			if len(m.Key) == 0 {
				return next.Handle(ctx, m)
			}
			handler := HandlerName(ctx)
			var doc gateDoc
			err := g.coll.FindOne(ctx, bson.D{{Key: "_id", Value: gateIDOf(m, handler)}}).Decode(&doc)
			switch {
			case errors.Is(err, mongo.ErrNoDocuments):
				return next.Handle(ctx, m)
			case err != nil:
				return fmt.Errorf("reading the gate of a key: %w", err)
			case len(doc.Waiting) > 0 && doc.Waiting[0] != waiterID(m):
				return &BlockedError{Behind: doc.Waiting[0]}
			}
			result := next.Handle(ctx, m)
			if result == nil || errors.Is(result, ErrDrop) {
				if err := g.removeWaiter(ctx, m, handler); err != nil {
					return err
				}
			}
			return result
		})
	}
}

// appendWaiter puts the message at the end of the list, unless it is in it.
func (g *KeyGate) appendWaiter(ctx context.Context, m *Message, handler string) error {
	if len(m.Key) == 0 {
		return nil
	}
	me := bson.D{{Key: "$literal", Value: waiterID(m)}}
	list := bson.D{{Key: "$ifNull", Value: bson.A{"$waiting", bson.A{}}}}
	grown := bson.D{{Key: "$cond", Value: bson.A{
		bson.D{{Key: "$or", Value: bson.A{bson.D{{Key: "$in", Value: bson.A{me, list}}}, bson.D{{Key: "$gte", Value: bson.A{bson.D{{Key: "$size", Value: list}}, MaxBehind}}}}}},
		list,
		bson.D{{Key: "$concatArrays", Value: bson.A{list, bson.A{me}}}},
	}}}
	var doc gateDoc
	err := g.coll.FindOneAndUpdate(ctx, bson.D{{Key: "_id", Value: gateIDOf(m, handler)}},
		mongo.Pipeline{{{Key: "$set", Value: bson.D{{Key: "waiting", Value: grown}}}}},
		options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.After)).Decode(&doc)
	if err != nil {
		return fmt.Errorf("closing the gate of a key: %w", err)
	}
	if !slices.Contains(doc.Waiting, waiterID(m)) {
		return &BackpressureError{What: "the list of messages that wait behind one of their key", Limit: MaxBehind}
	}
	return nil
}

// removeWaiter takes the message out of the list, and the list away with the last one. Both are done in one step or, in a
// transaction, in one transaction, so nothing that comes meanwhile is lost.
func (g *KeyGate) removeWaiter(ctx context.Context, m *Message, handler string) error {
	if len(m.Key) == 0 {
		return nil
	}
	id := bson.E{Key: "_id", Value: gateIDOf(m, handler)}
	_, err := g.coll.UpdateOne(ctx, bson.D{id}, bson.D{{Key: "$pull", Value: bson.D{{Key: "waiting", Value: waiterID(m)}}}})
	if err == nil {
		_, err = g.coll.DeleteOne(ctx, bson.D{id, {Key: "waiting", Value: bson.A{}}})
	}
	if err != nil {
		return fmt.Errorf("opening the gate of a key: %w", err)
	}
	return nil
}

// Blocked is a key of which messages wait.
type Blocked struct {
	Group, Handler, Topic string
	Key                   []byte
	Waiting               []string // namespace and id of each, in order
}

// List is the keys of a group of which messages wait, at most limit.
func (g *KeyGate) List(ctx context.Context, group string, limit int) ([]Blocked, error) {
	cur, err := g.coll.Find(ctx, bson.D{{Key: "_id.group", Value: group}}, options.Find().SetLimit(int64(max(limit, 1))))
	if err != nil {
		return nil, fmt.Errorf("listing blocked keys: %w", err)
	}
	var docs []gateDoc
	if err := cur.All(ctx, &docs); err != nil {
		return nil, fmt.Errorf("listing blocked keys: %w", err)
	}
	out := make([]Blocked, len(docs))
	for i, d := range docs {
		out[i] = Blocked{Group: d.ID.Group, Handler: d.ID.Handler, Topic: d.ID.Topic, Key: d.ID.Key, Waiting: d.Waiting}
	}
	return out, nil
}

// Clear opens the gate of a key whatever waits: for one whose first message is lost, for example because the retry topic was
// deleted or its retention passed.
func (g *KeyGate) Clear(ctx context.Context, b Blocked) error {
	_, err := g.coll.DeleteOne(ctx, bson.D{{Key: "_id", Value: gateID{b.Group, b.Handler, b.Topic, b.Key}}})
	if err != nil {
		return fmt.Errorf("opening the gate of a key: %w", err)
	}
	return nil
}
