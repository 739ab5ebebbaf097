package outboxes

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
)

var lastStamp = bson.Timestamp{T: math.MaxUint32, I: math.MaxUint32}

// ErrClaimed is what a *ClaimedError is.
var ErrClaimed = errors.New("collection claimed by another watcher")

// ClaimedError refuses a collection that another watcher reads: both would publish it, and purge it under each other (N25).
type ClaimedError struct{ NS, Watcher, By string }

func (e *ClaimedError) Error() string {
	return fmt.Sprintf("collection %s belongs to watcher %q, so watcher %q cannot read it: change one of the two configurations, or release it with `outrelay recover --release %s`", e.NS, e.By, e.Watcher, e.NS)
}

// Is makes the error an [ErrClaimed].
func (e *ClaimedError) Is(target error) bool { return target == ErrClaimed }

// Registry is `collections` of the state database: each collection by UUID belongs to one watcher (N25).
type Registry struct{ coll *mongo.Collection }

// NewRegistry keeps the registry in coll.
func NewRegistry(coll *mongo.Collection) *Registry { return &Registry{mongodb.Majority(coll)} }

// Registration is one entry of the registry: a collection, which keeps its UUID whatever it is renamed to.
type Registration struct {
	UUID    bson.Binary `bson:"_id"`
	NS      string      `bson:"ns"`
	Watcher string      `bson:"watcher"`
	// Seen is a cluster time at which the collection had a name that the watcher reads, near the time at which it got it.
	// A position behind Seen is behind the event that brought the name.
	Seen bson.Timestamp `bson:"seen,omitempty"`
	// Left is the cluster time at which a rename last took the collection out of what the watcher reads. The stream has
	// brought what was inserted before.
	Left bson.Timestamp `bson:"left,omitempty"`
}

// Away reports whether the collection has a name that nobody reads.
func (c Registration) Away() bool { return c.Left.After(c.Seen) }

// ReadUpTo is how far the collection was read before it got its present name, for a watcher or slot whose position is at.
// appeared is false if the watcher reads the collection by the stream since before at, so that the position says it all.
func (c Registration) ReadUpTo(at bson.Timestamp) (upTo bson.Timestamp, appeared bool) {
	if at.IsZero() || !c.Seen.After(at) {
		return bson.Timestamp{}, false
	}
	if c.Left.After(at) { // noted by another slot, which is further: this one has to begin at the beginning
		return bson.Timestamp{}, true
	}
	return c.Left, true
}

// ReadUpTo is [Claim.ReadUpTo] of those collections that got their names behind a position, by name, for a sweep that begins
// at from. One that is not in the registry was never read.
func ReadUpTo(claims []Registration, list []Outbox, position, from bson.Timestamp) map[string]bson.Timestamp {
	of := make(map[string]Registration, len(claims))
	for _, c := range claims {
		of[string(c.UUID.Data)] = c
	}
	out := map[string]bson.Timestamp{}
	for _, o := range list {
		claim, known := of[string(o.UUID[:])]
		if !known && o.Identified() {
			claim.Seen = lastStamp
		}
		if upTo, appeared := claim.ReadUpTo(position); appeared {
			if from.Before(upTo) {
				upTo = from
			}
			out[o.NS()] = upTo
		}
	}
	return out
}

func binaryUUID(u [16]byte) bson.Binary {
	return bson.Binary{Subtype: bson.TypeBinaryUUID, Data: u[:]}
}

// Register makes the collection the watcher's (its name, without a slot). It does nothing if it already is, except to note
// a new name after a rename. fresh reports a claim that was not there before. Another's collection is a [*ClaimedError].
func (r *Registry) Register(ctx context.Context, uuid [16]byte, ns, watcher string) (fresh bool, err error) {
	before, err := r.RegisterAt(ctx, uuid, ns, watcher, bson.Timestamp{})
	return err == nil && before.Watcher == "", err
}

