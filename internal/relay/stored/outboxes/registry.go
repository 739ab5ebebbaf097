package outboxes

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// lastStamp is later than every cluster time.
var lastStamp = bson.Timestamp{T: math.MaxUint32, I: math.MaxUint32}

// ClaimedError means that another watcher reads the collection. Two watchers would both publish it, and each
// would purge envelopes that the other has not read (N25).
type ClaimedError struct{ NS, Watcher, By string }

func (e *ClaimedError) Error() string {
	return fmt.Sprintf("collection %s belongs to watcher %q, so watcher %q cannot read it: "+
		"change one of the two configurations, or release it with `outrelay recover --release %s` and adopt its position, or all of it is sent again",
		e.NS, e.By, e.Watcher, e.NS)
}

// Registry is the collection `collections` of the state database. It assigns each outbox collection, by UUID,
// to one watcher (N25).
type Registry struct{ coll *mongo.Collection }

// NewRegistry returns the registry that is stored in coll.
func NewRegistry(coll *mongo.Collection) *Registry { return &Registry{mongodb.Majority(coll)} }

// SettledTime returns a cluster time up to which every commit is visible: see [mongodb.SettledTime].
func (r *Registry) SettledTime(ctx context.Context) (bson.Timestamp, error) {
	return mongodb.SettledTime(ctx, r.coll)
}

// Registration is one entry of the registry: a collection, which keeps its UUID if it is renamed.
type Registration struct {
	UUID    bson.Binary `bson:"_id"`
	NS      string      `bson:"ns"`
	Watcher string      `bson:"watcher"`
	// Seen is a cluster time at which the collection had a name that the watcher reads, shortly after it got
	// the name. A position after Seen is after the event that brought the name.
	Seen bson.Timestamp `bson:"seen,omitempty"`
	// Left is the cluster time at which a rename last gave the collection a name that the watcher does not read.
	// The stream has brought the envelopes that were inserted before.
	Left bson.Timestamp `bson:"left,omitempty"`
	// IrregularIDs is set once the watcher has read an envelope without a stamp whose id contains a time outside of
	// [ClockMargin]. The times in the ids of the collection are not used from then on.
	IrregularIDs bool `bson:"irregularIds,omitempty"`
	// PurgedIDs is a time before which the collection had no envelope without a stamp, by the times in the ids: the purge
	// had removed all of them. An envelope with an earlier time was inserted since then.
	PurgedIDs bson.Timestamp `bson:"purgedIds,omitempty"`
}

// Away reports whether the collection has a name that no watcher reads.
func (c Registration) Away() bool { return c.Left.After(c.Seen) }

// ReadUpTo returns the time up to which the collection was read before it got its present name. position
// is the position of the watcher or slot. If the stream has included the collection since before then, the position
// is sufficient and appeared is false.
func (c Registration) ReadUpTo(position bson.Timestamp) (upTo bson.Timestamp, appeared bool) {
	if position.IsZero() || !c.Seen.After(position) {
		return bson.Timestamp{}, false
	}

	if c.Left.After(position) {
		// Another slot, which is further, has stored Left. The slot at this position has to begin at the start.
		return bson.Timestamp{}, true
	}
	return c.Left, true
}

// ReadUpTo returns [Registration.ReadUpTo] of the collections that got their names after position, by name, for
// a sweep that begins at start. If a collection is not in the registry, it was never read.
func ReadUpTo(claims []Registration, list []Outbox, position, start bson.Timestamp) map[string]bson.Timestamp {
	of, out := ByUUID(claims), map[string]bson.Timestamp{}
	for _, o := range list {
		claim, known := of[o.UUID]
		if !known && o.Identified() {
			// No position is after lastStamp, so the collection counts as one that has just appeared.
			claim.Seen = lastStamp
		}

		if upTo, appeared := claim.ReadUpTo(position); appeared {
			// The sweep begins at from, so a later time would leave out envelopes.
			if start.Before(upTo) {
				upTo = start
			}
			out[o.NS()] = upTo
		}
	}
	return out
}

// ByUUID returns the entries by the UUIDs of their collections.
func ByUUID(claims []Registration) map[[16]byte]Registration {
	out := map[[16]byte]Registration{}
	for _, c := range claims {
		if len(c.UUID.Data) == 16 {
			out[[16]byte(c.UUID.Data)] = c
		}
	}
	return out
}

