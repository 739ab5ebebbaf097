package migrate

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/schema"
)

// The states of a step, in addition to the outcomes in the ledger.
const (
	statePending = "pending" // not applied yet
	stateChanged = "changed" // applied with another declaration: see ErrChanged
	stateNewer   = "newer"   // of a newer version
)

// Status compares the ledger with the steps of this version.
type Status struct {
	Steps []StepStatus `json:"steps"`
	Lock  *LockStatus  `json:"lock"` // nil if no process holds the lock
}

// StepStatus is the status of one step.
type StepStatus struct {
	ID         string    `json:"id"`
	Name       string    `json:"name"`
	State      string    `json:"state"` // applied, pending, begun, incomplete, changed or newer
	Checksum   string    `json:"checksum"`
	Breaking   bool      `json:"breaking,omitempty"` // older versions refuse to start
	At         time.Time `json:"at,omitzero"`        // server time
	Node       string    `json:"node,omitempty"`
	Version    string    `json:"version,omitempty"`
	DurationMS int64     `json:"duration_ms"`
	Missing    []Grant   `json:"missing,omitempty"` // privileges that an incomplete step needs
}

// LockStatus describes the holder of the lock.
type LockStatus struct {
	Node        string    `json:"node"`
	Version     string    `json:"version"`
	Since       time.Time `json:"since"`
	ExpiresInMS int64     `json:"expires_in_ms"` // negative: the holder is dead, and the lock is free
}

// Status reads the ledger and the lock, and changes nothing. It sends two commands.
func (m *Migrator) Status(ctx context.Context) (Status, error) {
	l := m.openLedger()
	status := Status{Steps: []StepStatus{}}
	entries, err := l.readEntries(ctx)
	if err != nil {
		return status, err
	}

	for _, step := range l.steps {
		st := StepStatus{
			ID: step.ID, Name: step.Name, State: statePending, Checksum: step.Checksum(), Breaking: step.Breaking,
		}
		if i := slices.IndexFunc(entries, func(e entry) bool { return e.ID == step.ID }); i >= 0 {
			st.setEntry(entries[i])
			if entries[i].Outcome == outcomeApplied && entries[i].Checksum != st.Checksum {
				st.State = stateChanged
			}
		}
		status.Steps = append(status.Steps, st)
	}

	// Steps of a newer version are listed as well: they explain the indexes that this version does not declare.
	for _, e := range entries {
		if slices.ContainsFunc(l.steps, func(s Step) bool { return s.ID == e.ID }) {
			continue
		}
		st := StepStatus{ID: e.ID, Name: e.Name, Checksum: e.Checksum, Breaking: e.Breaking}
		st.setEntry(e)
		st.State = stateNewer
		status.Steps = append(status.Steps, st)
	}

	slices.SortFunc(status.Steps, func(a, b StepStatus) int { return strings.Compare(a.ID, b.ID) })
	status.Lock, err = l.readLockStatus(ctx)
	return status, err
}

// setEntry sets the fields that come from the ledger.
func (s *StepStatus) setEntry(e entry) {
	s.State, s.At, s.Node, s.Version = e.Outcome, e.At, e.Node, e.Version
	s.DurationMS, s.Missing = e.TookMS, e.Missing
}

// readLockStatus returns the holder of the lock, or nil if there is none.
func (l ledger) readLockStatus(ctx context.Context) (*LockStatus, error) {
	type lockAndTime struct {
		Lock lockDoc   `bson:",inline"`
		Now  time.Time `bson:"now"`
	}
	found, err := mongodb.AggregateAll[lockAndTime](ctx, l.coll, "reading the migration lock", mongo.Pipeline{
		{{Key: "$match", Value: bson.D{{Key: "_id", Value: lockID}}}},
		{{Key: "$addFields", Value: bson.D{{Key: "now", Value: "$$NOW"}}}},
	})
	if err != nil || len(found) == 0 {
		return nil, err
	}

	holder := found[0].Lock
	return &LockStatus{
		Node: holder.Node, Version: holder.Version, Since: holder.Since,
		ExpiresInMS: holder.ExpiresAt.Sub(found[0].Now).Milliseconds(),
	}, nil
}

// Verification is the result of Verify.
type Verification struct {
	Collections int     `json:"collections"` // number of compared collections
	Drift       []Drift `json:"drift"`
	Missing     []Grant `json:"missing"` // privileges that comparing or repairing lacked
}

// OK reports whether every collection was compared and no difference is left.
func (v Verification) OK() bool {
	return len(v.Missing) == 0 && !slices.ContainsFunc(v.Drift, func(d Drift) bool { return !d.Repaired })
}

// Drift is one difference between a collection and its declaration.
type Drift struct {
	Collection string            `json:"collection"`
	Index      string            `json:"index"`
	Kind       mongodb.DriftKind `json:"kind"`             // missing, different or superfluous
	Detail     string            `json:"detail,omitempty"` // the actual index
	Statements []string          `json:"statements"`       // that repair it
	Repaired   bool              `json:"repaired"`
}

// Verify compares every watched outbox, its dead letters if there are any, and the state database with
// their declarations. With repair it creates missing indexes, replaces different ones and drops
// superfluous ones. It never changes indexes that outrelay did not create. A repair may be repeated, and
// two concurrent repairs do no harm.
func (m *Migrator) Verify(ctx context.Context, repair bool) (Verification, error) {
	r := newCollector()
	collections, err := m.listOutboxes(ctx, r)
	if err != nil {
		return Verification{}, err
	}

	v := &verifier{migrator: m, repair: repair, report: r}
	err = m.forEachCollection(ctx, collections, r, v.compareCollection)

	slices.SortFunc(v.drift, func(a, b Drift) int {
		return strings.Compare(a.Collection+" "+a.Index, b.Collection+" "+b.Index)
	})
	return Verification{
		Collections: v.compared, Drift: append([]Drift{}, v.drift...), Missing: r.sortedReport().Missing,
	}, err
}

// verifier is the state of one call of Verify.
type verifier struct {
	migrator *Migrator
	repair   bool
	report   *collector

	mu       sync.Mutex
	compared int
	drift    []Drift
}

// compareCollection compares one collection with its declaration, and repairs it if v.repair is set.
func (v *verifier) compareCollection(ctx context.Context, kind Kind, coll *mongo.Collection) error {
	steps := v.migrator.knownSteps()
	found, err := mongodb.CompareIndexes(ctx, coll, declaredIndexes(steps, kind), supersededIndexes(steps, kind),
		optionalIndexes(kind)...)
	if err != nil {
		return err
	}

	v.mu.Lock()
	v.compared++
	v.mu.Unlock()

	for _, f := range found {
		d := Drift{
			Collection: f.DB + "." + f.Coll, Index: f.Index.Name, Kind: f.Kind,
			Detail: f.Detail, Statements: f.Statements(),
		}
		if v.repair {
			err := mongodb.RepairIndex(ctx, coll.Database().Client(), f)
			d.Repaired = err == nil
			// A conflict or an open transaction is a finding of this index, and the others are repaired.
			if errors.Is(err, mongodb.ErrIndexConflict) || errors.Is(err, schema.ErrBusy) {
				d.Detail, err = err.Error(), nil
			}
			if err := v.report.absorbError(err); err != nil {
				return err
			}
		}

		v.mu.Lock()
		v.drift = append(v.drift, d)
		v.mu.Unlock()
	}
	return nil
}
