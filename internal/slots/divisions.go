package slots

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/slot"
)

// ErrDivided is what a *DividedError is.
var ErrDivided = errors.New("watcher divided otherwise")

// DividedError refuses a number of slots that is not the watcher's: two divisions at a time would each deliver everything (N28).
type DividedError struct {
	Watcher   string
	Has, Want int
}

func (e *DividedError) Error() string {
	return fmt.Sprintf("watcher %q has %d slots, and this process is configured for %d: set slots: %d, or run `outrelay reslice --slots %d` to change it", e.Watcher, e.Has, e.Want, e.Has, e.Want)
}

// Is makes the error an [ErrDivided].
func (e *DividedError) Is(target error) bool { return target == ErrDivided }

// Division is how a watcher is divided.
type Division struct {
	Watcher string         `bson:"_id"`
	Of      int            `bson:"of"`
	Begun   []int          `bson:"begun"` // slots that have had a position
	Start   bson.Timestamp `bson:"start"` // where all of them began; zero while none has
	// Paused are the watcher documents that an operator had paused before a division anew began, while it is under way.
	Paused *[]string `bson:"paused,omitempty"`
}

// Divisions is `slots` of the state database: how many slots each watcher has, so that processes that are configured
// otherwise are refused.
type Divisions struct{ coll, watchers *mongo.Collection }

// NewDivisions keeps them in the state database.
func NewDivisions(state *mongo.Database) *Divisions {
	return &Divisions{mongodb.Majority(state.Collection("slots")), mongodb.Majority(state.Collection("watchers"))}
}

// NewDivisionsIn are those of a transaction: its concerns are the transaction's.
func NewDivisionsIn(state *mongo.Database) *Divisions {
	return &Divisions{state.Collection("slots"), state.Collection("watchers")}
}

// Read is the division of a watcher; [mongodb.ErrNotFound] where nobody has noted one.
func (d *Divisions) Read(ctx context.Context, watcher string) (Division, error) {
	var v Division
	err := d.coll.FindOne(ctx, bson.D{{Key: "_id", Value: watcher}}).Decode(&v)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return v, fmt.Errorf("division of watcher %s: %w", watcher, mongodb.ErrNotFound)
	}
	return v, describeRefusal(err, "reading the division of watcher "+watcher, "find", d.coll)
}

// Agree makes sure that the watcher has p.N slots, or is a [*DividedError]. The first one to ask decides for a watcher that is new; one
// that has documents and no division, as from a version before there were any, has as many as its documents say.
func (d *Divisions) Agree(ctx context.Context, watcher string, p slot.Range) error {
	n := max(p.N, 1)
	v, err := d.Read(ctx, watcher)
	if errors.Is(err, mongodb.ErrNotFound) {
		has, err := d.Documents(ctx, watcher)
		if err != nil {
			return err
		}
		if has == 0 {
			has = n
		}
		err = d.coll.FindOneAndUpdate(ctx, bson.D{{Key: "_id", Value: watcher}}, bson.D{{Key: "$setOnInsert", Value: bson.D{{Key: "of", Value: has}}}},
			options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.After)).Decode(&v)
		if mongo.IsDuplicateKeyError(err) { // made by another at the same moment; now it is there
			return d.Agree(ctx, watcher, p)
		}
		if err != nil {
			return mongodb.Refusal(err, "noting the division of watcher "+watcher, "find, insert and update", mongodb.Namespace(d.coll))
		}
	} else if err != nil {
		return err
	}
	if v.Of != n {
		return &DividedError{Watcher: watcher, Has: v.Of, Want: n}
	}
	return nil
}

// Documents is into how many slots the documents of a watcher divide it; 0 if there is none.
func (d *Divisions) Documents(ctx context.Context, watcher string) (int, error) {
	ids, err := d.IDs(ctx, watcher)
	if err != nil || len(ids) == 0 {
		return 0, err
	}
	_, p, _ := slot.ParseID(ids[0])
	return p.N, nil
}

// IDs returns the ids of the documents of a watcher, in the order of the slots.
func (d *Divisions) IDs(ctx context.Context, watcher string) ([]string, error) {
	ids, err := lease.ListIDs(ctx, d.watchers, watcher)
	return ids, describeRefusal(err, "listing the documents of watcher "+watcher, "find", d.watchers)
}

