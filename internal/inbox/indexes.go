package inbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/schema"
)

// Error codes of MongoDB.
const (
	codeUnauthorized         = 13
	codeNamespaceExists      = 48
	codeIndexOptionsConflict = 85
	codeIndexKeySpecs        = 86
)

// Indexes returns the mongosh statements with which an administrator can create the collections and
// indexes of EnsureIndexes.
func (x *Inbox) Indexes() []string {
	ttl := ", expireAfterSeconds: 0"
	if x.noTTL {
		ttl = ""
	}

	db := fmt.Sprintf("db.getSiblingDB(%q)", x.markers.Database().Name())
	indexStatement := func(coll *mongo.Collection, field, opts string) string {
		return fmt.Sprintf("%s.getCollection(%q).createIndex({%s: 1}, {name: %q%s})", db, coll.Name(), field, field+"_1", opts)
	}
	return []string{
		fmt.Sprintf("%s.createCollection(%q)", db, x.offsets.Name()),
		indexStatement(x.markers, "k", ttl),
		indexStatement(x.claims, "until", ", expireAfterSeconds: 0"),
		indexStatement(x.tenures, "at", fmt.Sprintf(", expireAfterSeconds: %d", int(tenureRetention.Seconds()))),
	}
}

// EnsureIndexes creates the missing collections and indexes. It does not change existing ones. Call
// it before the first Admit: if transactions have to create a collection, they conflict. The error
// is a *PrivilegeError if the user has no permission. If an index with the same name or key has
// other options, the error contains its field.
func (x *Inbox) EnsureIndexes(ctx context.Context) error {
	// Collections and indexes are created outside of the transaction of the caller.
	ctx = mongo.NewSessionContext(ctx, nil)
	db := x.markers.Database()

	existing, err := db.ListCollectionNames(ctx,
		bson.D{{Key: "name", Value: x.offsets.Name()}}, options.ListCollections().SetAuthorizedCollections(true))
	if err != nil {
		return wrapPrivilege(err, "list the collections", "database "+db.Name())
	}

	if len(existing) == 0 {
		if err := db.CreateCollection(ctx, x.offsets.Name()); err != nil && !hasCode(err, codeNamespaceExists) {
			return wrapPrivilege(err, "create the collection", db.Name()+"."+x.offsets.Name())
		}
	}

	markerTTL := options.Index().SetName("k_1")
	if !x.noTTL {
		markerTTL.SetExpireAfterSeconds(0)
	}
	leaseTTL := options.Index().SetName("until_1").SetExpireAfterSeconds(0)
	tenureTTL := options.Index().SetName("at_1").SetExpireAfterSeconds(int32(tenureRetention / time.Second))

	return errors.Join(
		createIndex(ctx, x.markers, "k", markerTTL),
		createIndex(ctx, x.claims, "until", leaseTTL),
		createIndex(ctx, x.tenures, "at", tenureTTL),
	)
}

// createIndex creates an index on one field, unless it exists.
func createIndex(ctx context.Context, coll *mongo.Collection, field string, opts *options.IndexOptionsBuilder) error {
	on := coll.Database().Name() + "." + coll.Name()
	err := schema.Change(ctx, coll, func(ctx context.Context) error {
		_, err := coll.Indexes().CreateOne(ctx, mongo.IndexModel{Keys: bson.D{{Key: field, Value: 1}}, Options: opts})
		return err
	})
	if hasCode(err, codeIndexOptionsConflict) || hasCode(err, codeIndexKeySpecs) {
		return fmt.Errorf("the index on %s of %s exists with other options; "+
			"drop it and start again, or configure the inbox as it was: %w", field, on, err)
	}

	return wrapPrivilege(err, "create an index", on)
}

// wrapPrivilege wraps a missing permission in a *PrivilegeError.
func wrapPrivilege(err error, action, on string) error {
	if err == nil {
		return nil
	}
	if hasCode(err, codeUnauthorized) {
		err = &PrivilegeError{Action: action, On: on, Err: err}
	}

	return fmt.Errorf("preparing the inbox: %w", err)
}

// hasCode reports whether err is an error of the server with this code.
func hasCode(err error, code int) bool {
	var se mongo.ServerError
	return errors.As(err, &se) && se.HasErrorCode(code)
}
