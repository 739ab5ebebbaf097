package connect

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/fence"
	"github.com/outrelay/outrelay/internal/glob"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/slots"
)

// Outboxes returns a function that lists the existing collections that the configuration watches,
// sorted by name. It queries each database that may contain one.
func Outboxes(cfg config.Config, client *mongo.Client) func(ctx context.Context) ([]outboxes.Outbox, error) {
	return func(ctx context.Context) ([]outboxes.Outbox, error) {
		scope, err := changestream.ParseScope(cfg.Watch, cfg.State.Pattern())
		if err != nil {
			return nil, fmt.Errorf("watch: %w", err)
		}
		if db, _ := scope.Target(); db != "" {
			return outboxes.ListOutboxes(ctx, client, scope.Matches, db)
		}
		return outboxes.ListOutboxes(ctx, client, scope.Matches)
	}
}

// InspectWatched returns [outboxes.ErrUnwatchable] for the first name in watch, without a pattern, that has no change
// stream. capped lists those that are capped collections.
func InspectWatched(ctx context.Context, cfg config.Config, client *mongo.Client) (capped []string, err error) {
	for _, ns := range cfg.Watch {
		db, coll, _ := strings.Cut(ns, ".")
		if glob.HasWildcard(ns) {
			continue
		}

		is, err := outboxes.Inspect(ctx, client, db, coll)
		if err != nil {
			return capped, err
		}
		if is {
			capped = append(capped, ns)
		}
	}
	return capped, nil
}

// WantedIndexes returns the indexes that a relay with this configuration wants on every watched collection. It wants
// that of scheduled envelopes only where it has seen one.
func WantedIndexes(cfg config.Config) outboxes.Indexes {
	purges := cfg.Retention > 0 && cfg.HasRole(config.RoleRelay) && cfg.HasRole(config.RoleCleaner)
	return outboxes.Indexes{Purge: purges, SentTTL: cfg.Purge.TTL}
}

// Router returns the configured router. choose, if not nil, comes before the rules: see [routing.Config].
func Router(cfg config.Config, choose func(aggregateType, typ string) []string) (*routing.Router, error) {
	c := cfg.Routing()
	c.Choose = choose
	r, err := routing.New(c)
	if err != nil {
		return nil, fmt.Errorf("topics: %w", err)
	}
	return r, nil
}

// Oplog returns a function that reads the times of the oldest and the newest oplog entry, in
// seconds. Positions between them can be resumed. The function fails if the user lacks the
// privilege.
func Oplog(client *mongo.Client) func(ctx context.Context) (oldest, newest time.Time, err error) {
	return func(ctx context.Context) (time.Time, time.Time, error) {
		first, last, err := changestream.OplogWindow(ctx, client)
		if err != nil {
			return time.Time{}, time.Time{}, err
		}
		return time.Unix(int64(first.T), 0).UTC(), time.Unix(int64(last.T), 0).UTC(), nil
	}
}

// RunReslice changes the number of slots of the watcher, see [slots.Reslice]. It connects for the
// call.
func RunReslice(
	ctx context.Context, cfg config.Config, log *slog.Logger, want slots.ResliceOptions,
) (slots.ResliceReport, error) {
	mongo, err := NewClients(cfg.MongoDB, MongoHost{}, cfg.Node, slot.MaxSlots, log, nil)
	if err != nil {
		return slots.ResliceReport{}, err
	}
	defer mongo.Disconnect(ctx)

	brokers, err := NewKafka(cfg, KafkaHost{}, log, nil)
	if err != nil {
		return slots.ResliceReport{}, err
	}
	defer brokers.Close()
	return slots.Reslice(ctx, cfg, log, mongo.State, fence.NewClient(brokers), want)
}
