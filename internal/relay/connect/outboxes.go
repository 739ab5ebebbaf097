package connect

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/internal/base/glob"
	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/problems"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// Outboxes returns a function that lists the existing collections that the configuration watches,
// sorted by name. It queries each database that may contain one.
func Outboxes(cfg config.Config, client *mongo.Client) func(ctx context.Context) ([]outboxes.Outbox, error) {
	return func(ctx context.Context) ([]outboxes.Outbox, error) {
		scope, err := changes.ParseScope(cfg.Watch, cfg.State.Pattern())
		if err != nil {
			return nil, fmt.Errorf("watch: %w", err)
		}
		if db, _ := scope.Target(); db != "" {
			return outboxes.ListOutboxes(ctx, client, scope.Matches, db)
		}
		return outboxes.ListOutboxes(ctx, client, scope.Matches)
	}
}

// Inspection is the result of [InspectWatched].
type Inspection struct {
	Listing  outboxes.Listing
	Findings []outboxes.Finding
}

// Unreadable returns [outboxes.ErrUnwatchable] with the cause and the fix of the first name that cannot be read.
func (i Inspection) Unreadable() error {
	if at := slices.IndexFunc(i.Findings, func(finding outboxes.Finding) bool { return finding.Fatal }); at >= 0 {
		return i.Findings[at].Err()
	}
	return nil
}

// Depth is how much [InspectWatched] looks at.
type Depth struct {
	Patterns  bool // also the names that match a pattern
	Rights    bool // tries a read of each name and a change stream
	Databases int  // at most this number of databases is listed; 0 is no limit
}

// InspectWatched looks at what the watched names are, and whether the user may read them. It lists each database that
// watch names, or that matches a pattern for databases.
func InspectWatched(ctx context.Context, cfg config.Config, client *mongo.Client, depth Depth) (i Inspection, err error) {
	scope, err := changes.ParseScope(cfg.Watch, cfg.State.Pattern())
	if err != nil {
		return i, fmt.Errorf("watch: %w", err)
	}
	watch := cfg.Watch
	exact := slices.DeleteFunc(slices.Clone(cfg.Watch), glob.HasWildcard)
	if !depth.Patterns {
		watch = exact
	}

	databases, partial, err := inspectedDatabases(ctx, client, watch, depth.Databases)
	if err == nil && len(databases) > 0 {
		i.Listing, err = outboxes.List(ctx, client, scope.Matches, databases...)
	}
	// A user without any right on a database may not even list it. The relay itself does not need the list.
	unlisted := mongodb.HasCode(err, mongodb.CodeUnauthorized)
	if err != nil && (!unlisted || !depth.Rights) {
		return i, err
	}
	i.Listing.Partial = partial || unlisted
	i.Findings = i.Listing.Inspect(watch)
	if !depth.Rights {
		return i, nil
	}

	// A view can be read, and its change stream fails for another reason.
	exact = slices.DeleteFunc(exact, func(ns string) bool {
		return slices.ContainsFunc(i.Findings, func(finding outboxes.Finding) bool { return finding.Fatal && finding.NS == ns })
	})
	rejected, err := outboxes.InspectRights(ctx, client, exact)
	if err != nil {
		return i, err
	}
	if i.Unreadable() == nil {
		rejected = append(rejected, inspectStream(ctx, client, scope)...)
	}
	// A collection on which the user has no rights is in no list, so it may well exist.
	i.Findings = slices.DeleteFunc(i.Findings, func(finding outboxes.Finding) bool {
		return finding.Kind == outboxes.IsMissing && slices.ContainsFunc(rejected, func(other outboxes.Finding) bool { return other.NS == finding.NS })
	})
	i.Findings = append(i.Findings, rejected...)
	return i, nil
}

// inspectStream opens the change stream of the scope and closes it. It returns a finding if the user may not do that. Other errors are
// none: the stream of the relay reports them.
func inspectStream(ctx context.Context, client *mongo.Client, scope *changes.Scope) []outboxes.Finding {
	stream, err := scope.Watch(ctx, client, readpref.Primary(), mongo.Pipeline{}, options.ChangeStream())
	if err == nil {
		// The server removes a cursor that is not closed.
		_ = stream.Close(ctx)
	}
	if !mongodb.HasCode(err, mongodb.CodeUnauthorized) {
		return nil
	}
	return []outboxes.Finding{outboxes.RejectedStream(scope.Target())}
}

// inspectedDatabases returns the databases of the names and patterns, at most limit. If there are more, partial is true.
func inspectedDatabases(
	ctx context.Context, client *mongo.Client, watch []string, limit int,
) (databases []string, partial bool, err error) {
	var all []string
	for _, ns := range watch {
		db, _, _ := strings.Cut(ns, ".")
		if !glob.HasWildcard(db) {
			databases = append(databases, db)
			continue
		}

		if all == nil {
			if all, err = outboxes.ListDatabases(ctx, client); err != nil {
				return nil, false, err
			}
		}
		for _, name := range all {
			if glob.Match(db, name) {
				databases = append(databases, name)
			}
		}
	}

	slices.Sort(databases)
	databases = slices.Compact(databases)
	if limit > 0 && len(databases) > limit {
		return databases[:limit], true, nil
	}
	return databases, false, nil
}

// mostInspected bounds the databases that an operator's overview lists.
const mostInspected = 100

// RightsCheck is whether an inspection tries to read the watched names as the user of the configuration. If a relay runs, its
// owner reports that.
type RightsCheck bool

// The checks.
const (
	SkipRights RightsCheck = false
	TryRights  RightsCheck = true
)

// Inspect returns a function that inspects the watched names for an operator.
func Inspect(cfg config.Config, client *mongo.Client) func(ctx context.Context, rights RightsCheck) ([]outboxes.Finding, error) {
	return func(ctx context.Context, rights RightsCheck) ([]outboxes.Finding, error) {
		i, err := InspectWatched(ctx, cfg, client, Depth{Patterns: true, Rights: bool(rights), Databases: mostInspected})
		return i.Findings, err
	}
}

// WantedIndexes returns the indexes that a relay with this configuration wants on every watched collection. It wants
// that of scheduled envelopes only where it has seen one.
func WantedIndexes(cfg config.Config) outboxes.Indexes {
	purges := cfg.Retention > 0 && cfg.HasTask(config.TaskRelay) && cfg.HasTask(config.TaskCleaner)
	return outboxes.Indexes{Purge: purges, SentTTL: cfg.Purge.TTL}
}

// Router returns the configured router. choose, if not nil, comes before the rules: see [routing.Config].
func Router(cfg config.Config, choose func(aggregateType, typ string) []string) (*routing.Router, error) {
	routes := cfg.Routing()
	routes.Choose = choose
	router, err := routing.New(routes)
	if err != nil {
		return nil, fmt.Errorf("topics: %w", err)
	}
	return router, nil
}

// Oplog returns a function that reads the ends of the oplog. Positions between them can be resumed. The function fails if the user lacks
// the privilege.
func Oplog(client *mongo.Client) func(ctx context.Context) (problems.Oplog, error) {
	return func(ctx context.Context) (problems.Oplog, error) {
		oplog, err := changes.ReadOplog(ctx, client)
		if err != nil {
			return problems.Oplog{}, err
		}
		return problems.Oplog{Oldest: time.Unix(int64(oplog.Oldest.T), 0).UTC(), Newest: time.Unix(int64(oplog.Newest.T), 0).UTC(), Whole: oplog.Whole}, nil
	}
}
