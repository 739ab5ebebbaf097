package waiting

import (
	"context"
	"encoding/binary"
	"slices"
	"strconv"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/crash"
	"github.com/outrelay/outrelay/internal/mongodb"
)

// ClaimsName is the name of the collection of claims in the state database, without its prefix.
const ClaimsName = "claims"

// Claimed is a scheduled envelope of a claim.
type Claimed struct {
	NS  string   `bson:"ns"`  // "db.collection" of the outbox
	Key string   `bson:"key"` // canonical text of the ordering key
	Pos string   `bson:"pos"` // distinguishes envelopes of one id in the store of waiting envelopes
	Raw bson.Raw `bson:"envelope"`
}

// Size returns about how many bytes the envelope adds to a claim.
func (e *Claimed) Size() int { return len(e.Raw) + len(e.NS) + len(e.Key) + len(e.Pos) + 64 }

// Entry returns the envelope as one that waits, to be sent at its due time.
func (e *Claimed) Entry(watcher string) Entry {
	due, _ := e.Raw.Lookup("dueAt").DateTimeOK()
	return Entry{
		Watcher: watcher, NS: e.NS, Raw: e.Raw, Key: e.Key, Slot: SlotOf(e.Raw), Pos: e.Pos,
		Reason: Queued, Origin: OriginScheduled, NextAt: time.UnixMilli(due),
	}
}

// Claim is a document of the collection of claims: all envelopes that one transaction has taken out of outboxes, because a document for
// each of them would cost three times as much. The owner that claimed them sends them from its memory. A claim exists until all of its
// envelopes have an outcome; the next owner finds it after a crash (N19).
//
// An envelope that cannot be sent at once leaves the claim: the transaction that stores it as waiting, or as a dead letter, also marks it
// as done.
type Claim struct {
	ID        string    `bson:"_id"` // the id of the watcher document, and a unique part
	Envelopes []Claimed `bson:"envelopes"`
	Done      []int32   `bson:"done"` // indexes of the envelopes that have left the claim
}

// NewClaimID returns the id of a new claim of the owner of a watcher document.
func NewClaimID(watcherID string) string { return watcherID + "/" + bson.NewObjectID().Hex() }

// IsDone reports whether the envelope at an index has left the claim.
func (c *Claim) IsDone(index int) bool { return slices.Contains(c.Done, int32(index)) }

// InsertClaim stores a claim, in the transaction of tx.
func InsertClaim(tx context.Context, coll *mongo.Collection, claim *Claim) error {
	buffer := documents.Get().(*[]byte)
	defer documents.Put(buffer)
	*buffer = claim.appendDocument((*buffer)[:0])
	_, err := coll.InsertOne(tx, bson.Raw(*buffer))
	crash.At("mid-claim-write")
	return mongodb.DescribeError(err, "storing a claim of scheduled envelopes", "insert", mongodb.Namespace(coll))
}

// documents has buffers for the stored forms of claims, which are megabytes long. The driver keeps no reference to them.
var documents = sync.Pool{New: func() any { return new([]byte) }}

// appendDocument appends the stored form of a new claim. The driver would copy each envelope several times.
func (c *Claim) appendDocument(out []byte) []byte {
	size := 0
	for i := range c.Envelopes {
		size += c.Envelopes[i].Size()
	}

	out, start := appendLength(slices.Grow(out, size+256))
	out = appendText(out, "_id", c.ID)
	out, list := appendLength(appendElement(out, bson.TypeArray, "envelopes"))
	for i := range c.Envelopes {
		claimed := &c.Envelopes[i]
		var one int
		out, one = appendLength(appendElement(out, bson.TypeEmbeddedDocument, strconv.Itoa(i)))
		out = appendText(out, "ns", claimed.NS)
		out = appendText(out, "key", claimed.Key)
		out = appendText(out, "pos", claimed.Pos)
		out = append(appendElement(out, bson.TypeEmbeddedDocument, "envelope"), claimed.Raw...)
		out = endLength(out, one)
	}
	out = endLength(out, list)
	out, done := appendLength(appendElement(out, bson.TypeArray, "done"))
	out = endLength(out, done)
	return endLength(out, start)
}

// appendElement begins an element of a document.
func appendElement(out []byte, kind bson.Type, name string) []byte {
	return append(append(append(out, byte(kind)), name...), 0)
}

