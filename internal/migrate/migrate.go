package migrate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/state"
)

// maxConcurrent bounds the collections that are processed concurrently.
const maxConcurrent = 4

// lockBackoff is the wait between two attempts to acquire the lock.
var lockBackoff = retry.Policy{Base: 100 * time.Millisecond, Cap: 2 * time.Second}

// Migrator migrates one deployment. State and Outboxes are required. Its methods are safe for concurrent
// use.
type Migrator struct {
	State state.Database
	// Outboxes returns the watched collections. They must be reachable with the client of State.
	Outboxes func(ctx context.Context) ([]outboxes.Outbox, error)
	// Node and Version are recorded in the ledger.
	Node, Version string
	// Steps defaults to the steps of this version.
	Steps []Step
	// CheckStep is called before a breaking step, and again after the step was announced in the ledger. If it
	// returns an error, the step and all later ones stay pending, and Up returns the error. nil permits
	// every step.
	CheckStep func(ctx context.Context, s Step) error
	// Log gets one line per step. nil discards them.
	Log *slog.Logger
}

// Grant is a privilege that the user lacks.
type Grant struct {
	Action string `json:"action" bson:"action"` // as in a role
	On     string `json:"on" bson:"on"`         // a namespace, or "cluster"
	Advice string `json:"advice,omitempty" bson:"advice,omitempty"`
}

// Report is the result of Up.
type Report struct {
	Applied []string `json:"applied"` // ids of steps that are complete now
	Pending []string `json:"pending"` // ids of steps that lack a privilege, or that a long transaction blocks
	Newer   []string `json:"newer"`   // ids in the ledger that this version does not contain but can work with
	// Conflicts describes indexes that differ from the declared ones. Up does not change them: verify
	// repairs them.
	Conflicts []string `json:"conflicts"`
	Missing   []Grant  `json:"missing"` // missing privileges, without duplicates
	Busy      []string `json:"busy"`    // changes that open transactions prevented; retry them later
}

// OK reports whether all collections are as declared.
func (r Report) OK() bool {
	return len(r.Pending) == 0 && len(r.Conflicts) == 0 && len(r.Missing) == 0 && len(r.Busy) == 0
}

func (m *Migrator) knownSteps() []Step {
	if m.Steps != nil {
		return m.Steps
	}
	return Steps()
}

func (m *Migrator) openLog() *slog.Logger {
	if m.Log != nil {
		return m.Log
	}
	return slog.New(slog.DiscardHandler)
}

func (m *Migrator) openLedger() ledger {
	coll := mongodb.Majority(m.State.Collection(ledgerName))
	return ledger{coll: coll, steps: m.knownSteps(), node: m.Node, version: m.Version}
}

// Up applies the steps that are not in the ledger yet, in order and under the lock. Then it makes sure
// that every collection has its indexes. It blocks while another process holds the lock. If a missing
// privilege, an index of another owner or a long transaction prevents a change, the report contains it,
// and the step stays pending. The error is [ErrChanged] or [ErrNewer], both without any change,
// the error of CheckStep, or an error of the server.
func (m *Migrator) Up(ctx context.Context) (Report, error) {
	r := newCollector()
	collections, err := m.listOutboxes(ctx, r)
	if err != nil {
		return r.Report, err
	}
	complete := r.OK()
	if err := m.applyPendingSteps(ctx, collections, complete, r); err != nil {
		return r.Report, err
	}

	// Indexes are compared also without pending steps: somebody may have dropped one.
	err = m.forEachCollection(ctx, collections, r, m.ensureDeclared)
	return r.sortedReport(), err
}

// listOutboxes returns the result of Outboxes. If the user lacks the privilege to list, it returns none.
func (m *Migrator) listOutboxes(ctx context.Context, r *collector) ([]outboxes.Outbox, error) {
	list, err := m.Outboxes(ctx)
	if err := r.absorbError(err); err != nil {
		return nil, fmt.Errorf("listing collections to migrate: %w", err)
	}
	return list, nil
}

