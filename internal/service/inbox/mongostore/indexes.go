package mongostore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/schema"
)

// Error codes of MongoDB.
const (
	codeUnauthorized         = 13
	codeNamespaceExists      = 48
	codeIndexOptionsConflict = 85
	codeIndexKeySpecs        = 86
)

// EnsureIndexes creates the missing collections and indexes. It does not change existing ones. Call
// it before the first Admit: if transactions have to create a collection, they conflict. If an index
// with the same name or key has other options, the error contains its field.
func (s *Store) EnsureIndexes(ctx context.Context) error {
	// Collections and indexes are created outside of the transaction of the caller.
	ctx = mongo.NewSessionContext(ctx, nil)
	db := s.markers.Database()

	// Creating an existing collection is an error, and needs a privilege that the user may lack.
	existing, err := db.ListCollectionNames(ctx,
		bson.D{{Key: "name", Value: s.offsets.Name()}}, options.ListCollections().SetAuthorizedCollections(true))
	if err != nil {
		return wrapPrivilege(err, "listing the collections of database "+db.Name())
	}

	if len(existing) == 0 {
		if err := db.CreateCollection(ctx, s.offsets.Name()); err != nil && !mongodb.HasCode(err, codeNamespaceExists) {
			return wrapPrivilege(err, "creating the collection "+db.Name()+"."+s.offsets.Name())
		}
	}

	markerTTL := options.Index().SetName("k_1")
	// Without a TTL, the inbox removes markers in its own sweeps.
	if !s.noTTL {
		markerTTL.SetExpireAfterSeconds(0)
	}
	leaseTTL := options.Index().SetName("until_1").SetExpireAfterSeconds(0)
	tenureTTL := options.Index().SetName("at_1").SetExpireAfterSeconds(int32(tenureRetention / time.Second))

	// An index that cannot be created does not keep the others from being created.
	return errors.Join(
		createIndex(ctx, s.markers, "k", markerTTL),
		createIndex(ctx, s.claims, "until", leaseTTL),
		createIndex(ctx, s.tenures, "at", tenureTTL),
	)
}

// createIndex creates an index on one field, unless it exists.
func createIndex(ctx context.Context, coll *mongo.Collection, field string, opts *options.IndexOptionsBuilder) error {
	on := coll.Database().Name() + "." + coll.Name()
	err := schema.Change(ctx, coll, func(ctx context.Context) error {
		_, err := coll.Indexes().CreateOne(ctx, mongo.IndexModel{Keys: bson.D{{Key: field, Value: 1}}, Options: opts})
		return err
	})
	if mongodb.HasCode(err, codeIndexOptionsConflict, codeIndexKeySpecs) {
		return fmt.Errorf("the index on %s of %s exists with other options; "+
			"drop it and start again, or configure the inbox as it was: %w", field, on, err)
	}

	return wrapPrivilege(err, "creating the index {"+field+": 1} on "+on)
}

// wrapPrivilege adds the action to the error, and the fix if the user has no permission.
func wrapPrivilege(err error, action string) error {
	if err == nil {
		return nil
	}
	if mongodb.HasCode(err, codeUnauthorized) {
		return fmt.Errorf("%s: %w; grant the user this permission, or let an administrator do it", action, err)
	}
	return fmt.Errorf("%s: %w", action, err)
}