// appendText appends a string element.
func appendText(out []byte, name, text string) []byte {
	out = binary.LittleEndian.AppendUint32(appendElement(out, bson.TypeString, name), uint32(len(text)+1))
	return append(append(out, text...), 0)
}

// appendLength begins a document or array, whose length [endLength] sets at the offset that it returns.
func appendLength(out []byte) (longer []byte, offset int) { return append(out, 0, 0, 0, 0), len(out) }

// endLength ends a document or array.
func endLength(out []byte, offset int) []byte {
	out = append(out, 0)
	binary.LittleEndian.PutUint32(out[offset:], uint32(len(out)-offset))
	return out
}

// HasClaim reports whether the claim with an id exists, in the transaction of tx.
func HasClaim(tx context.Context, coll *mongo.Collection, id string) (bool, error) {
	return mongodb.Exists(tx, coll, bson.D{{Key: "_id", Value: id}})
}

// EachClaim calls take for each claim that was committed before the call, of a watcher document, or of all documents of a watcher.
func EachClaim(ctx context.Context, coll *mongo.Collection, watcher string, take func(*Claim) error) error {
	coll = mongodb.Majority(coll)
	return mongodb.AfterCommitted(ctx, coll, func(ctx context.Context) error {
		return eachClaim(ctx, coll, ofWatcher(watcher), take)
	})
}

func eachClaim(ctx context.Context, coll *mongo.Collection, filter bson.D, take func(*Claim) error) error {
	const doing = "reading claims of scheduled envelopes"
	return mongodb.FindEach(ctx, coll, doing, filter, func(raw bson.Raw) error {
		var claim Claim
		if err := bson.Unmarshal(raw, &claim); err != nil {
			return err
		}
		return take(&claim)
	})
}

// ofWatcher returns the condition for the claims of a watcher document, or of all documents of a watcher. A zero follows a slash.
func ofWatcher(watcher string) bson.D {
	return bson.D{{Key: "_id", Value: bson.D{{Key: "$gt", Value: watcher + "/"}, {Key: "$lt", Value: watcher + "0"}}}}
}

// ClaimChange is what one transaction changes in claims.
type ClaimChange struct {
	done  map[string][]int32
	ended []string
}

// Finish records that an envelope has left its claim.
func (c *ClaimChange) Finish(id string, index int32) {
	if c.done == nil {
		c.done = map[string][]int32{}
	}
	c.done[id] = append(c.done[id], index)
}

// End removes a claim whose envelopes all have outcomes.
func (c *ClaimChange) End(id string) { c.ended = append(c.ended, id) }

// IsEmpty reports whether nothing changes.
func (c *ClaimChange) IsEmpty() bool { return len(c.done)+len(c.ended) == 0 }

// Write writes the change, in the transaction of tx. It is idempotent.
func (c *ClaimChange) Write(tx context.Context, coll *mongo.Collection) error {
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
	crash.At("mid-claim-write")
	return mongodb.DescribeError(err, "writing claims of scheduled envelopes", "find, update and remove", mongodb.Namespace(coll))
}

// CountClaimed returns the number of envelopes that have no outcome in the claims of a watcher document, or of all documents of a watcher.
func CountClaimed(ctx context.Context, coll *mongo.Collection, watcher string) (int64, error) {
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

// MoveClaims moves the envelopes of all claims of a watcher document to the waiting envelopes, in fenced transactions. It is for a
// caller that holds the lease and sends nothing: the slots of the next owners may divide the envelopes of a claim.
func MoveClaims(ctx context.Context, fencer mongodb.Fencer, coll, store *mongo.Collection, watcher, watcherID string) error {
	return EachClaim(ctx, coll, watcherID, func(claim *Claim) error {
		// The others have outcomes.
		var entries []Entry
		for i := range claim.Envelopes {
			if !claim.IsDone(i) {
				entries = append(entries, claim.Envelopes[i].Entry(watcher))
			}
		}

		// An envelope must never be in both collections, or in none.
		return fencer.Fenced(ctx, nil, func(tx context.Context) error {
			client := mongo.SessionFromContext(tx).Client()
			if err := Enter(tx, mongodb.InClient(client, store), entries); err != nil {
				return err
			}
			var end ClaimChange
			end.End(claim.ID)
			return end.Write(tx, mongodb.InClient(client, coll))
		})
	})
}