// Register assigns the collection to the watcher (its name, without a slot), with the cluster time namedAt at
// which it had its name, or zero. If the collection already belongs to the watcher, Register stores a new name after a
// rename. It returns the entry as it was before the call. If the collection belongs to another watcher, the
// error is a [*ClaimedError].
func (r *Registry) Register(
	ctx context.Context, uuid [16]byte, ns, watcher string, namedAt bson.Timestamp,
) (before Registration, err error) {
	if uuid == ([16]byte{}) {
		return before, fmt.Errorf("claiming %s: its UUID is not known; grant listCollections on its database", ns)
	}

	update := registration(ns, watcher, namedAt)
	opts := options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.Before)
	err = r.coll.FindOneAndUpdate(ctx, bson.D{{Key: "_id", Value: mongodb.EncodeUUID(uuid)}}, update, opts).Decode(&before)

	switch {
	case errors.Is(err, mongo.ErrNoDocuments):
		return Registration{}, nil
	case mongo.IsDuplicateKeyError(err):
		// Another process has inserted the entry at the same moment, so the next attempt finds it.
		return r.Register(ctx, uuid, ns, watcher, namedAt)
	case err != nil:
		return before, mongodb.DescribeError(err, "claiming "+ns, "find, insert and update", mongodb.Namespace(r.coll))
	case before.Watcher != watcher:
		return before, &ClaimedError{NS: ns, Watcher: watcher, By: before.Watcher}
	}
	return before, nil
}

// registration returns the update of one entry. It leaves an entry of another watcher as it is.
func registration(ns, watcher string, namedAt bson.Timestamp) mongo.Pipeline {
	// An entry without a watcher is new, so it counts as the watcher's.
	owner := mongodb.IfNull("$watcher", mongodb.Literal(watcher))
	mine := bson.D{{Key: "$eq", Value: bson.A{owner, mongodb.Literal(watcher)}}}
	fields := bson.D{
		{Key: "ns", Value: mongodb.Literal(ns)},
		{Key: "watcher", Value: mongodb.Literal(watcher)},
		{Key: "since", Value: mongodb.IfNull("$since", "$$NOW")},
	}
	if !namedAt.IsZero() {
		// seen keeps the first time, and is set again only after a rename has taken the collection away.
		away := bson.D{{Key: "$gt", Value: bson.A{mongodb.IfNull("$left", bson.Timestamp{}), "$seen"}}}
		seen := bson.D{{Key: "$cond", Value: bson.A{away, namedAt, mongodb.IfNull("$seen", namedAt)}}}
		fields = append(fields, bson.E{Key: "seen", Value: seen})
	}

	// An entry of another watcher stays unchanged, and is returned.
	merged := bson.D{{Key: "$mergeObjects", Value: bson.A{"$$ROOT", fields}}}
	return mongo.Pipeline{{{Key: "$replaceWith", Value: bson.D{
		{Key: "$cond", Value: bson.A{mine, merged, "$$ROOT"}},
	}}}}
}

// RegisterAll is Register for many collections, which had their names at the cluster time namedAt. It sends two statements.
// If another watcher has claimed one of them, the error is a [*ClaimedError], and the others are registered.
func (r *Registry) RegisterAll(ctx context.Context, list []Outbox, watcher string, namedAt bson.Timestamp) error {
	models, ids := make([]mongo.WriteModel, len(list)), make(bson.A, len(list))
	for i, o := range list {
		ids[i] = mongodb.EncodeUUID(o.UUID)
		models[i] = mongo.NewUpdateOneModel().SetFilter(bson.D{{Key: "_id", Value: ids[i]}}).
			SetUpdate(registration(o.NS(), watcher, namedAt)).SetUpsert(true)
	}
	_, err := r.coll.BulkWrite(ctx, models, options.BulkWrite().SetOrdered(false))
	// Another process has inserted an entry at the same moment. The caller repeats the call.
	if err != nil {
		return mongodb.DescribeError(err, "claiming collections", "find, insert and update", mongodb.Namespace(r.coll))
	}

	others, err := mongodb.FindAll[Registration](ctx, r.coll, "reading the registry of collections", bson.D{
		{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}, {Key: "watcher", Value: bson.D{{Key: "$ne", Value: watcher}}},
	})
	if err == nil && len(others) > 0 {
		err = &ClaimedError{NS: others[0].NS, Watcher: watcher, By: others[0].Watcher}
	}
	return err
}