// applyPendingSteps applies the pending steps. It blocks while another process holds the lock. complete
// reports whether collections has all watched collections. Without the privileges for the ledger no step is
// applied, but the collections still get their indexes from Up.
func (m *Migrator) applyPendingSteps(ctx context.Context, collections []outboxes.Outbox, complete bool, r *collector) error {
	l := m.openLedger()
	lock := newLock(l.coll, m.Node, m.Version, lockTTL)
	back := lockBackoff.Start()
	for {
		pending, err := m.pendingSteps(ctx, l, r)
		if err != nil || len(pending) == 0 {
			return r.absorbError(err)
		}

		acquired, err := lock.tryAcquire(ctx)
		if err != nil {
			r.markPending(pending)
			return r.absorbError(err)
		}
		if acquired {
			err = lock.runHolding(ctx, func(ctx context.Context) error {
				return m.applyHoldingLock(ctx, l, collections, complete, r)
			})
			// If the lock was lost, another process applies the steps now, and the loop waits for it.
			if !errors.Is(err, errLockLost) {
				return err
			}
		}

		if back.Wait(ctx) != nil {
			return fmt.Errorf("waiting for the migration lock in %s: %w", mongodb.Namespace(l.coll), context.Cause(ctx))
		}
	}
}

func (m *Migrator) pendingSteps(ctx context.Context, l ledger, r *collector) ([]Step, error) {
	entries, err := l.readEntries(ctx)
	if err != nil {
		r.markPending(l.steps)
		return nil, err
	}

	pending, newer, err := l.compareSteps(entries)
	r.Newer = append([]string{}, newer...)
	return pending, err
}

// applyHoldingLock applies the pending steps. The caller must hold the migration lock.
func (m *Migrator) applyHoldingLock(
	ctx context.Context, l ledger, collections []outboxes.Outbox, complete bool, r *collector,
) error {
	// Another process may have applied steps before this process acquired the lock.
	pending, err := m.pendingSteps(ctx, l, r)
	if err != nil {
		return err
	}

	for _, s := range pending {
		if err := m.checkBreakingStep(ctx, l, s); err != nil {
			r.markPending([]Step{s})
			return r.absorbError(err)
		}

		began := time.Now()
		own, err := m.applyStep(ctx, s, collections)
		if err != nil {
			return fmt.Errorf("migration %s (%s): %w", s.ID, s.Name, err)
		}
		r.mergeReport(own)

		// The privileges that listing the outboxes lacked are missing for every step.
		missing := own.Missing
		if !complete {
			missing = r.sortedReport().Missing
		}
		outcome := outcomeApplied
		if len(missing)+len(own.Busy) > 0 {
			outcome = outcomeIncomplete
		}
		if err := l.recordStep(ctx, s, time.Since(began), outcome, missing); err != nil {
			r.markPending([]Step{s})
			return r.absorbError(err)
		}

		if outcome == outcomeIncomplete {
			r.markPending([]Step{s})
			m.openLog().Debug("migration is incomplete and will be retried", "migration", s.ID, "name", s.Name,
				"missing_privileges", len(missing), "busy", own.Busy)
			continue
		}
		r.markApplied(s)
		m.openLog().Info("migration is complete", "migration", s.ID, "name", s.Name,
			"collections", len(collections), "took", time.Since(began).Round(time.Millisecond))
	}
	return nil
}

// applyStep applies one step to all its collections. If a privilege is missing on one collection, it
// continues with the others.
func (m *Migrator) applyStep(ctx context.Context, s Step, collections []outboxes.Outbox) (Report, error) {
	own := newCollector()
	err := m.forEachCollection(ctx, collections, own, func(ctx context.Context, on Kind, coll *mongo.Collection) error {
		return applyToCollection(ctx, m.knownSteps(), s, on, coll)
	})
	return own.sortedReport(), err
}

