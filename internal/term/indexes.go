package term

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/migrate"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/readiness"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/watched"
)

// indexKeeper makes the indexes and the configured expiries of the watched collections.
type indexKeeper struct {
	migrator     *migrate.Migrator // of the watched collections
	client       *mongo.Client
	cfg          *config.Config
	collections  *watched.Collections
	pause        time.Duration // between two attempts to make indexes
	log          *slog.Logger
	inBackground func(func(context.Context))
}

// indexesShare bounds the cost of repeated attempts: after an attempt, the pause is at least this
// many times as long as the attempt took.
const indexesShare = 10

// ensureAllIndexes runs the pending migrations, concurrently with the delivery: without an index
// nothing is lost, but queries are slow.
func (k *indexKeeper) ensureAllIndexes(ctx context.Context) {
	k.ensureUntilDone(ctx, "", k.collections.WatchedOutboxes, k.migrator.Up)
}

// ensureIndexes makes the indexes of a collection that appeared while the relay runs. It does not
// wait for them.
func (k *indexKeeper) ensureIndexes(o outboxes.Outbox) {
	list := func() []outboxes.Outbox { return []outboxes.Outbox{o} }
	prepare := func(ctx context.Context) (migrate.Report, error) { return k.migrator.Prepare(ctx, o) }
	k.inBackground(func(ctx context.Context) { k.ensureUntilDone(ctx, o.NS(), list, prepare) })
}

// ensureUntilDone makes indexes and configured expiries until all of them exist or ctx ends.
// Obstacles are retried: a privilege may be granted, and a long transaction may end. It logs each
// obstacle once.
func (k *indexKeeper) ensureUntilDone(
	ctx context.Context, ns string, outboxes func() []outboxes.Outbox,
	up func(context.Context) (migrate.Report, error),
) {
	logged := map[string]bool{}
	logOnce := func(level slog.Level, text string, args ...any) {
		if key := text + fmt.Sprint(args...); !logged[key] && ctx.Err() == nil {
			logged[key] = true
			k.log.Log(ctx, level, text, args...)
		}
	}

	for {
		began := time.Now()
		done := true
		if k.cfg.MongoDB.Indexes {
			done = k.migrateOnce(ctx, ns, up, logOnce)
		}
		for _, o := range outboxes() {
			done = k.ensureExpiries(ctx, o, logOnce) && done
		}
		if done || retry.Sleep(ctx, max(k.pause, indexesShare*time.Since(began))) != nil {
			return
		}
	}
}

// migrateOnce makes one attempt at up. It reports whether another attempt would change nothing.
func (k *indexKeeper) migrateOnce(
	ctx context.Context, ns string, up func(context.Context) (migrate.Report, error),
	logOnce func(slog.Level, string, ...any),
) bool {
	report, err := up(ctx)
	// In these two cases, each attempt of this version fails in the same way.
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

// ensureExpiries sets the configured expiry of marked envelopes, which the
// server removes. It reports whether that succeeded.
func (k *indexKeeper) ensureExpiries(ctx context.Context, o outboxes.Outbox, logOnce func(slog.Level, string, ...any)) bool {
	db := mongodb.Database(k.client, o.DB)
	done := true
	if _, err := outboxes.EnsureSentTTL(ctx, db.Collection(o.Coll), k.cfg.Purge.TTL); err != nil {
		done = false
		logOnce(slog.LevelWarn, "purge.ttl is not in force for this collection", "collection", o.NS(), "reason", err)
	}
	return done
}

// checkSchema returns a *HaltError if a newer version has run a migration with which this version
// would do damage. It runs before anything is read. If the ledger of migrations cannot be read, it
// returns nil.
func (k *indexKeeper) checkSchema(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, SchemaTimeout)
	defer cancel()
	status, err := k.migrator.Status(ctx)
	if err != nil {
		k.log.Debug("cannot read the ledger of migrations", "reason", err)
		return nil
	}

	for _, s := range status.Steps {
		known := func(mine migrate.Step) bool { return mine.ID == s.ID }
		if s.Breaking && !slices.ContainsFunc(k.migrator.Steps, known) {
			return &readiness.HaltError{
				What: "the collections belong to a newer version",
				Err:  migrate.NewerError(s.ID, s.Name, s.Version),
				Fix:  "run that version or a newer one; no envelope is lost",
			}
		}
	}
	return nil
}

// SchemaTimeout bounds a read of the ledger of migrations or of the division. It protects against a
// rare mistake, and must not delay a takeover.
const SchemaTimeout = 2 * time.Second
