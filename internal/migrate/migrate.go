package migrate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/schema"
	"github.com/outrelay/outrelay/internal/store"
)

// maxConcurrent bounds the collections that are looked at at once.
const maxConcurrent = 4

// lockBackoff is between two tries for the lock.
var lockBackoff = retry.Policy{Base: 100 * time.Millisecond, Cap: 2 * time.Second}

// Migrator knows one deployment. State and Outboxes are needed; its methods may be called from several goroutines.
type Migrator struct {
	State *mongo.Database
	// Outboxes lists the collections that are watched; its client is that of State.
	Outboxes func(ctx context.Context) ([]store.Outbox, error)
	// Node and Version go into the ledger.
	Node, Version string
	// TTL is how long the lock of a dead holder keeps others out. Defaults to 30 s.
	TTL time.Duration
	// Steps default to those of this version.
	Steps []Step
	// Ready is asked before a breaking step, and once more when it is announced in the ledger: an error keeps the step, and
	// those behind it, pending, and is what Up returns. nil asks nobody.
	Ready func(ctx context.Context, s Step) error
	// Log gets one line for each step. Defaults to none.
	Log *slog.Logger
}

// Grant is an action that the user may not do.
type Grant struct {
	Action string `json:"action" bson:"action"` // as roles name it
	On     string `json:"on" bson:"on"`         // a namespace, or "cluster"
	Advice string `json:"advice,omitempty" bson:"advice,omitempty"`
}

// Report is what Up did and found.
type Report struct {
	Applied []string `json:"applied"` // ids of steps that are done now
	Pending []string `json:"pending"` // ids of steps that could not be done for want of a privilege, or beside a long transaction
	Newer   []string `json:"newer"`   // ids in the ledger that this version does not know and can bear
	// Conflicts are indexes that stand where others are declared, as text. They are left alone: verify repairs them.
	Conflicts []string `json:"conflicts"`
	Missing   []Grant  `json:"missing"` // privileges, each once
	Busy      []string `json:"busy"`    // what open transactions stood in the way of, as text: it is to be tried again
}

// OK reports whether everything is as it is declared.
func (r Report) OK() bool {
	return len(r.Pending) == 0 && len(r.Conflicts) == 0 && len(r.Missing) == 0 && len(r.Busy) == 0
}

func (m *Migrator) knownSteps() []Step {
	if m.Steps != nil {
		return m.Steps
	}
	return Steps()
}

func (m *Migrator) logger() *slog.Logger {
	if m.Log != nil {
		return m.Log
	}
	return slog.New(slog.DiscardHandler)
}

func (m *Migrator) openLedger() ledger {
	return ledger{coll: store.Majority(m.State.Collection(Collection)), steps: m.knownSteps(), node: m.Node, version: m.Version}
}

// Up takes the steps that are not in the ledger yet, in their order and under the lock, and then makes sure that every
// collection has its indexes. It waits while another process holds the lock. What a missing privilege, an index of
// somebody else or a long transaction stood in the way of is in the report; such a step stays pending. The error is a [*ChangedError] or a
// [*NewerError], with nothing done, that of Ready, or that of a server that does not answer.
func (m *Migrator) Up(ctx context.Context) (Report, error) {
	r := newCollector()
	outboxes, err := m.listOutboxes(ctx, r)
	if err != nil {
		return r.Report, err
	}
	listed := r.OK()
	if err := m.applyPendingSteps(ctx, outboxes, listed, r); err != nil {
		return r.Report, err
	}
	steps := m.knownSteps()
	for _, name := range stateCollections(steps) {
		if err := r.absorbError(changeIndexes(ctx, m.State.Collection(name), declaredIndexes(steps, State(name)), supersededIndexes(steps, State(name)))); err != nil {
			return r.Report, err
		}
	}
	err = forEachOutbox(ctx, outboxes, func(ctx context.Context, o store.Outbox) error { return m.prepareOutbox(ctx, o, r) })
	return r.sortedReport(), err
}

// listOutboxes is what Outboxes says; a user who may not list sees none.
func (m *Migrator) listOutboxes(ctx context.Context, r *collector) ([]store.Outbox, error) {
	list, err := m.Outboxes(ctx)
	if err := r.absorbError(err); err != nil {
		return nil, fmt.Errorf("listing collections to migrate: %w", err)
	}
	return list, nil
}