// Leave records that a rename at the cluster time renamedAt gave the collection a name that the watcher does not read.
// The watcher has read the collection up to renamedAt. If the collection is already away, Leave does nothing.
func (r *Registry) Leave(ctx context.Context, uuid [16]byte, watcher string, renamedAt bson.Timestamp) error {
	here := bson.D{{Key: "$lte", Value: bson.A{
		mongodb.IfNull("$left", bson.Timestamp{}), mongodb.IfNull("$seen", bson.Timestamp{}),
	}}}
	return r.updateEntry(ctx, "recording that a collection was renamed away", uuid, watcher,
		bson.D{{Key: "$max", Value: bson.D{{Key: "left", Value: renamedAt}}}}, bson.E{Key: "$expr", Value: here})
}

// SeeAgain records that the collections had no name that the watcher reads until the cluster time namedAt.
func (r *Registry) SeeAgain(ctx context.Context, list []Outbox, watcher string, namedAt bson.Timestamp) error {
	ids := make(bson.A, len(list))
	for i, o := range list {
		ids[i] = mongodb.EncodeUUID(o.UUID)
	}
	_, err := r.coll.UpdateMany(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}, {Key: "watcher", Value: watcher}}, bson.D{
		{Key: "$set", Value: bson.D{{Key: "seen", Value: namedAt}}}, {Key: "$unset", Value: bson.D{{Key: "left", Value: ""}}},
	})
	return mongodb.DescribeError(err, "recording that collections got their names again", "update", mongodb.Namespace(r.coll))
}

// MarkIrregularIDs records that the times in the ids of the collection must not be used. A sweep then delivers each
// envelope without a stamp.
func (r *Registry) MarkIrregularIDs(ctx context.Context, uuid [16]byte, watcher string) error {
	return r.updateEntry(ctx, "recording that the ids of a collection contain wrong times", uuid, watcher,
		bson.D{{Key: "$set", Value: bson.D{{Key: "irregularIds", Value: true}}}})
}

// SetPurgedIDs stores [Registration.PurgedIDs].
func (r *Registry) SetPurgedIDs(ctx context.Context, uuid [16]byte, watcher string, clusterTime bson.Timestamp) error {
	return r.updateEntry(ctx, "recording how far a collection is purged", uuid, watcher,
		bson.D{{Key: "$set", Value: bson.D{{Key: "purgedIds", Value: clusterTime}}}})
}

// updateEntry updates the entry of a collection if the collection belongs to the watcher and the entry matches filter.
func (r *Registry) updateEntry(
	ctx context.Context, doing string, uuid [16]byte, watcher string, update bson.D, filter ...bson.E,
) error {
	entry := bson.D{{Key: "_id", Value: mongodb.EncodeUUID(uuid)}, {Key: "watcher", Value: watcher}}
	_, err := r.coll.UpdateOne(ctx, append(entry, filter...), update)
	return mongodb.DescribeError(err, doing, "update", mongodb.Namespace(r.coll))
}

// Release removes the entry of the collection if the collection belongs to the watcher.
func (r *Registry) Release(ctx context.Context, uuid [16]byte, watcher string) error {
	_, err := r.coll.DeleteOne(ctx, bson.D{{Key: "_id", Value: mongodb.EncodeUUID(uuid)}, {Key: "watcher", Value: watcher}})
	return mongodb.DescribeError(err, "releasing a collection", "remove", mongodb.Namespace(r.coll))
}

// Registrations returns the entries of a watcher, or all entries if watcher is "", sorted by name. If a watcher
// has entries but no watcher document, it has lost its state, and must not start like a new watcher.
func (r *Registry) Registrations(ctx context.Context, watcher string) ([]Registration, error) {
	filter := bson.D{}
	if watcher != "" {
		filter = bson.D{{Key: "watcher", Value: watcher}}
	}

	byName := options.Find().SetSort(bson.D{{Key: "ns", Value: 1}})
	return mongodb.FindAll[Registration](ctx, r.coll, "reading the registry of collections", filter, byName)
}

// Names returns the sorted names of the outboxes of a watcher. A collection that was dropped and created again has several entries, and one name.
func (r *Registry) Names(ctx context.Context, watcher string) ([]string, error) {
	registered, err := r.Registrations(ctx, watcher)
	names := make([]string, len(registered))
	for i, entry := range registered {
		names[i] = entry.NS
	}
	slices.Sort(names)
	return slices.Compact(names), err
}
