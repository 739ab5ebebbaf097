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
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/retry"
)

// newMigrator returns a migrator that makes the indexes that this version declares, for the listed
// outboxes.
func (r *Relay) newMigrator(outboxes func(context.Context) ([]outboxes.Outbox, error)) *migrate.Migrator {
	db := r.mongo.state.Database(r.cfg.MongoDB.State)
	return &migrate.Migrator{
		State:     db,
		Node:      r.cfg.Node,
		Version:   r.version,
		Steps:     r.steps,
		CheckStep: nodes.NewStepCheck(db),
		Log:       r.log,
		Outboxes:  outboxes,
	}
}

// newTermMigrator returns a migrator for the watched collections.
func (t *term) newTermMigrator() *migrate.Migrator {
	return t.slot.relay.newMigrator(func(context.Context) ([]outboxes.Outbox, error) { return t.watchedOutboxes(), nil })
}

// indexesShare bounds the cost of repeated attempts: after an attempt, the pause is at least this
// many times as long as the attempt took.
const indexesShare = 10

// ensureAllIndexes runs the pending migrations, concurrently with the delivery: without an index
// nothing is lost, but queries are slow.
func (t *term) ensureAllIndexes(ctx context.Context) {
	t.ensureUntilDone(ctx, "", t.watchedOutboxes, t.newTermMigrator().Up)
}

// ensureIndexes makes the indexes of a collection that appeared while the relay runs.
func (t *term) ensureIndexes(ctx context.Context, o outboxes.Outbox) {
	list := func() []outboxes.Outbox { return []outboxes.Outbox{o} }
	t.ensureUntilDone(ctx, o.NS(), list, func(ctx context.Context) (migrate.Report, error) {
		return t.newTermMigrator().Prepare(ctx, o)
	})
}

// ensureUntilDone makes indexes and configured expiries until all of them exist or ctx ends.
// Obstacles are retried: a privilege may be granted, and a long transaction may end. It logs each
// obstacle once.
func (t *term) ensureUntilDone(
	ctx context.Context, ns string, outboxes func() []outboxes.Outbox,
	up func(context.Context) (migrate.Report, error),
) {
	logged := map[string]bool{}
	logOnce := func(level slog.Level, text string, args ...any) {
		if key := text + fmt.Sprint(args...); !logged[key] && ctx.Err() == nil {
			logged[key] = true
			t.log.Log(ctx, level, text, args...)
		}
	}

	for {
		began := time.Now()
		done := true
		if t.slot.cfg.MongoDB.Indexes {
			done = t.migrateOnce(ctx, ns, up, logOnce)
		}
		for _, o := range outboxes() {
			done = t.ensureExpiries(ctx, o, logOnce) && done
		}
		if done || retry.Sleep(ctx, max(t.slot.relay.pace.indexes, indexesShare*time.Since(began))) != nil {
			return
		}
	}
}

// migrateOnce makes one attempt at up. It reports whether another attempt would change nothing.
func (t *term) migrateOnce(
	ctx context.Context, ns string, up func(context.Context) (migrate.Report, error),
	logOnce func(slog.Level, string, ...any),
) bool {
	report, err := up(ctx)
	final := errors.Is(err, migrate.ErrNewer) || errors.Is(err, migrate.ErrChanged)
	if err != nil {
		level := slog.LevelWarn
		if final {
			level = slog.LevelError
		}
		logOnce(level, "migrations did not run; delivery continues",
			"reason", err, "advice", "run `outrelay migrate status`")
	}

	for _, g := range report.Missing {
		logOnce(slog.LevelWarn,
			"an index is missing because of a missing privilege; sweeps, scheduled deliveries and queries are slow",
			"collection", ns, "grant", g.Action, "on", g.On, "advice", g.Advice)
	}
	for _, c := range report.Conflicts {
		logOnce(slog.LevelWarn, "an index differs from its declaration and is left unchanged",
			"collection", ns, "index", c, "advice", "run `outrelay migrate verify --repair`")
	}
	for _, b := range report.Busy {
		logOnce(slog.LevelWarn,
			"an index is missing because of long transactions; sweeps, scheduled deliveries and queries are slow",
			"reason", b)
	}
	return final || err == nil && len(report.Missing)+len(report.Busy) == 0
}

// indexFirstDeadLetters makes the indexes of dead-letter collections that got their first letters
// in this term. These indexes are not made before there are letters to query.
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

// ensureExpiries sets the configured expiries of marked envelopes and dead letters, which the
// server removes. It reports whether that succeeded.
func (t *term) ensureExpiries(ctx context.Context, o outboxes.Outbox, logOnce func(slog.Level, string, ...any)) bool {
	db := t.slot.relay.mongo.state.Database(o.DB)
	done := true
	if _, err := outboxes.EnsureSentTTL(ctx, db.Collection(o.Coll), t.slot.cfg.Purge.TTL); err != nil {
		done = false
		logOnce(slog.LevelWarn, "purge.ttl is not in force for this collection", "collection", o.NS(), "reason", err)
	}

	letters := db.Collection(deadletter.Collection(o.Coll))
	if err := deadletter.SetExpiry(ctx, letters, t.slot.cfg.DeadLetters.Expire); err != nil {
		done = false
		logOnce(slog.LevelWarn, "dead_letters.expire is not in force for this collection",
			"collection", o.NS(), "reason", err)
	}
	return done
}

// checkSchema returns a *HaltError if a newer version has run a migration with which this version
// would do damage. It runs before anything is read. If the ledger of migrations cannot be read, it
// returns nil.
func (t *term) checkSchema(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, schemaTimeout)
	defer cancel()
	status, err := t.newTermMigrator().Status(ctx)
	if err != nil {
		t.log.Debug("cannot read the ledger of migrations", "reason", err)
		return nil
	}

	known := t.slot.relay.knownMigrations()
	for _, s := range status.Steps {
		if s.Breaking && !slices.ContainsFunc(known, func(k migrate.Step) bool { return k.ID == s.ID }) {
			return &HaltError{
				What: "the collections belong to a newer version",
				Err:  &migrate.NewerError{ID: s.ID, Name: s.Name, Version: s.Version},
				Fix:  "run that version or a newer one; no envelope is lost",
			}
		}
	}
	return nil
}

// schemaTimeout bounds a read of the ledger of migrations or of the division. It protects against a
// rare mistake, and must not delay a takeover.
const schemaTimeout = 2 * time.Second
