// Package claims stores scheduled envelopes between their outbox and Kafka. A claim is one document with all envelopes that
// one transaction has taken out of outboxes, because a document for each of them would cost three times as much. The owner that
// claimed them sends them from its memory. A claim exists until all of its envelopes have an outcome; the next owner finds it
// after a crash (N19).
//
// An envelope that cannot be sent at once leaves the claim: the transaction that stores it in the collection `waiting`, or as a dead
// letter, also marks it as done.
package claims

import (
	"context"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/waiting"
)

// Name is the name of the collection in the state database, without its prefix.
const Name = "claims"

// Envelope is an envelope of a claim.
type Envelope struct {
	NS  string   `bson:"ns"`  // "db.collection" of the outbox
	Key string   `bson:"key"` // canonical text of the ordering key
	Pos string   `bson:"pos"` // distinguishes envelopes of one id in the store of waiting envelopes
	Raw bson.Raw `bson:"envelope"`
}

// Size returns about how many bytes the envelope adds to a claim.
func (e *Envelope) Size() int { return len(e.Raw) + len(e.NS) + len(e.Key) + len(e.Pos) + 64 }

// Entry returns the envelope as one that waits, to be sent at its due time.
func (e *Envelope) Entry(watcher string) waiting.Entry {
	due, _ := e.Raw.Lookup("dueAt").DateTimeOK()
	return waiting.Entry{
		Watcher: watcher, NS: e.NS, Raw: e.Raw, Key: e.Key, Slot: waiting.SlotOf(e.Raw), Pos: e.Pos,
		Reason: waiting.Queued, Origin: waiting.OriginScheduled, NextAt: time.UnixMilli(due),
	}
}

// Claim is a document of the collection.
type Claim struct {
	ID        string     `bson:"_id"` // the id of the watcher document, and a unique part
	Envelopes []Envelope `bson:"envelopes"`
	Done      []int32    `bson:"done"` // indexes of the envelopes that have left the claim
}

// NewID returns the id of a new claim of the owner of a watcher document.
func NewID(watcherID string) string { return watcherID + "/" + bson.NewObjectID().Hex() }

// IsDone reports whether the envelope at an index has left the claim.
func (c *Claim) IsDone(index int) bool { return slices.Contains(c.Done, int32(index)) }

// Insert stores a claim, in the transaction of tx.
func Insert(tx context.Context, coll *mongo.Collection, c *Claim) error {
	if c.Done == nil {
		c.Done = []int32{}
	}
	_, err := coll.InsertOne(tx, c)
	return mongodb.Refusal(err, "storing a claim of scheduled envelopes", "insert", mongodb.Namespace(coll))
}

// Find returns the claim with an id, in the transaction of tx if there is one. It returns nil if there is none.
func Find(tx context.Context, coll *mongo.Collection, id string) (found *Claim, err error) {
	err = each(tx, coll, bson.D{{Key: "_id", Value: id}}, func(c *Claim) error { found = c; return nil })
	return found, err
}

// EachOf calls take for each claim that was committed before the call, of a watcher document, or of all documents of a watcher.
func EachOf(ctx context.Context, coll *mongo.Collection, watcher string, take func(*Claim) error) error {
	coll = mongodb.Majority(coll)
	return mongodb.AfterCommitted(ctx, coll, func(ctx context.Context) error {
		return each(ctx, coll, ofWatcher(watcher), take)
	})
}

func each(ctx context.Context, coll *mongo.Collection, filter bson.D, take func(*Claim) error) error {
	const doing = "reading claims of scheduled envelopes"
	return mongodb.FindEach(ctx, coll, doing, filter, func(raw bson.Raw) error {
		var c Claim
		if err := bson.Unmarshal(raw, &c); err != nil {
			return err
		}
		return take(&c)
	})
}

// ofWatcher returns the condition for the claims of a watcher document, or of all documents of a watcher. A zero follows a slash.
func ofWatcher(watcher string) bson.D {
	return bson.D{{Key: "_id", Value: bson.D{{Key: "$gt", Value: watcher + "/"}, {Key: "$lt", Value: watcher + "0"}}}}
}

// Change is what one transaction changes in claims.
type Change struct {
	done  map[string][]int32
	ended []string
}

// Finish records that an envelope has left its claim.
func (c *Change) Finish(id string, index int32) {
	if c.done == nil {
		c.done = map[string][]int32{}
	}
	c.done[id] = append(c.done[id], index)
}

// End removes a claim whose envelopes all have outcomes.
func (c *Change) End(id string) { c.ended = append(c.ended, id) }

// IsEmpty reports whether nothing changes.
func (c *Change) IsEmpty() bool { return len(c.done)+len(c.ended) == 0 }

// Write writes the change, in the transaction of tx. It is idempotent.
func (c *Change) Write(tx context.Context, coll *mongo.Collection) error {
	var models []mongo.WriteModel
	for id, indexes := range c.done {
		if slices.Contains(c.ended, id) {
			continue
		}
		add := bson.D{{Key: "done", Value: bson.D{{Key: "$each", Value: indexes}}}}
		models = append(models, mongo.NewUpdateOneModel().SetFilter(bson.D{{Key: "_id", Value: id}}).
			SetUpdate(bson.D{{Key: "$addToSet", Value: add}}))
	}
	if len(c.ended) > 0 {
		models = append(models, mongo.NewDeleteManyModel().SetFilter(bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: c.ended}}}}))
	}
	if len(models) == 0 {
		return nil
	}
	_, err := coll.BulkWrite(tx, models)
	return mongodb.Refusal(err, "writing claims of scheduled envelopes", "find, update and remove", mongodb.Namespace(coll))
}

// Count returns the number of envelopes that have no outcome in the claims of a watcher document, or of all documents of a watcher.
func Count(ctx context.Context, coll *mongo.Collection, watcher string) (int64, error) {
	rows, err := mongodb.AggregateAll[struct {
		N int64 `bson:"n"`
	}](ctx, mongodb.Majority(coll), "counting claimed envelopes", mongo.Pipeline{
		{{Key: "$match", Value: ofWatcher(watcher)}},
		{{Key: "$group", Value: bson.D{{Key: "_id", Value: nil}, {Key: "n", Value: bson.D{{Key: "$sum", Value: bson.D{
			{Key: "$subtract", Value: bson.A{bson.D{{Key: "$size", Value: "$envelopes"}}, bson.D{{Key: "$size", Value: "$done"}}}},
		}}}}}}},
	})
	if err != nil || len(rows) == 0 {
		return 0, err
	}
	return rows[0].N, nil
}

// MoveToWaiting moves the envelopes of all claims of a watcher document to the waiting envelopes, in fenced transactions. It is for a
// caller that holds the lease and sends nothing: the slots of the next owners may divide the envelopes of a claim.
func MoveToWaiting(ctx context.Context, f mongodb.Fencer, coll, store *mongo.Collection, watcher, watcherID string) error {
	return EachOf(ctx, coll, watcherID, func(c *Claim) error {
		var entries []waiting.Entry
		for i := range c.Envelopes {
			if !c.IsDone(i) {
				entries = append(entries, c.Envelopes[i].Entry(watcher))
			}
		}
		return f.Fenced(ctx, nil, func(tx context.Context) error {
			client := mongo.SessionFromContext(tx).Client()
			if err := waiting.Enter(tx, mongodb.InClient(client, store), entries); err != nil {
				return err
			}
			var end Change
			end.End(c.ID)
			return end.Write(tx, mongodb.InClient(client, coll))
		})
	})
}
