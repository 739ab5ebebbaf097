package admin

import (
	"context"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/sagas"
	"github.com/outrelay/outrelay/internal/service/setaside"
)

// serviceCollections describes the collections of a database that services use, other than
// outboxes.
type serviceCollections struct {
	sagas   bool
	inboxes []string // names of the collections with marks
	letters []string // names of the collections with dead letters of handlers
	waiting bool     // consumers set messages aside
}

// findServices finds inboxes, sagas, dead letters of handlers and messages that are set aside by the names of a database's collections. It costs one
// command, which reads only the catalog.
func (o Operator) findServices(ctx context.Context, database string) (serviceCollections, error) {
	var found serviceCollections
	db := o.database(database)
	filter := bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: "name", Value: bson.D{{Key: "$in", Value: bson.A{sagas.TypesCollection, setaside.DefaultCollection}}}}},
		bson.D{{Key: "name", Value: bson.D{{Key: "$in", Value: slices.Concat([]string{""}, o.HandlerLetters)}}}},
		// Only inboxes have a collection of offsets, and their own names are free.
		bson.D{{Key: "name", Value: bson.Regex{Pattern: inbox.OffsetsSuffix + "$"}}},
	}}}
	// A user without the right to list all collections gets the readable ones.
	authorized := options.ListCollections().SetAuthorizedCollections(true)
	names, err := db.ListCollectionNames(ctx, filter, authorized)
	if err != nil {
		return found, wrapError("listing collections of "+database, err)
	}

	slices.Sort(names)
	for _, n := range names {
		switch base, isOffsets := strings.CutSuffix(n, inbox.OffsetsSuffix); {
		case n == sagas.TypesCollection:
			found.sagas = true
		case n == setaside.DefaultCollection:
			found.waiting = true
		case slices.Contains(o.HandlerLetters, n):
			found.letters = append(found.letters, n)
		case isOffsets && base != "":
			found.inboxes = append(found.inboxes, base)
		}
	}
	return found, nil
}

// forEachService calls do with the collections of services in each of the databases, of at most 100. It returns the first
// error.
func (o Operator) forEachService(ctx context.Context, databases []string, do func(db string, found serviceCollections) error) error {
	// Some callers read regularly, so their cost must have a bound.
	for _, db := range databases[:min(len(databases), maxServiceDatabases)] {
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

	all := databaseNames(names)
	if only == "" {
		return all, nil
	}
	if !slices.Contains(all, only) {
		return nil, invalidRequest("watcher %s has no outbox in database %q; its databases are %s",
			o.Watcher, only, joinSome(all))
	}
	return []string{only}, nil
}
