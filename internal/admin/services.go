package admin

import (
	"context"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/pkg/saga"
)

// offsetsSuffix ends the name of the collection that each inbox has beside its markers.
const offsetsSuffix = "_offsets"

// service is what a database holds beside outboxes.
type service struct {
	sagas   bool
	inboxes []string // names of the collections of markers
}

// services looks at the names of a database's collections: one command, answered from the catalogue.
func (k Desk) services(ctx context.Context, database string) (service, error) {
	var s service
	filter := bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: "name", Value: saga.DefaultTypes}},
		bson.D{{Key: "name", Value: bson.Regex{Pattern: offsetsSuffix + "$"}}},
	}}}
	names, err := k.State.Client().Database(database).ListCollectionNames(ctx, filter, options.ListCollections().SetAuthorizedCollections(true))
	if err != nil {
		return s, wrapped("listing collections of "+database, err)
	}
	slices.Sort(names)
	for _, n := range names {
		if n == saga.DefaultTypes {
			s.sagas = true
		} else if base := strings.TrimSuffix(n, offsetsSuffix); base != "" {
			s.inboxes = append(s.inboxes, base)
		}
	}
	return s, nil
}

// serviceDatabases are the databases of the watcher's outboxes, or the one of them that is named: nothing else is looked
// into.
func (k Desk) serviceDatabases(ctx context.Context, only string) ([]string, error) {
	names, err := k.sorted(ctx, "")
	if err != nil {
		return nil, err
	}
	all := databases(names)
	switch {
	case only == "":
		return all[:min(len(all), manyDatabases)], nil
	case !slices.Contains(all, only):
		return nil, invalid("watcher %s has no outbox in database %q; its databases are %s", k.Watcher, only, few(all))
	}
	return []string{only}, nil
}

func (k Desk) database(name string) *mongo.Database { return k.State.Client().Database(name) }
