package store

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/slot"
)

// Outbox is a collection that a watcher reads.
type Outbox struct {
	DB, Coll string
	// UUID is the identity of this very collection: one that is dropped and made again has another. It is zero where the
	// user may only see names, for want of listCollections.
	UUID [16]byte
	// Part is which of its envelopes the watcher's slot reads; the zero value is all of them (N28).
	Part slot.Part
}

// NS is the full name.
func (o Outbox) NS() string { return o.DB + "." + o.Coll }

// Identified reports whether the UUID is known.
func (o Outbox) Identified() bool { return o.UUID != [16]byte{} }

// listing bounds the databases that are asked at once.
const listing = 4

// ListOutboxes finds the collections that match in the databases named, or in all that the user may see if none is. A
// tenant's database costs one command. Views are left out. The result is sorted by name.
func ListOutboxes(ctx context.Context, client *mongo.Client, match func(db, coll []byte) bool, databases ...string) ([]Outbox, error) {
	if len(databases) == 0 {
		var err error
		databases, err = client.ListDatabaseNames(ctx, bson.D{{Key: "name", Value: bson.D{{Key: "$nin", Value: bson.A{"admin", "local", "config"}}}}},
			options.ListDatabases().SetAuthorizedDatabases(true))
		if err != nil {
			return nil, privilege(err, "listing databases", "listDatabases", "cluster", "name the collections one by one")
		}
	}
	found := make([][]Outbox, len(databases))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(listing)
	for i, db := range databases {
		g.Go(func() (err error) {
			found[i], err = listOne(gctx, client.Database(db), match)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	all := slices.Concat(found...)
	slices.SortFunc(all, func(a, b Outbox) int { return strings.Compare(a.NS(), b.NS()) })
	return all, nil
}

func listOne(ctx context.Context, db *mongo.Database, match func(db, coll []byte) bool) ([]Outbox, error) {
	filter := bson.D{{Key: "type", Value: "collection"}}
	cur, err := db.ListCollections(ctx, filter)
	if hasCode(err, codeUnauthorized) {
		cur, err = db.ListCollections(ctx, filter, options.ListCollections().SetNameOnly(true).SetAuthorizedCollections(true))
	}
	if err != nil {
		return nil, privilege(err, "listing collections of "+db.Name(), "listCollections", db.Name(), "")
	}
	var specs []struct {
		Name string `bson:"name"`
		Info struct {
			UUID bson.Binary `bson:"uuid"`
		} `bson:"info"`
	}
	if err := cur.All(ctx, &specs); err != nil {
		return nil, fmt.Errorf("listing collections of %s: %w", db.Name(), err)
	}
	var out []Outbox
	for _, s := range specs {
		if strings.HasPrefix(s.Name, "system.") || !match([]byte(db.Name()), []byte(s.Name)) {
			continue
		}
		o := Outbox{DB: db.Name(), Coll: s.Name}
		copy(o.UUID[:], s.Info.UUID.Data)
		out = append(out, o)
	}
	return out, nil
}

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
func NewRegistry(coll *mongo.Collection) *Registry { return &Registry{Majority(coll)} }

// Claim is one entry of the registry.
type Claim struct {
	UUID    bson.Binary `bson:"_id"`
	NS      string      `bson:"ns"`
	Watcher string      `bson:"watcher"`
}

func binaryUUID(u [16]byte) bson.Binary {
	return bson.Binary{Subtype: bson.TypeBinaryUUID, Data: u[:]}
}

// Claim makes the collection the watcher's (its name, without a slot). It does nothing if it already is, except to note
// a new name after a rename. fresh reports a claim that was not there before. Another's collection is a [*ClaimedError].
func (r *Registry) Claim(ctx context.Context, uuid [16]byte, ns, watcher string) (fresh bool, err error) {
	if uuid == ([16]byte{}) {
		return false, fmt.Errorf("claiming %s: its UUID is not known; grant listCollections on its database", ns)
	}
	mine := bson.D{{Key: "$eq", Value: bson.A{bson.D{{Key: "$ifNull", Value: bson.A{"$watcher", lit(watcher)}}}, lit(watcher)}}}
	var before Claim
	err = r.coll.FindOneAndUpdate(ctx, bson.D{{Key: "_id", Value: binaryUUID(uuid)}}, mongo.Pipeline{{{Key: "$replaceWith", Value: bson.D{{Key: "$cond", Value: bson.A{
		mine,
		bson.D{{Key: "$mergeObjects", Value: bson.A{"$$ROOT", bson.D{
			{Key: "ns", Value: lit(ns)},
			{Key: "watcher", Value: lit(watcher)},
			{Key: "since", Value: bson.D{{Key: "$ifNull", Value: bson.A{"$since", "$$NOW"}}}},
		}}}},
		"$$ROOT",
	}}}}}}, options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.Before)).Decode(&before)
	switch {
	case errors.Is(err, mongo.ErrNoDocuments):
		return true, nil
	case mongo.IsDuplicateKeyError(err):
		return r.Claim(ctx, uuid, ns, watcher) // made by another at the same moment; now it is there
	case err != nil:
		return false, privilege(err, "claiming "+ns, "find, insert and update", Namespace(r.coll), "")
	case before.Watcher != watcher:
		return false, &ClaimedError{NS: ns, Watcher: watcher, By: before.Watcher}
	}
	return false, nil
}

// Release gives the collection up if it is the watcher's.
func (r *Registry) Release(ctx context.Context, uuid [16]byte, watcher string) error {
	_, err := r.coll.DeleteOne(ctx, bson.D{{Key: "_id", Value: binaryUUID(uuid)}, {Key: "watcher", Value: watcher}})
	if err != nil {
		return privilege(err, "releasing a collection", "remove", Namespace(r.coll), "")
	}
	return nil
}

// Claims lists a watcher's collections, or all of them for "". A watcher with claims and without a watcher document has
// lost its state: it must not start as if it were new.
func (r *Registry) Claims(ctx context.Context, watcher string) ([]Claim, error) {
	filter := bson.D{{Key: "watcher", Value: bson.D{{Key: "$exists", Value: true}}}}
	if watcher != "" {
		filter = bson.D{{Key: "watcher", Value: watcher}}
	}
	cur, err := r.coll.Find(ctx, filter, options.Find().SetSort(bson.D{{Key: "ns", Value: 1}}))
	if err != nil {
		return nil, privilege(err, "reading the registry of collections", "find", Namespace(r.coll), "")
	}
	out := []Claim{}
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
		return nil, privilege(err, "reading the seal of the state database", "find, insert and update", Namespace(r.coll), "")
	}
	return doc.Seal, nil
}

func lit(v any) bson.D { return bson.D{{Key: "$literal", Value: v}} }
