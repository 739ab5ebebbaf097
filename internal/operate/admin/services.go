package admin

import (
	"context"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/service/inventory"
)

// findServices finds the collections of services in a database. It costs one command, which reads only the catalog.
func (o Operator) findServices(ctx context.Context, database string) (inventory.Inventory, error) {
	return inventory.Find(ctx, o.database(database), o.HandlerLetters)
}

// searchedAtOnce is the number of databases whose catalogs are read at once: each tenant may have a database.
const searchedAtOnce = 16

// forEachService calls do with the collections of services in each of the databases, one after the other. It returns the first error.
func (o Operator) forEachService(ctx context.Context, databases []string, do func(db string, found inventory.Inventory) error) error {
	found := make([]inventory.Inventory, len(databases))
	group, searchCtx := errgroup.WithContext(ctx)
	group.SetLimit(searchedAtOnce)
	for i, db := range databases {
		group.Go(func() (err error) {
			found[i], err = o.findServices(searchCtx, db)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}

	for i, db := range databases {
		if err := do(db, found[i]); err != nil {
			return err
		}
	}
	return nil
}

// ServiceDatabases returns the sorted names of the databases that are searched for what services store, or only the named one: the
// databases of consumers.databases, and all of the watcher's outboxes, because an action must not leave letters out without a word. An
// operator cannot read other databases.
func (o Operator) ServiceDatabases(ctx context.Context, only string) ([]string, error) {
	names, err := o.collectionNames(ctx)
	if err != nil {
		return nil, err
	}
	consumers, ofOutboxes := consumerDatabases(o), outboxes.DatabasesOf(names)
	if only == "" {
		return slices.Compact(slices.Sorted(slices.Values(slices.Concat(consumers, ofOutboxes)))), nil
	}
	if !slices.Contains(consumers, only) && !slices.Contains(ofOutboxes, only) {
		return nil, invalidRequest("watcher %s has no outbox in database %q, and consumers.databases does not name it; its databases are %s",
			o.Watcher, only, JoinSome(slices.Concat(consumers, ofOutboxes)))
	}
	return []string{only}, nil
}

// consumerDatabases returns the configured databases of services that only consume. Those of another watcher are unknown.
func consumerDatabases(op Operator) []string {
	if !op.isConfigured() {
		return nil
	}
	return op.ConsumerDatabases
}