// applyPendingSteps takes the pending steps. Without the privileges for the ledger none is taken: the collections get their indexes
// all the same.
func (m *Migrator) applyPendingSteps(ctx context.Context, outboxes []store.Outbox, listed bool, r *collector) error {
	l := m.openLedger()
	ttl := m.TTL
	if ttl == 0 {
		ttl = defaultTTL
	}
	mine, back := newLock(l.coll, m.Node, m.Version, ttl), lockBackoff.Start()
	for {
		pending, err := m.pendingSteps(ctx, l, r)
		if err != nil || len(pending) == 0 {
			return r.absorbError(err)
		}
		have, err := mine.tryAcquire(ctx)
		if err != nil {
			r.markPending(pending)
			return r.absorbError(err)
		}
		if have {
			err = mine.runHolding(ctx, func(ctx context.Context) error { return m.applyHoldingLock(ctx, l, outboxes, listed, r) })
		}
		switch {
		case have && !errors.Is(err, errLockLost):
			return err
		case back.Wait(ctx) != nil:
			return fmt.Errorf("waiting for the migration lock in %s: %w", store.Namespace(l.coll), context.Cause(ctx))
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
	r.setNewer(newer)
	return pending, err
}

// applyHoldingLock does the steps that are pending now that the lock is held.
func (m *Migrator) applyHoldingLock(ctx context.Context, l ledger, outboxes []store.Outbox, listed bool, r *collector) error {
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
		own, err := m.applyStep(ctx, s, outboxes)
		if err != nil {
			return fmt.Errorf("migration %s (%s): %w", s.ID, s.Name, err)
		}
		r.mergeReport(own)
		missing := own.Missing
		if !listed {
			missing = append(missing, r.missingGrants()...)
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
			m.logger().Debug("a migration is not complete; it is tried again", "migration", s.ID, "name", s.Name, "missing_privileges", len(missing), "busy", own.Busy)
			continue
		}
		r.markApplied(s)
		m.logger().Info("a migration is done", "migration", s.ID, "name", s.Name, "collections", len(outboxes), "took", time.Since(began).Round(time.Millisecond))
	}
	return nil
}

// applyStep does one step on every collection that it is about. What may not be done somewhere is done elsewhere all the same.
func (m *Migrator) applyStep(ctx context.Context, s Step, outboxes []store.Outbox) (*collector, error) {
	own := newCollector()
	for _, name := range stateCollections([]Step{s}) {
		if err := own.absorbError(applyToCollection(ctx, m.knownSteps(), s, State(name), m.State.Collection(name))); err != nil {
			return nil, err
		}
	}
	err := forEachOutbox(ctx, outboxes, func(ctx context.Context, o store.Outbox) error {
		kinds, err := m.outboxCollections(ctx, o)
		if err != nil {
			return own.absorbError(err)
		}
		for kind, coll := range kinds {
			if err := own.absorbError(applyToCollection(ctx, m.knownSteps(), s, kind, coll)); err != nil {
				return err
			}
		}
		return nil
	})
	return own, err
}

// applyToCollection makes only those of the step's indexes that no later step drops: a collection that is new to the relay does not
// go through its history.
func applyToCollection(ctx context.Context, steps []Step, s Step, on Kind, coll *mongo.Collection) error {
	now := declaredIndexes(steps, on)
	var create, drop []store.Index
	for _, c := range s.Create {
		if c.On == on && slices.ContainsFunc(now, func(i store.Index) bool { return i.Name == c.Index.Name }) {
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

// changeIndexes makes and drops. What replaces an index is there before it goes, except that the server has no two indexes of
// the same keys.
func changeIndexes(ctx context.Context, coll *mongo.Collection, create, drop []store.Index) error {
	drops := func(inTheWay bool) error {
		for _, d := range drop {
			same := slices.ContainsFunc(create, func(c store.Index) bool { return slices.Equal(c.Keys, d.Keys) })
			if same != inTheWay {
				continue
			}
			if _, err := store.DropIndex(ctx, coll, d); err != nil {
				return err
			}
		}
		return nil
	}
	if err := drops(true); err != nil {
		return err
	}
	if len(create) > 0 {
		if err := store.EnsureIndexSet(ctx, coll, create); err != nil {
			return err
		}
	}
	return drops(false)
}

// outboxCollections are the collections that belong to an outbox. Its dead letters have indexes once there are any, so that tenants
// without any do not each cost a collection.
func (m *Migrator) outboxCollections(ctx context.Context, o store.Outbox) (map[Kind]*mongo.Collection, error) {
	db := m.State.Client().Database(o.DB)
	kinds := map[Kind]*mongo.Collection{Outbox: db.Collection(o.Coll)}
	steps := m.knownSteps()
	if len(declaredIndexes(steps, Dead)) == 0 && len(supersededIndexes(steps, Dead)) == 0 {
		return kinds, nil
	}
	dead := db.Collection(deadletter.Collection(o.Coll))
	empty, err := store.Empty(ctx, dead)
	if err == nil && !empty {
		kinds[Dead] = dead
	}
	return kinds, err
}

// Prepare gives one outbox, and its dead letters if there are any, the indexes that are declared now, and takes the
// superseded ones away: for a collection that appears while the relay runs, or that got its first dead letters. It
// touches no ledger. An error is that of a server that does not answer.
func (m *Migrator) Prepare(ctx context.Context, o store.Outbox) (Report, error) {
	r := newCollector()
	err := m.prepareOutbox(ctx, o, r)
	return r.sortedReport(), err
}

func (m *Migrator) prepareOutbox(ctx context.Context, o store.Outbox, r *collector) error {
	kinds, err := m.outboxCollections(ctx, o)
	if err != nil {
		return r.absorbError(err)
	}
	steps := m.knownSteps()
	for kind, coll := range kinds {
		if err := r.absorbError(changeIndexes(ctx, coll, declaredIndexes(steps, kind), supersededIndexes(steps, kind))); err != nil {
			return err
		}
	}
	return nil
}

// forEachOutbox calls f for every outbox, some at once, and returns the first error.
func forEachOutbox(ctx context.Context, list []store.Outbox, f func(ctx context.Context, o store.Outbox) error) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxConcurrent)
	for _, o := range list {
		g.Go(func() error {
			if err := ctx.Err(); err != nil {
				return context.Cause(ctx)
			}
			return f(ctx, o)
		})
	}
	return g.Wait()
}

// collector is a report that several goroutines fill.
type collector struct {
	mu sync.Mutex
	Report
}

func newCollector() *collector {
	return &collector{Report: Report{Applied: []string{}, Pending: []string{}, Newer: []string{}, Conflicts: []string{}, Missing: []Grant{}, Busy: []string{}}}
}

// absorbError takes an error that ends nothing into the report, and returns any other.
func (c *collector) absorbError(err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p, ok := errors.AsType[*store.PrivilegeError](err); ok {
		c.addGrantLocked(Grant{Action: p.Action, On: p.On, Advice: p.Advice})
		return nil
	}
	if errors.Is(err, schema.ErrBusy) {
		c.Busy = append(c.Busy, err.Error())
		return nil
	}
	if errors.Is(err, store.ErrIndexConflict) {
		if !slices.Contains(c.Conflicts, err.Error()) {
			c.Conflicts = append(c.Conflicts, err.Error())
		}
		return nil
	}
	return err
}

func (c *collector) addGrantLocked(g Grant) {
	if !slices.ContainsFunc(c.Missing, func(h Grant) bool { return h.Action == g.Action && h.On == g.On }) {
		c.Missing = append(c.Missing, g)
	}
}

func (c *collector) mergeReport(o *collector) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, g := range o.Missing {
		c.addGrantLocked(g)
	}
	c.Busy = append(c.Busy, o.Busy...)
	for _, text := range o.Conflicts {
		if !slices.Contains(c.Conflicts, text) {
			c.Conflicts = append(c.Conflicts, text)
		}
	}
}

func (c *collector) missingGrants() []Grant {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.Missing)
}

