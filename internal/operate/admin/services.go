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

// forEachService calls do with the collections of services in each of the databases, of at most 100. It returns the first
// error.
func (o Operator) forEachService(ctx context.Context, databases []string, do func(db string, found inventory.Inventory) error) error {
	// Some callers read regularly, so their cost must have a bound.
	for _, db := range databases[:min(len(databases), inventory.MaxDatabases)] {
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

// serviceDatabases returns the databases of the watcher's outboxes, or only the named one. An
// operator cannot read other databases.
func (o Operator) serviceDatabases(ctx context.Context, only string) ([]string, error) {
	names, err := o.collectionNames(ctx)
	if err != nil {
		return nil, err
	}

	all := outboxes.DatabasesOf(names)
	if only == "" {
		return all, nil
	}
	if !slices.Contains(all, only) {
		return nil, invalidRequest("watcher %s has no outbox in database %q; its databases are %s",
			o.Watcher, only, joinSome(all))
	}
	return []string{only}, nil
}
