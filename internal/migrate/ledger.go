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

	"github.com/outrelay/outrelay/internal/mongodb"
)

// ledgerName is the name of the ledger in the state database.
const ledgerName = "migrations"

var (
	// ErrChanged means that the declaration of a step differs from the one that was applied. Two builds disagree about
	// the indexes of the collections.
	ErrChanged = errors.New("an applied migration was changed")

	// ErrNewer means that this version does not contain a breaking step of the ledger. Unknown steps that only add or
	// drop an index are accepted: an old version works with them, perhaps slower. A step is breaking if older versions
	// would do harm after it.
	ErrNewer = errors.New("migrated by a newer version")
)

// NewerError returns [ErrNewer] for a step that a version has applied.
func NewerError(id, name, version string) error {
	return fmt.Errorf("%w: version %s applied migration %s (%s), which this version cannot work with: run version %s or a newer one",
		ErrNewer, orUnknown(version), id, name, orUnknown(version))
}

func orUnknown(version string) string {
	if version == "" {
		return "unknown"
	}
	return version
}

// The outcomes of a step.
const (
	outcomeApplied    = "applied"
	outcomeIncomplete = "incomplete" // a privilege was missing or a collection busy; the step is retried
	outcomeBegun      = "begun"      // a breaking step that is in progress or was interrupted
)

// entry is one document of the ledger.
type entry struct {
	ID       string    `bson:"_id"`
	Name     string    `bson:"name"`
	Checksum string    `bson:"checksum"`
	Breaking bool      `bson:"breaking"`
	Outcome  string    `bson:"outcome"`
	At       time.Time `bson:"at"` // server time of the last attempt
	Node     string    `bson:"node"`
	Version  string    `bson:"version"`
	TookMS   int64     `bson:"tookMs"`
	Missing  []Grant   `bson:"missing,omitempty"`
}

// ledger is the collection of the ledger, with the steps of this version.
type ledger struct {
	coll          *mongo.Collection
	steps         []Step
	node, version string
}

// readEntries returns the entries ordered by id.
func (l ledger) readEntries(ctx context.Context) ([]entry, error) {
	notLock := bson.D{{Key: "_id", Value: bson.D{{Key: "$ne", Value: lockID}}}}
	byID := options.Find().SetSort(bson.D{{Key: "_id", Value: 1}})
	return mongodb.FindAll[entry](ctx, l.coll, "reading the ledger of migrations", notLock, byID)
}

// compareSteps compares the entries with this version. It returns the pending steps, and the ids of the
// steps that this version does not contain.
func (l ledger) compareSteps(entries []entry) (pending []Step, newer []string, err error) {
	for _, e := range entries {
		i := slices.IndexFunc(l.steps, func(s Step) bool { return s.ID == e.ID })
		if i < 0 {
			// A breaking step means that this version cannot work with the data.
			if e.Breaking {
				return nil, nil, NewerError(e.ID, e.Name, e.Version)
			}
			newer = append(newer, e.ID)
			continue
		}

		// A step that was changed after its release has another effect than the ledger claims.
		declared := l.steps[i].Checksum()
		if e.Outcome == outcomeApplied && e.Checksum != declared {
			return nil, nil, fmt.Errorf("%w: version %s has applied migration %s (%s) with checksum %s, and this version declares it with %s: "+
				"run a released version, and never change an applied migration; `outrelay migrate verify` shows the actual indexes",
				ErrChanged, orUnknown(e.Version), e.ID, e.Name, e.Checksum, declared)
		}
	}

	for _, s := range l.steps {
		applied := func(e entry) bool { return e.ID == s.ID && e.Outcome == outcomeApplied }
		if !slices.ContainsFunc(entries, applied) {
			pending = append(pending, s)
		}
	}
	return pending, newer, nil
}

// recordStep writes the outcome of a step. An entry that is already "applied" stays. So if two processes
// applied the step, because the lock was taken over, the ledger names the first one.
func (l ledger) recordStep(ctx context.Context, s Step, took time.Duration, outcome string, missing []Grant) error {
	recorded := bson.D{
		{Key: "_id", Value: "$_id"},
		{Key: "name", Value: mongodb.Literal(s.Name)},
		{Key: "checksum", Value: mongodb.Literal(s.Checksum())},
		{Key: "breaking", Value: mongodb.Literal(s.Breaking)},
		{Key: "outcome", Value: mongodb.Literal(outcome)},
		{Key: "at", Value: "$$NOW"},
		{Key: "node", Value: mongodb.Literal(l.node)},
		{Key: "version", Value: mongodb.Literal(l.version)},
		{Key: "tookMs", Value: mongodb.Literal(took.Milliseconds())},
	}
	if outcome == outcomeIncomplete {
		recorded = append(recorded, bson.E{Key: "missing", Value: mongodb.Literal(missing)})
	}

	isApplied := bson.D{{Key: "$eq", Value: bson.A{"$outcome", outcomeApplied}}}
	replace := bson.D{{Key: "$cond", Value: bson.A{isApplied, "$$ROOT", recorded}}}
	_, err := l.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: s.ID}},
		mongo.Pipeline{{{Key: "$replaceWith", Value: replace}}}, options.UpdateOne().SetUpsert(true))
	if mongo.IsDuplicateKeyError(err) {
		// Another process created the entry at the same moment, so now it exists.
		return l.recordStep(ctx, s, took, outcome, missing)
	}
	return mongodb.Refusal(err, "recording migration "+s.ID, "find, insert and update", mongodb.Namespace(l.coll))
}