// applyToCollection applies a step to one collection. It creates only indexes that no later step drops,
// so a collection that is new to the relay does not repeat the history of all steps.
func applyToCollection(ctx context.Context, steps []Step, s Step, on Kind, coll *mongo.Collection) error {
	declared := declaredIndexes(steps, on)

	var create, drop []mongodb.Index
	for _, c := range s.Create {
		if c.On == on && hasIndexNamed(declared, c.Index.Name) {
			create = append(create, c.Index)
		}
	}
	for _, c := range s.Drop {
		if c.On == on {
			drop = append(drop, c.Index)
		}
	}
	return changeIndexes(ctx, coll, create, drop)
}

// changeIndexes creates and drops indexes. It creates a replacement before it drops the old index. The
// exception are indexes with the same keys, of which the server accepts only one.
func changeIndexes(ctx context.Context, coll *mongo.Collection, create, drop []mongodb.Index) error {
	dropWhere := func(sameKeys bool) error {
		for _, d := range drop {
			same := slices.ContainsFunc(create, func(c mongodb.Index) bool { return slices.Equal(c.Keys, d.Keys) })
			if same != sameKeys {
				continue
			}
			if _, err := mongodb.DropIndex(ctx, coll, d); err != nil {
				return err
			}
		}
		return nil
	}

	if err := dropWhere(true); err != nil {
		return err
	}
	if len(create) > 0 {
		if err := mongodb.EnsureIndexSet(ctx, coll, create); err != nil {
			return err
		}
	}
	return dropWhere(false)
}

// outboxCollections returns the collections of an outbox. The collection of its dead letters is included
// only if it has documents, so that tenants without dead letters do not each cost a collection.
func (m *Migrator) outboxCollections(ctx context.Context, o outboxes.Outbox) (map[Kind]*mongo.Collection, error) {
	db := mongodb.Database(m.State.Client(), o.DB)
	colls := map[Kind]*mongo.Collection{Outbox: db.Collection(o.Coll)}
	return colls, nil
}

// Prepare creates the declared indexes of one outbox and its dead letters, and drops the superseded ones.
// It is for a collection that appears while the relay runs, or that got its first dead letters. It does
// not use the ledger. The error is an error of the server.
func (m *Migrator) Prepare(ctx context.Context, o outboxes.Outbox) (Report, error) {
	r := newCollector()
	err := m.forEachOfOutbox(ctx, o, r, m.ensureDeclared)
	return r.sortedReport(), err
}

// ensureDeclared makes the indexes of a collection those that the steps declare for its kind.
func (m *Migrator) ensureDeclared(ctx context.Context, on Kind, coll *mongo.Collection) error {
	steps := m.knownSteps()
	return changeIndexes(ctx, coll, declaredIndexes(steps, on), supersededIndexes(steps, on))
}

// visitor is called for one collection and its kind.
type visitor func(ctx context.Context, on Kind, coll *mongo.Collection) error

// forEachCollection calls visit for the collections of the state database that have a declaration, and then for the
// collections of every outbox, maxConcurrent outboxes at a time. It adds errors after which the others can be visited to
// r, and returns the first other error.
func (m *Migrator) forEachCollection(ctx context.Context, list []outboxes.Outbox, r *collector, visit visitor) error {
	for _, name := range stateCollections(m.knownSteps()) {
		if err := r.absorbError(visit(ctx, stateKind(name), m.State.Collection(name))); err != nil {
			return err
		}
	}

	// A watcher may have a thousand outboxes.
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxConcurrent)
	for _, o := range list {
		g.Go(func() error {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return m.forEachOfOutbox(ctx, o, r, visit)
		})
	}
	return g.Wait()
}

// forEachOfOutbox is forEachCollection for the collections of one outbox.
func (m *Migrator) forEachOfOutbox(ctx context.Context, o outboxes.Outbox, r *collector, visit visitor) error {
	colls, err := m.outboxCollections(ctx, o)
	if err != nil {
		return r.absorbError(err)
	}
	for on, coll := range colls {
		if err := r.absorbError(visit(ctx, on, coll)); err != nil {
			return err
		}
	}
	return nil
}
