// Package divisions stores into how many slots a watcher is divided, and which of them have begun, in the collection `slots` of the state
// database. All calls are statements on MongoDB, which block until the server responds or ctx ends.
package divisions

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// ErrDivided means that a process is configured for another number of slots than its watcher has. Two divisions at
// the same time would each deliver every event (N28).
var ErrDivided = errors.New("the numbers of slots differ")

// Division is the number of slots of a watcher, and the progress of its slots.
type Division struct {
	Watcher string         `bson:"_id"`
	Of      int            `bson:"of"`
	Begun   []int          `bson:"begun"` // slots that have had a position
	Start   bson.Timestamp `bson:"start"` // where all slots began; zero before the first one has begun
}

// Divisions is the collection `slots` of the state database. It has the number of slots of each watcher, so that
// processes with another configuration can be rejected.
type Divisions struct{ coll, watchers *mongo.Collection }

// New returns the divisions in the state database, with majority concerns.
func New(state state.Database) *Divisions {
	return &Divisions{mongodb.Majority(state.Collection("slots")), mongodb.Majority(state.Collection("watchers"))}
}

// InTransaction returns the divisions for calls in a transaction, which sets the concerns itself.
func InTransaction(state state.Database) *Divisions {
	return &Divisions{state.Collection("slots"), state.Collection("watchers")}
}

// Read returns the division of a watcher, or [mongodb.ErrNotFound] if none is stored.
func (d *Divisions) Read(ctx context.Context, watcher string) (Division, error) {
	var division Division
	err := d.coll.FindOne(ctx, byID(watcher)).Decode(&division)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return division, fmt.Errorf("division of watcher %s: %w", watcher, mongodb.ErrNotFound)
	}
	return division, describeRejection(err, "reading the division of watcher "+watcher, "find", d.coll)
}

// Agree returns nil if the watcher has slot.N slots, and [ErrDivided] if it has another number. If no division is
// stored, Agree stores one: the number of its documents, which may have been restored without it, or slot.N if there are none.
func (d *Divisions) Agree(ctx context.Context, watcher string, slot slot.Range) error {
	want := max(slot.N, 1)
	division, err := d.Read(ctx, watcher)
	if errors.Is(err, mongodb.ErrNotFound) {
		division, err = d.storeFirst(ctx, watcher, want)
	}
	if err != nil {
		return err
	}

	if division.Of != want {
		return fmt.Errorf("%w: watcher %q has %d slots, and this process is configured for %d: set slots: %d, "+
			"or run `outrelay reslice --slots %d` to change it", ErrDivided, watcher, division.Of, want, division.Of, want)
	}
	return nil
}

// storeFirst stores a division unless there is one, and returns the stored one.
func (d *Divisions) storeFirst(ctx context.Context, watcher string, want int) (Division, error) {
	has, err := d.Documents(ctx, watcher)
	if err != nil {
		return Division{}, err
	}
	if has == 0 {
		has = want
	}

	var division Division
	insert := bson.D{{Key: "$setOnInsert", Value: bson.D{{Key: "of", Value: has}}}}
	opts := options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.After)
	err = d.coll.FindOneAndUpdate(ctx, byID(watcher), insert, opts).Decode(&division)
	if mongo.IsDuplicateKeyError(err) {
		// Another process has stored a division at the same moment.
		return d.Read(ctx, watcher)
	}
	return division, describeRejection(err, "noting the division of watcher "+watcher, "find, insert and update", d.coll)
}

// Documents returns the number of slots according to the documents of a watcher, or 0 if it has none.
func (d *Divisions) Documents(ctx context.Context, watcher string) (int, error) {
	ids, err := d.IDs(ctx, watcher)
	if err != nil || len(ids) == 0 {
		return 0, err
	}
	_, slotRange, _ := slot.ParseID(ids[0])
	return slotRange.N, nil
}

// IDs returns the ids of the documents of a watcher, in the order of the slots.
func (d *Divisions) IDs(ctx context.Context, watcher string) ([]string, error) {
	return lease.ListIDs(ctx, d.watchers, watcher)
}

