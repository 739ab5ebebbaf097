// Package inventory finds the collections that services keep in a database beside their outboxes, by the names of the collections.
//
// Cost: one command, which reads only the catalog. It blocks until MongoDB responds.
package inventory

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/base/glob"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/sagas"
	"github.com/outrelay/outrelay/internal/service/setaside"
)

// maxDatabases is how many databases of a watcher are searched regularly for collections of services. Actions of operators search all.
const maxDatabases = 100

// ConfiguredDatabases returns the names of the databases of services that the configuration contains: consumers.databases, and the databases of
// watched names until there are 100. A database stays one of them while its outbox does not exist, such as after a drop.
func ConfiguredDatabases(consumers, watch []string) []string {
	databases := slices.Clone(consumers)
	for _, ns := range watch {
		name, _, _ := strings.Cut(ns, ".")
		if len(databases) < maxDatabases && !glob.HasWildcard(name) && !slices.Contains(databases, name) {
			databases = append(databases, name)
		}
	}
	return databases
}

// ChooseDatabases returns the sorted names of the databases to search regularly for collections of services: the configured ones, and those of
// outboxes until there are 100.
func ChooseDatabases(configured, ofOutboxes []string) []string {
	chosen := slices.Compact(slices.Sorted(slices.Values(configured)))
	for _, name := range ofOutboxes {
		if len(chosen) >= maxDatabases {
			break
		}
		if !slices.Contains(configured, name) {
			chosen = append(chosen, name)
		}
	}
	slices.Sort(chosen)
	return chosen
}

// Inventory has the collections of services in a database.
type Inventory struct {
	Sagas   bool     // sagas are registered
	Inboxes []string // names of the collections with marks
	Letters []string // names of the collections with dead letters of handlers
	Waiting bool     // consumers set messages aside
}

// Find returns the collections of services in db. letters are the possible names of collections with dead letters of handlers. A user
// without the right to list all collections gets the readable ones.
func Find(ctx context.Context, db *mongo.Database, letters []string) (Inventory, error) {
	var found Inventory
	filter := bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: "name", Value: bson.D{{Key: "$in", Value: []string{sagas.TypesCollection, setaside.DefaultCollection}}}}},
		bson.D{{Key: "name", Value: bson.D{{Key: "$in", Value: slices.Concat([]string{""}, letters)}}}},
		// Only inboxes have a collection of offsets, and their own names are free.
		bson.D{{Key: "name", Value: bson.Regex{Pattern: inbox.OffsetsSuffix + "$"}}},
	}}}
	names, err := db.ListCollectionNames(ctx, filter, options.ListCollections().SetAuthorizedCollections(true))
	if err != nil {
		return found, fmt.Errorf("listing collections of %s: %w", db.Name(), err)
	}

	slices.Sort(names)
	for _, name := range names {
		switch base, isOffsets := strings.CutSuffix(name, inbox.OffsetsSuffix); {
		case name == sagas.TypesCollection:
			found.Sagas = true
		case name == setaside.DefaultCollection:
			found.Waiting = true
		case slices.Contains(letters, name):
			found.Letters = append(found.Letters, name)
		case isOffsets && base != "":
			found.Inboxes = append(found.Inboxes, base)
		}
	}
	return found, nil
}
