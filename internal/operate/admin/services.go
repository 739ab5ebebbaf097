package admin

import (
	"context"
	"slices"

	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/service/inventory"
)

// findServices finds the collections of services in a database. It costs one command, which reads only the catalog.
func (o Operator) findServices(ctx context.Context, database string) (inventory.Inventory, error) {
	return inventory.Find(ctx, o.database(database), o.HandlerLetters)
}

// forEachService calls do with the collections of services in each of the databases. It returns the first error.
func (o Operator) forEachService(ctx context.Context, databases []string, do func(db string, found inventory.Inventory) error) error {
	for _, db := range databases {
		found, err := o.findServices(ctx, db)
		if err == nil {
			err = do(db, found)
		}
		if err != nil {
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