func (c *collector) markPending(steps []Step) {
	for _, s := range steps {
		if !slices.Contains(c.Pending, s.ID) {
			c.Pending = append(c.Pending, s.ID)
		}
	}
}

func (c *collector) setNewer(ids []string) { c.Newer = append([]string{}, ids...) }

func (c *collector) markApplied(s Step) {
	c.Applied = append(c.Applied, s.ID)
	c.Pending = slices.DeleteFunc(c.Pending, func(id string) bool { return id == s.ID })
}

func (c *collector) sortedReport() Report {
	c.mu.Lock()
	defer c.mu.Unlock()
	slices.SortFunc(c.Missing, func(a, b Grant) int {
		return strings.Compare(a.On+" "+a.Action, b.On+" "+b.Action)
	})
	slices.Sort(c.Conflicts)
	slices.Sort(c.Busy)
	c.Busy = slices.Compact(c.Busy)
	return c.Report
}

const codeUnauthorized = 13

// wrapPrivilegeError wraps err, as a *store.PrivilegeError if the server refused it for that reason.
func wrapPrivilegeError(err error, doing, action, on string) error {
	var se mongo.ServerError
	if errors.As(err, &se) && se.HasErrorCode(codeUnauthorized) {
		err = &store.PrivilegeError{Action: action, On: on, Err: err}
	}
	return fmt.Errorf("%s: %w", doing, err)
}
