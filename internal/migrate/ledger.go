package migrate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/store"
)

// Collection is where the ledger is, in the state database.
const Collection = "migrations"

// ErrChanged is what a [*ChangedError] is, ErrNewer what a [*NewerError] is.
var (
	ErrChanged = errors.New("an applied migration was changed")
	ErrNewer   = errors.New("migrated by a newer version")
)

// ChangedError is a step that this version declares otherwise than the one that applied it: two builds disagree about
// what the collections look like.
type ChangedError struct{ ID, Name, Version, Have, Want string }

func (e *ChangedError) Error() string {
	return fmt.Sprintf("migration %s (%s) was applied by version %s with checksum %s, and this version declares it with %s: run a released version, and never change a migration that was applied; `outrelay migrate verify` tells what the collections look like",
		e.ID, e.Name, orUnknown(e.Version), e.Have, e.Want)
}

// Is makes the error an [ErrChanged].
func (e *ChangedError) Is(target error) bool { return target == ErrChanged }

// NewerError is a breaking step that this version does not know. Steps that only add or drop an index are borne: an old
// version works with them, only slower or with an index too many. A breaking one says itself that older versions would
// do harm.
type NewerError struct{ ID, Name, Version string }

func (e *NewerError) Error() string {
	return fmt.Sprintf("version %s applied migration %s (%s), which this version cannot work with: run version %s or a newer one",
		orUnknown(e.Version), e.ID, e.Name, orUnknown(e.Version))
}

// Is makes the error an [ErrNewer].
func (e *NewerError) Is(target error) bool { return target == ErrNewer }

func orUnknown(version string) string {
	if version == "" {
		return "unknown"
	}
	return version
}

// The outcomes of a step.
const (
	outcomeApplied    = "applied"
	outcomeIncomplete = "incomplete" // a privilege was missing somewhere: it is tried again
	outcomeBegun      = "begun"      // a breaking one that is being done, or was broken off
)

// entry is one document of the ledger.
type entry struct {
	ID       string    `bson:"_id"`
	Name     string    `bson:"name"`
	Checksum string    `bson:"checksum"`
	Breaking bool      `bson:"breaking"`
	Outcome  string    `bson:"outcome"`
	At       time.Time `bson:"at"` // of the server, when it was done or tried last
	Node     string    `bson:"node"`
	Version  string    `bson:"version"`
	TookMS   int64     `bson:"tookMs"`
	Missing  []Grant   `bson:"missing,omitempty"`
}

// ledger is the collection with the steps of this version beside it.
type ledger struct {
	coll          *mongo.Collection
	steps         []Step
	node, version string
}

// readEntries returns the entries in order.
func (l ledger) readEntries(ctx context.Context) ([]entry, error) {
	cur, err := l.coll.Find(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$ne", Value: lockID}}}}, options.Find().SetSort(bson.D{{Key: "_id", Value: 1}}))
	if err != nil {
		return nil, wrapPrivilegeError(err, "reading the ledger of migrations", "find", store.Namespace(l.coll))
	}
	var out []entry
	if err := cur.All(ctx, &out); err != nil {
		return nil, fmt.Errorf("reading the ledger of migrations: %w", err)
	}
	return out, nil
}

// compareSteps compares the entries with this version: the steps that are to be done, and the ids of those it does not know.
func (l ledger) compareSteps(entries []entry) (pending []Step, newer []string, err error) {
	for _, e := range entries {
		i := slices.IndexFunc(l.steps, func(s Step) bool { return s.ID == e.ID })
		switch {
		case i < 0 && e.Breaking:
			return nil, nil, &NewerError{ID: e.ID, Name: e.Name, Version: e.Version}
		case i < 0:
			newer = append(newer, e.ID)
		case e.Outcome == outcomeApplied && e.Checksum != l.steps[i].Checksum():
			return nil, nil, &ChangedError{ID: e.ID, Name: e.Name, Version: e.Version, Have: e.Checksum, Want: l.steps[i].Checksum()}
		}
	}
	for _, s := range l.steps {
		if !slices.ContainsFunc(entries, func(e entry) bool { return e.ID == s.ID && e.Outcome == outcomeApplied }) {
			pending = append(pending, s)
		}
	}
	return pending, newer, nil
}

// recordStep writes what became of a step. An applied one stays: of two that did it, after a lock was stolen, the first is
// named.
func (l ledger) recordStep(ctx context.Context, s Step, took time.Duration, outcome string, missing []Grant) error {
	lit := func(v any) bson.D { return bson.D{{Key: "$literal", Value: v}} }
	made := bson.D{
		{Key: "_id", Value: "$_id"},
		{Key: "name", Value: lit(s.Name)},
		{Key: "checksum", Value: lit(s.Checksum())},
		{Key: "breaking", Value: lit(s.Breaking)},
		{Key: "outcome", Value: lit(outcome)},
		{Key: "at", Value: "$$NOW"},
		{Key: "node", Value: lit(l.node)},
		{Key: "version", Value: lit(l.version)},
		{Key: "tookMs", Value: lit(took.Milliseconds())},
	}
	if outcome == outcomeIncomplete {
		made = append(made, bson.E{Key: "missing", Value: lit(missing)})
	}
	_, err := l.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: s.ID}}, mongo.Pipeline{{{Key: "$replaceWith", Value: bson.D{{Key: "$cond", Value: bson.A{
		bson.D{{Key: "$eq", Value: bson.A{"$outcome", outcomeApplied}}}, "$$ROOT", made,
	}}}}}}, options.UpdateOne().SetUpsert(true))
	if mongo.IsDuplicateKeyError(err) {
		return l.recordStep(ctx, s, took, outcome, missing) // made by another at the same moment; now it is there
	}
	if err != nil {
		return wrapPrivilegeError(err, "recording migration "+s.ID, "find, insert and update", store.Namespace(l.coll))
	}
	return nil
}
