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

// DefaultGates is the default name of the collection of a KeyGate.
const DefaultGates = "inbox_gates"

// MaxBehind is the maximum number of messages of one key that wait for each other. Above it the lane waits until the list
// is shorter.
const MaxBehind = 10_000

// KeyGate keeps the messages of a key in order while one of them waits elsewhere: in a retry topic, at the end of its topic,
// or in the outbox. It stores one document for each key with waiting messages, which lists their identities in order. Only
// the first of the list may be handled. Every other message of the key moves to the first retry topic.
//
// A handler inside of its Middleware pays one read for each message. A blocked key costs one more write for each message
// that moves, and one for each that is handled. The messages that wait for another one circulate in the retry topic until
// their turn. A policy with many retry topics and a busy key therefore write many records.
type KeyGate struct {
	coll *mongo.Collection
}

// NewKeyGate returns a gate in the collection name of db, or in DefaultGates if name is empty. It does no I/O and needs no
// index.
func NewKeyGate(db *mongo.Database, name string) (*KeyGate, error) {
	if db == nil {
		return nil, fmt.Errorf("%w: key gate: the database is nil", ErrConfiguration)
	}
	if name == "" {
		name = DefaultGates
	}
	return &KeyGate{coll: majorityCollection(db, name)}, nil
}

// gateID identifies a key of a handler. Messages in retry topics have the gate of their original topic.
type gateID struct {
	Group   string `bson:"group"`
	Handler string `bson:"handler"`
	Topic   string `bson:"topic"`
	Key     []byte `bson:"key"`
}

func gateIDOf(m *Message, handler string) gateID {
	return gateID{Group: m.Group, Handler: handler, Topic: originOf(m).Topic, Key: m.Key}
}

// waiterID returns the name of a message in the list of a gate.
func waiterID(m *Message) string { return m.Namespace + "/" + dedupID(m) }

type gateDoc struct {
	ID      gateID   `bson:"_id"`
	Waiting []string `bson:"waiting"`
}

// Middleware runs the handler if no earlier message of the key waits, and removes the message from the list in the
// transaction that handles it. Otherwise it returns a *BlockedError, and the policy moves the message. A message without a
// key always passes. The middleware must be the outermost, because it needs the original key of the record. The option
// BlockingKeys adds it to the handlers that need it.
func (g *KeyGate) Middleware() Middleware {
	return func(next Handler) Handler {
		return HandlerFunc(func(ctx context.Context, m *Message) error {
			if len(m.Key) == 0 {
				return next.Handle(ctx, m)
			}

			handler := HandlerName(ctx)
			var doc gateDoc
			err := g.coll.FindOne(ctx, bson.D{{Key: "_id", Value: gateIDOf(m, handler)}}).Decode(&doc)
			if errors.Is(err, mongo.ErrNoDocuments) {
				return next.Handle(ctx, m)
			}
			if err != nil {
				return fmt.Errorf("reading the gate of a key: %w", err)
			}
			if len(doc.Waiting) > 0 && doc.Waiting[0] != waiterID(m) {
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

// appendWaiter appends the message to the list of its key, unless the list contains it. It returns a *BackpressureError if
// the list is full.
func (g *KeyGate) appendWaiter(ctx context.Context, m *Message, handler string) error {
	if len(m.Key) == 0 {
		return nil
	}

	waiter := bson.D{{Key: "$literal", Value: waiterID(m)}}
	list := bson.D{{Key: "$ifNull", Value: bson.A{"$waiting", bson.A{}}}}
	isListed := bson.D{{Key: "$in", Value: bson.A{waiter, list}}}
	isFull := bson.D{{Key: "$gte", Value: bson.A{bson.D{{Key: "$size", Value: list}}, MaxBehind}}}
	appended := bson.D{{Key: "$cond", Value: bson.A{
		bson.D{{Key: "$or", Value: bson.A{isListed, isFull}}},
		list,
		bson.D{{Key: "$concatArrays", Value: bson.A{list, bson.A{waiter}}}},
	}}}

	var doc gateDoc
	err := g.coll.FindOneAndUpdate(ctx, bson.D{{Key: "_id", Value: gateIDOf(m, handler)}},
		mongo.Pipeline{{{Key: "$set", Value: bson.D{{Key: "waiting", Value: appended}}}}},
		options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.After)).Decode(&doc)
	if err != nil {
		return fmt.Errorf("closing the gate of a key: %w", err)
	}
	if !slices.Contains(doc.Waiting, waiterID(m)) {
		return &BackpressureError{What: "the list of waiting messages of a key", Limit: MaxBehind}
	}
	return nil
}

// removeWaiter removes the message from the list, and deletes the list if it is empty then. A message that is appended
// between the two writes is not lost: the delete matches only an empty list, and a transaction applies both or none.
func (g *KeyGate) removeWaiter(ctx context.Context, m *Message, handler string) error {
	if len(m.Key) == 0 {
		return nil
	}

	id := bson.E{Key: "_id", Value: gateIDOf(m, handler)}
	pull := bson.D{{Key: "$pull", Value: bson.D{{Key: "waiting", Value: waiterID(m)}}}}
	_, err := g.coll.UpdateOne(ctx, bson.D{id}, pull)
	if err == nil {
		_, err = g.coll.DeleteOne(ctx, bson.D{id, {Key: "waiting", Value: bson.A{}}})
	}
	if err != nil {
		return fmt.Errorf("opening the gate of a key: %w", err)
	}
	return nil
}

// Blocked describes a key with waiting messages.
type Blocked struct {
	Group, Handler, Topic string
	Key                   []byte
	Waiting               []string // namespace and id of each message, in order
}

// List returns the blocked keys of a group, at most limit.
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
		id := d.ID
		out[i] = Blocked{Group: id.Group, Handler: id.Handler, Topic: id.Topic, Key: id.Key, Waiting: d.Waiting}
	}
	return out, nil
}

// Clear unblocks a key and forgets its waiting messages. Use it if the first message of the list is lost, for example
// because the retry topic was deleted or its retention has passed.
func (g *KeyGate) Clear(ctx context.Context, b Blocked) error {
	_, err := g.coll.DeleteOne(ctx, bson.D{{Key: "_id", Value: gateID{b.Group, b.Handler, b.Topic, b.Key}}})
	if err != nil {
		return fmt.Errorf("opening the gate of a key: %w", err)
	}
	return nil
}
