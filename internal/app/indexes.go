package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/migrate"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/store"
)

// newMigrator brings indexes to what this version declares.
func (r *Relay) newMigrator(outboxes func(context.Context) ([]store.Outbox, error)) *migrate.Migrator {
	db := r.mongo.state.Database(r.cfg.MongoDB.State)
	return &migrate.Migrator{State: db, Node: r.cfg.Node, Version: r.version, Steps: r.steps, Ready: nodes.Ready(db), Log: r.log, Outboxes: outboxes}
}

func (t *term) newTermMigrator() *migrate.Migrator {
	return t.Relay.newMigrator(func(context.Context) ([]store.Outbox, error) { return t.watchedOutboxes(), nil })
}

// indexesShare bounds what repeated attempts may cost: where one takes long, the next one comes so many times later.
const indexesShare = 10

// ensureAllIndexes runs the migrations that are pending, beside the delivery: without an index nothing is lost, only slow.
func (t *term) ensureAllIndexes(ctx context.Context) {
	t.ensureUntilDone(ctx, "", t.watchedOutboxes, t.newTermMigrator().Up)
}

// ensureIndexes prepares a collection that appeared while the relay runs.
func (t *term) ensureIndexes(ctx context.Context, o store.Outbox) {
	t.ensureUntilDone(ctx, o.NS(), func() []store.Outbox { return []store.Outbox{o} }, func(ctx context.Context) (migrate.Report, error) {
		return t.newTermMigrator().Prepare(ctx, o)
	})
}

// ensureUntilDone makes indexes, and expiries as they are configured, until all are there: what a privilege is missing for is done soon after it
// was granted, and what a long transaction stood in the way of when that is over. It tells of each obstacle once.
func (t *term) ensureUntilDone(ctx context.Context, ns string, outboxes func() []store.Outbox, up func(context.Context) (migrate.Report, error)) {
	told := map[string]bool{}
	tell := func(level slog.Level, text string, args ...any) {
		if key := text + fmt.Sprint(args...); !told[key] && ctx.Err() == nil {
			told[key] = true
			t.log.Log(ctx, level, text, args...)
		}
	}
	for {
		began, done := time.Now(), true
		if t.cfg.MongoDB.Indexes {
			done = t.migrateOnce(ctx, ns, up, tell)
		}
		for _, o := range outboxes() {
			done = t.ensureExpiries(ctx, o, tell) && done
		}
		if done || retry.Sleep(ctx, max(t.pace.indexes, indexesShare*time.Since(began))) != nil {
			return
		}
	}
}

// migrateOnce makes one attempt, and reports whether a further one would change nothing.
func (t *term) migrateOnce(ctx context.Context, ns string, up func(context.Context) (migrate.Report, error), tell func(slog.Level, string, ...any)) bool {
	report, err := up(ctx)
	final := errors.Is(err, migrate.ErrNewer) || errors.Is(err, migrate.ErrChanged)
	if err != nil {
		level := slog.LevelWarn
		if final {
			level = slog.LevelError
		}
		tell(level, "migrations did not run; delivery goes on", "reason", err, "advice", "run `outrelay migrate status`")
	}
	for _, g := range report.Missing {
		tell(slog.LevelWarn, "an index is missing for want of a privilege; sweeps, scheduled deliveries and queries are slow without it",
			"collection", ns, "grant", g.Action, "on", g.On, "advice", g.Advice)
	}
	for _, c := range report.Conflicts {
		tell(slog.LevelWarn, "an index differs from what is declared and is left alone", "collection", ns, "index", c, "advice", "run `outrelay migrate verify --repair`")
	}
	for _, b := range report.Busy {
		tell(slog.LevelWarn, "an index is missing because long transactions are open; sweeps, scheduled deliveries and queries are slow without it", "reason", b)
	}
	return final || err == nil && len(report.Missing)+len(report.Busy) == 0
}

// indexFirstDeadLetters prepares the collections that got their first dead letters of this term: those have indexes of their own,
// which are not made before there is something to find.
func (t *term) indexFirstDeadLetters(letters []deadletter.Letter) {
	for i := range letters {
		ns := letters[i].NS
		if t.withDeadLetters[ns] {
			continue
		}
		t.withDeadLetters[ns] = true
		for _, o := range t.watchedOutboxes() {
			if o.NS() == ns {
				t.runInBackground(func(ctx context.Context) { t.ensureIndexes(ctx, o) })
			}
		}
	}
}

// ensureExpiries makes what the server removes by itself as it is configured: marked envelopes, and dead letters. It reports whether that
// is done.
func (t *term) ensureExpiries(ctx context.Context, o store.Outbox, tell func(slog.Level, string, ...any)) bool {
	db, done := t.mongo.state.Database(o.DB), true
	if _, err := store.EnsureSentTTL(ctx, db.Collection(o.Coll), t.cfg.Purge.TTL); err != nil {
		done = false
		tell(slog.LevelWarn, "purge.ttl is not in force for this collection", "collection", o.NS(), "reason", err)
	}
	if err := deadletter.SetExpiry(ctx, db.Collection(deadletter.Collection(o.Coll)), t.cfg.DeadLetters.Expire); err != nil {
		done = false
		tell(slog.LevelWarn, "dead_letters.expire is not in force for this collection", "collection", o.NS(), "reason", err)
	}
	return done
}

// checkSchema halts before anything is read where a newer version did what this one would do harm with. A ledger that cannot
// be read guards nothing.
func (t *term) checkSchema(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, schemaTimeout)
	defer cancel()
	status, err := t.newTermMigrator().Status(ctx)
	if err != nil {
		t.log.Debug("the ledger of migrations cannot be read", "reason", err)
		return nil
	}
	known := t.knownMigrations()
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
