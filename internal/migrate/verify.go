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

	"github.com/outrelay/outrelay/internal/schema"
	"github.com/outrelay/outrelay/internal/store"
)

// The states of a step, beside the outcomes in the ledger.
const (
	statePending = "pending" // not done yet
	stateChanged = "changed" // applied with another content: see ChangedError
	stateNewer   = "newer"   // of a newer version
)

// Status is what the ledger says, beside what this version knows.
type Status struct {
	Steps []StepStatus `json:"steps"`
	Lock  *LockStatus  `json:"lock"` // nil: nobody migrates now
}

// StepStatus is one step.
type StepStatus struct {
	ID         string    `json:"id"`
	Name       string    `json:"name"`
	State      string    `json:"state"` // applied, pending, begun, incomplete, changed or newer
	Checksum   string    `json:"checksum"`
	Breaking   bool      `json:"breaking,omitempty"` // older versions refuse to start
	At         time.Time `json:"at,omitzero"`        // of the server
	Node       string    `json:"node,omitempty"`
	Version    string    `json:"version,omitempty"`
	DurationMS int64     `json:"duration_ms"`
	Missing    []Grant   `json:"missing,omitempty"` // what an incomplete one wants
}

// LockStatus is who holds the lock.
type LockStatus struct {
	Node        string    `json:"node"`
	Version     string    `json:"version"`
	Since       time.Time `json:"since"`
	ExpiresInMS int64     `json:"expires_in_ms"` // negative: its holder is dead, and the next one takes it
}

// Status reads the ledger and changes nothing. Two commands.
func (m *Migrator) Status(ctx context.Context) (Status, error) {
	l := m.openLedger()
	s := Status{Steps: []StepStatus{}}
	entries, err := l.readEntries(ctx)
	if err != nil {
		return s, err
	}
	for _, step := range l.steps {
		st := StepStatus{ID: step.ID, Name: step.Name, State: statePending, Checksum: step.Checksum(), Breaking: step.Breaking}
		if i := slices.IndexFunc(entries, func(e entry) bool { return e.ID == step.ID }); i >= 0 {
			st.setEntry(entries[i])
			if e := entries[i]; e.Outcome == outcomeApplied && e.Checksum != st.Checksum {
				st.State = stateChanged
			}
		}
		s.Steps = append(s.Steps, st)
	}
	for _, e := range entries {
		if !slices.ContainsFunc(l.steps, func(s Step) bool { return s.ID == e.ID }) {
			st := StepStatus{ID: e.ID, Name: e.Name, Checksum: e.Checksum, Breaking: e.Breaking}
			st.setEntry(e)
			st.State = stateNewer
			s.Steps = append(s.Steps, st)
		}
	}
	slices.SortFunc(s.Steps, func(a, b StepStatus) int { return strings.Compare(a.ID, b.ID) })
	s.Lock, err = l.readLockStatus(ctx)
	return s, err
}

func (s *StepStatus) setEntry(e entry) {
	s.State, s.At, s.Node, s.Version, s.DurationMS, s.Missing = e.Outcome, e.At, e.Node, e.Version, e.TookMS, e.Missing
}

func (l ledger) readLockStatus(ctx context.Context) (*LockStatus, error) {
	cur, err := l.coll.Aggregate(ctx, mongo.Pipeline{
		{{Key: "$match", Value: bson.D{{Key: "_id", Value: lockID}}}},
		{{Key: "$addFields", Value: bson.D{{Key: "now", Value: "$$NOW"}}}},
	})
	if err != nil {
		return nil, wrapPrivilegeError(err, "reading the migration lock", "find", store.Namespace(l.coll))
	}
	var found []struct {
		Lock lockDoc   `bson:",inline"`
		Now  time.Time `bson:"now"`
	}
	if err := cur.All(ctx, &found); err != nil || len(found) == 0 {
		return nil, err
	}
	f := found[0].Lock
	return &LockStatus{Node: f.Node, Version: f.Version, Since: f.Since, ExpiresInMS: f.ExpiresAt.Sub(found[0].Now).Milliseconds()}, nil
}

// Verification is what the collections look like.
type Verification struct {
	Collections int     `json:"collections"` // that were compared
	Drift       []Drift `json:"drift"`
	Missing     []Grant `json:"missing"` // privileges for what could not be compared or repaired
}

// OK reports whether nothing differs any more and everything was seen.
func (v Verification) OK() bool {
	return len(v.Missing) == 0 && !slices.ContainsFunc(v.Drift, func(d Drift) bool { return !d.Repaired })
}

// Drift is one difference.
type Drift struct {
	Collection string          `json:"collection"`
	Index      string          `json:"index"`
	Kind       store.DriftKind `json:"kind"`             // missing, different or superfluous
	Detail     string          `json:"detail,omitempty"` // what is there instead
	Statements []string        `json:"statements"`       // that mend it
	Repaired   bool            `json:"repaired"`
}

// Verify compares every watched outbox, its dead letters if there are any, and the state database with what is declared.
// With repair it makes what is missing, replaces what is different and drops what is superfluous; an index of somebody
// else is never touched. Repairing may be repeated, and two at once do no harm.
func (m *Migrator) Verify(ctx context.Context, repair bool) (Verification, error) {
	r := newCollector()
	outboxes, err := m.listOutboxes(ctx, r)
	if err != nil {
		return Verification{}, err
	}
	v := &verifier{migrator: m, repair: repair, report: r}
	for _, name := range stateCollections(m.knownSteps()) {
		if err := v.compareCollection(ctx, State(name), m.State.Collection(name)); err != nil {
			return Verification{}, err
		}
	}
	err = forEachOutbox(ctx, outboxes, func(ctx context.Context, o store.Outbox) error {
		kinds, err := m.outboxCollections(ctx, o)
		if err != nil {
			return r.absorbError(err)
		}
		for kind, coll := range kinds {
			if err := v.compareCollection(ctx, kind, coll); err != nil {
				return err
			}
		}
		return nil
	})
	slices.SortFunc(v.drift, func(a, b Drift) int { return strings.Compare(a.Collection+" "+a.Index, b.Collection+" "+b.Index) })
	return Verification{Collections: v.compared, Drift: append([]Drift{}, v.drift...), Missing: r.sortedReport().Missing}, err
}

type verifier struct {
	migrator *Migrator
	repair   bool
	report   *collector

	mu       sync.Mutex
	compared int
	drift    []Drift
}

func (v *verifier) compareCollection(ctx context.Context, kind Kind, coll *mongo.Collection) error {
	steps := v.migrator.knownSteps()
	found, err := store.CompareIndexes(ctx, coll, declaredIndexes(steps, kind), supersededIndexes(steps, kind), optionalIndexes(kind)...)
	if err != nil {
		return v.report.absorbError(err)
	}
	v.mu.Lock()
	v.compared++
	v.mu.Unlock()
	for _, f := range found {
		d := Drift{Collection: f.DB + "." + f.Coll, Index: f.Index.Name, Kind: f.Kind, Detail: f.Detail, Statements: f.Statements()}
		if v.repair {
			err := store.RepairIndex(ctx, coll.Database().Client(), f)
			d.Repaired = err == nil
			if errors.Is(err, store.ErrIndexConflict) || errors.Is(err, schema.ErrBusy) {
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
