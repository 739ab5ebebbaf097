package app

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/migrate"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/store"
)

// migrator brings indexes to what this version declares.
func (r *Relay) migrator(outboxes func(context.Context) ([]store.Outbox, error)) *migrate.Migrator {
	db := r.mongo.state.Database(r.cfg.MongoDB.State)
	return &migrate.Migrator{State: db, Node: r.cfg.Node, Version: r.version, Steps: r.steps, Ready: nodes.Ready(db), Log: r.log, Outboxes: outboxes}
}

func (t *term) migrator() *migrate.Migrator {
	return t.Relay.migrator(func(context.Context) ([]store.Outbox, error) { return t.outboxes(), nil })
}

// indexes runs the migrations that are pending, beside the delivery: without an index nothing is lost, only slow.
func (t *term) indexes(ctx context.Context) {
	if t.cfg.MongoDB.Indexes {
		report, err := t.migrator().Up(ctx)
		if ctx.Err() != nil {
			return
		}
		level := slog.LevelWarn
		if errors.Is(err, migrate.ErrNewer) || errors.Is(err, migrate.ErrChanged) {
			level = slog.LevelError
		}
		if err != nil {
			t.log.Log(ctx, level, "migrations did not run; delivery goes on", "reason", err, "advice", "run `outrelay migrate status`")
		}
		t.tellMigration(report, "")
	}
	for _, o := range t.outboxes() {
		if ctx.Err() != nil {
			return
		}
		t.expiries(ctx, o)
	}
}

// index prepares a collection that appeared while the relay runs.
func (t *term) index(ctx context.Context, o store.Outbox) {
	if t.cfg.MongoDB.Indexes {
		report, err := t.migrator().Prepare(ctx, o)
		if err != nil && ctx.Err() == nil {
			t.log.Warn("an index is missing; sweeps and scheduled deliveries of this collection are slow without it", "collection", o.NS(), "reason", err)
		}
		t.tellMigration(report, o.NS())
	}
	t.expiries(ctx, o)
}

// firstLetters prepares the collections that got their first dead letters of this term: those have indexes of their own,
// which are not made before there is something to find.
func (t *term) firstLetters(letters []deadletter.Letter) {
	for i := range letters {
		ns := letters[i].NS
		if t.lettered[ns] {
			continue
		}
		t.lettered[ns] = true
		for _, o := range t.outboxes() {
			if o.NS() == ns {
				t.later(func(ctx context.Context) { t.index(ctx, o) })
			}
		}
	}
}

func (t *term) tellMigration(r migrate.Report, ns string) {
	for _, g := range r.Missing {
		t.log.Warn("an index is missing for want of a privilege; sweeps, scheduled deliveries and queries are slow without it",
			"collection", ns, "grant", g.Action, "on", g.On, "advice", g.Advice)
	}
	for _, c := range r.Conflicts {
		t.log.Warn("an index differs from what is declared and is left alone", "collection", ns, "index", c, "advice", "run `outrelay migrate verify --repair`")
	}
}

// expiries makes what the server removes by itself as it is configured: marked envelopes, and dead letters.
func (t *term) expiries(ctx context.Context, o store.Outbox) {
	db := t.mongo.state.Database(o.DB)
	if _, err := store.EnsureSentTTL(ctx, db.Collection(o.Coll), t.cfg.Purge.TTL); err != nil && ctx.Err() == nil {
		t.log.Warn("purge.ttl is not in force for this collection", "collection", o.NS(), "reason", err)
	}
	if err := deadletter.SetExpiry(ctx, db.Collection(deadletter.Collection(o.Coll)), t.cfg.DeadLetters.Expire); err != nil && ctx.Err() == nil {
		t.log.Warn("dead_letters.expire is not in force for this collection", "collection", o.NS(), "reason", err)
	}
}

// guardSchema halts before anything is read where a newer version did what this one would do harm with. A ledger that cannot
// be read guards nothing.
func (t *term) guardSchema(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, schemaTimeout)
	defer cancel()
	status, err := t.migrator().Status(ctx)
	if err != nil {
		t.log.Debug("the ledger of migrations cannot be read", "reason", err)
		return nil
	}
	known := t.migrations()
	for _, s := range status.Steps {
		if s.Breaking && !slices.ContainsFunc(known, func(k migrate.Step) bool { return k.ID == s.ID }) {
			return &HaltError{
				What: "the collections belong to a newer version",
				Err:  &migrate.NewerError{ID: s.ID, Name: s.Name, Version: s.Version},
				Fix:  "run that version or a newer one; nothing is lost meanwhile",
			}
		}
	}
	return nil
}

// schemaTimeout bounds the look into the ledger: it guards against a rare mistake, and must not hold up a take-over.
const schemaTimeout = 2 * time.Second