// Begin records that a slot has a position. For the only slot of a watcher it does nothing.
func (d *Divisions) Begin(ctx context.Context, watcher string, slot slot.Range) error {
	if had, err := d.Begun(ctx, watcher, slot); err != nil || had {
		return err
	}
	add := bson.D{{Key: "$addToSet", Value: bson.D{{Key: "begun", Value: slot.I}}}}
	_, err := d.coll.UpdateOne(ctx, byNumber(watcher, slot.N), add)
	return describeRejection(err, "noting that slot "+slot.ID(watcher)+" has begun", "update", d.coll)
}

// Begun reports whether a slot has had a position. It returns true for the only slot of a watcher: the claims of its
// collections prove it.
func (d *Divisions) Begun(ctx context.Context, watcher string, slot slot.Range) (bool, error) {
	if slot.Whole() {
		return true, nil
	}
	division, err := d.Read(ctx, watcher)
	if errors.Is(err, mongodb.ErrNotFound) {
		return false, nil
	}
	return err == nil && division.Of == slot.N && slices.Contains(division.Begun, slot.I), err
}

// StartAt returns the time at which all slots of a watcher begin. The first call decides, for the time proposed.
func (d *Divisions) StartAt(ctx context.Context, watcher string, slot slot.Range, proposed bson.Timestamp) (bson.Timestamp, error) {
	if slot.Whole() {
		return proposed, nil
	}

	var division Division
	start := bson.D{{Key: "$ifNull", Value: bson.A{"$start", proposed}}}
	update := mongo.Pipeline{{{Key: "$set", Value: bson.D{{Key: "start", Value: start}}}}}
	opts := options.FindOneAndUpdate().SetReturnDocument(options.After)
	err := d.coll.FindOneAndUpdate(ctx, byNumber(watcher, slot.N), update, opts).Decode(&division)
	if err != nil {
		return proposed, describeRejection(err, "noting where the slots of watcher "+watcher+" begin", "find and update", d.coll)
	}
	return division.Start, nil
}

// Divide sets the number of slots to n. None of them has had a position.
func (d *Divisions) Divide(ctx context.Context, watcher string, n int) error {
	return d.storeDivision(ctx, watcher, n, []int{})
}

// DivideBegun is Divide into slots that have had a position. In a transaction, the client of the database must be that of the
// transaction.
func (d *Divisions) DivideBegun(ctx context.Context, watcher string, n int) error {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return d.storeDivision(ctx, watcher, n, all)
}

// storeDivision stores the number of slots, and the slots that have begun.
func (d *Divisions) storeDivision(ctx context.Context, watcher string, n int, begun []int) error {
	update := bson.D{{Key: "$set", Value: bson.D{{Key: "of", Value: n}, {Key: "begun", Value: begun}}}}
	_, err := d.coll.UpdateOne(ctx, byID(watcher), update, options.UpdateOne().SetUpsert(true))
	return describeRejection(err, "dividing watcher "+watcher, "find, insert and update", d.coll)
}

// Discard removes a watcher document that has no owner and has never had a position.
func (d *Divisions) Discard(ctx context.Context, id string) error {
	unused := bson.D{
		{Key: "_id", Value: id},
		{Key: "owner", Value: nil},
		{Key: "clusterTime", Value: nil},
		{Key: "token", Value: nil},
		{Key: "gap", Value: nil},
	}
	_, err := d.watchers.DeleteOne(ctx, unused)
	return describeRejection(err, "removing watcher document "+id, "remove", d.watchers)
}

// byID returns the filter for the division of a watcher.
func byID(watcher string) bson.D { return bson.D{{Key: "_id", Value: watcher}} }

// byNumber returns the filter for the division of a watcher while it has n slots.
func byNumber(watcher string, n int) bson.D {
	return bson.D{{Key: "_id", Value: watcher}, {Key: "of", Value: n}}
}

// describeRejection adds to err what failed and the privilege that may be missing. It returns nil if err is nil.
func describeRejection(err error, doing, action string, coll *mongo.Collection) error {
	return mongodb.DescribeError(err, doing, action, mongodb.Namespace(coll))
}