// RegisterAt is Claim for a collection that was seen under its name at a cluster time. It returns the entry as it was before.
func (r *Registry) RegisterAt(ctx context.Context, uuid [16]byte, ns, watcher string, at bson.Timestamp) (before Registration, err error) {
	if uuid == ([16]byte{}) {
		return before, fmt.Errorf("claiming %s: its UUID is not known; grant listCollections on its database", ns)
	}
	mine := bson.D{{Key: "$eq", Value: bson.A{mongodb.IfNull("$watcher", mongodb.Literal(watcher)), mongodb.Literal(watcher)}}}
	fields := bson.D{
		{Key: "ns", Value: mongodb.Literal(ns)},
		{Key: "watcher", Value: mongodb.Literal(watcher)},
		{Key: "since", Value: mongodb.IfNull("$since", "$$NOW")},
	}
	if !at.IsZero() {
		// The first time counts, and the first one after a rename has taken the collection away.
		away := bson.D{{Key: "$gt", Value: bson.A{mongodb.IfNull("$left", bson.Timestamp{}), "$seen"}}}
		fields = append(fields, bson.E{Key: "seen", Value: bson.D{{Key: "$cond", Value: bson.A{away, at, mongodb.IfNull("$seen", at)}}}})
	}
	err = r.coll.FindOneAndUpdate(ctx, bson.D{{Key: "_id", Value: binaryUUID(uuid)}}, mongo.Pipeline{{{Key: "$replaceWith", Value: bson.D{{Key: "$cond", Value: bson.A{
		mine, bson.D{{Key: "$mergeObjects", Value: bson.A{"$$ROOT", fields}}}, "$$ROOT",
	}}}}}}, options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.Before)).Decode(&before)
	switch {
	case errors.Is(err, mongo.ErrNoDocuments):
		return Registration{}, nil
	case mongo.IsDuplicateKeyError(err):
		return r.RegisterAt(ctx, uuid, ns, watcher, at) // made by another at the same moment; now it is there
	case err != nil:
		return before, mongodb.DescribeRefusal(err, "claiming "+ns, "find, insert and update", mongodb.Namespace(r.coll), "")
	case before.Watcher != watcher:
		return before, &ClaimedError{NS: ns, Watcher: watcher, By: before.Watcher}
	}
	return before, nil
}

// Leave notes that a rename has taken the collection out of what the watcher reads, which has read it up to there. It does
// nothing to a collection that is away already.
func (r *Registry) Leave(ctx context.Context, uuid [16]byte, watcher string, at bson.Timestamp) error {
	here := bson.D{{Key: "$lte", Value: bson.A{mongodb.IfNull("$left", bson.Timestamp{}), mongodb.IfNull("$seen", bson.Timestamp{})}}}
	_, err := r.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: binaryUUID(uuid)}, {Key: "watcher", Value: watcher}, {Key: "$expr", Value: here}},
		bson.D{{Key: "$max", Value: bson.D{{Key: "left", Value: at}}}})
	if err != nil {
		return mongodb.DescribeRefusal(err, "noting that a collection was renamed away", "update", mongodb.Namespace(r.coll), "")
	}
	return nil
}

// Release gives the collection up if it is the watcher's.
func (r *Registry) Release(ctx context.Context, uuid [16]byte, watcher string) error {
	_, err := r.coll.DeleteOne(ctx, bson.D{{Key: "_id", Value: binaryUUID(uuid)}, {Key: "watcher", Value: watcher}})
	if err != nil {
		return mongodb.DescribeRefusal(err, "releasing a collection", "remove", mongodb.Namespace(r.coll), "")
	}
	return nil
}

// Registrations lists a watcher's collections, or all of them for "". A watcher with claims and without a watcher document has
// lost its state: it must not start as if it were new.
func (r *Registry) Registrations(ctx context.Context, watcher string) ([]Registration, error) {
	filter := bson.D{{Key: "watcher", Value: bson.D{{Key: "$exists", Value: true}}}}
	if watcher != "" {
		filter = bson.D{{Key: "watcher", Value: watcher}}
	}
	cur, err := r.coll.Find(ctx, filter, options.Find().SetSort(bson.D{{Key: "ns", Value: 1}}))
	if err != nil {
		return nil, mongodb.DescribeRefusal(err, "reading the registry of collections", "find", mongodb.Namespace(r.coll), "")
	}
	out := []Registration{}
	if err := cur.All(ctx, &out); err != nil {
		return nil, fmt.Errorf("reading the registry of collections: %w", err)
	}
	return out, nil
}

// Seal returns the seal of the state database, and makes it on the first call. Relays and operators write it into each
// document whose state they change. A service that may only insert into its outbox cannot read the seal, so a document
// without it got its state from somebody else.
func (r *Registry) Seal(ctx context.Context) ([]byte, error) {
	fresh := make([]byte, 16)
	if _, err := rand.Read(fresh); err != nil {
		return nil, fmt.Errorf("making the seal of the state database: %w", err)
	}
	var doc struct {
		Seal []byte `bson:"seal"`
	}
	err := r.coll.FindOneAndUpdate(ctx, bson.D{{Key: "_id", Value: "seal"}}, bson.D{{Key: "$setOnInsert", Value: bson.D{{Key: "seal", Value: fresh}}}},
		options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.After)).Decode(&doc)
	if mongo.IsDuplicateKeyError(err) { // another process made the seal at the same moment
		return r.Seal(ctx)
	}
	if err != nil {
		return nil, mongodb.DescribeRefusal(err, "reading the seal of the state database", "find, insert and update", mongodb.Namespace(r.coll), "")
	}
	return doc.Seal, nil
}