// Begin notes that a slot has a position. For the only slot of a watcher it does nothing.
func (d *Divisions) Begin(ctx context.Context, watcher string, p slot.Range) error {
	if had, err := d.Begun(ctx, watcher, p); err != nil || had {
		return err
	}
	_, err := d.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: watcher}, {Key: "of", Value: p.N}}, bson.D{{Key: "$addToSet", Value: bson.D{{Key: "begun", Value: p.I}}}})
	return describeRefusal(err, "noting that slot "+p.ID(watcher)+" has begun", "update", d.coll)
}

// Begun reports whether a slot has had a position. It returns true for the only slot of a watcher: the claims of its
// collections prove it.
func (d *Divisions) Begun(ctx context.Context, watcher string, p slot.Range) (bool, error) {
	if p.Whole() {
		return true, nil
	}
	v, err := d.Read(ctx, watcher)
	if errors.Is(err, mongodb.ErrNotFound) {
		return false, nil
	}
	return err == nil && v.Of == p.N && slices.Contains(v.Begun, p.I), err
}

// StartAt returns where the slots of a watcher begin: at, unless another slot was there before.
func (d *Divisions) StartAt(ctx context.Context, watcher string, p slot.Range, at bson.Timestamp) (bson.Timestamp, error) {
	if p.Whole() {
		return at, nil
	}
	var v Division
	err := d.coll.FindOneAndUpdate(ctx, bson.D{{Key: "_id", Value: watcher}, {Key: "of", Value: p.N}},
		mongo.Pipeline{{{Key: "$set", Value: bson.D{{Key: "start", Value: bson.D{{Key: "$ifNull", Value: bson.A{"$start", at}}}}}}}},
		options.FindOneAndUpdate().SetReturnDocument(options.After)).Decode(&v)
	if err != nil {
		return at, describeRefusal(err, "noting where the slots of watcher "+watcher+" begin", "find and update", d.coll)
	}
	return v.Start, nil
}

// Mark notes that a division anew is under way, and which documents an operator had paused before it; what was noted by one that
// broke off stays.
func (d *Divisions) Mark(ctx context.Context, watcher string, of int, paused []string) error {
	_, err := d.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: watcher}}, mongo.Pipeline{{{Key: "$set", Value: bson.D{
		{Key: "of", Value: bson.D{{Key: "$ifNull", Value: bson.A{"$of", of}}}},
		{Key: "paused", Value: bson.D{{Key: "$ifNull", Value: bson.A{"$paused", bson.D{{Key: "$literal", Value: paused}}}}}},
	}}}}, options.UpdateOne().SetUpsert(true))
	return describeRefusal(err, "noting the division of watcher "+watcher, "find, insert and update", d.coll)
}

// Unmark takes that back.
func (d *Divisions) Unmark(ctx context.Context, watcher string) error {
	_, err := d.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: watcher}}, bson.D{{Key: "$unset", Value: bson.D{{Key: "paused", Value: ""}}}})
	return describeRefusal(err, "noting the division of watcher "+watcher, "update", d.coll)
}

// Divide makes n the number of slots; all of them have begun, if the watcher has. ctx may be that of a transaction, whose client
// has to be that of the database.
func (d *Divisions) Divide(ctx context.Context, watcher string, n int, begun bool) error {
	list := []int{}
	for i := range n {
		if begun {
			list = append(list, i)
		}
	}
	_, err := d.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: watcher}}, bson.D{
		{Key: "$set", Value: bson.D{{Key: "of", Value: n}, {Key: "begun", Value: list}}},
		{Key: "$unset", Value: bson.D{{Key: "paused", Value: ""}}},
	}, options.UpdateOne().SetUpsert(true))
	return describeRefusal(err, "dividing watcher "+watcher, "find, insert and update", d.coll)
}

// Discard removes a watcher document that was made by mistake: nobody owns it and it has had no position.
func (d *Divisions) Discard(ctx context.Context, id string) error {
	_, err := d.watchers.DeleteOne(ctx, bson.D{
		{Key: "_id", Value: id}, {Key: "owner", Value: nil}, {Key: "clusterTime", Value: nil}, {Key: "token", Value: nil}, {Key: "gap", Value: nil},
	})
	return describeRefusal(err, "removing watcher document "+id, "remove", d.watchers)
}

// describeRefusal adds to err what failed and the privilege that may be missing. It returns nil if err is nil.
func describeRefusal(err error, doing, action string, on *mongo.Collection) error {
	if err == nil {
		return nil
	}
	return mongodb.Refusal(err, doing, action, mongodb.Namespace(on))
}
