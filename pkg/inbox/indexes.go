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

const (
	codeUnauthorized         = 13
	codeNamespaceExists      = 48
	codeIndexOptionsConflict = 85
	codeIndexKeySpecs        = 86
)

// Indexes are the statements by which an administrator makes in mongosh what EnsureIndexes makes.
func (x *Inbox) Indexes() []string {
	ttl := ", expireAfterSeconds: 0"
	if x.noTTL {
		ttl = ""
	}
	db := fmt.Sprintf("db.getSiblingDB(%q)", x.markers.Database().Name())
	return []string{
		fmt.Sprintf("%s.createCollection(%q)", db, x.offsets.Name()),
		fmt.Sprintf("%s.getCollection(%q).createIndex({k: 1}, {name: %q%s})", db, x.markers.Name(), "k_1", ttl),
		fmt.Sprintf("%s.getCollection(%q).createIndex({until: 1}, {name: %q, expireAfterSeconds: 0})", db, x.claims.Name(), "until_1"),
		fmt.Sprintf("%s.getCollection(%q).createIndex({at: 1}, {name: %q, expireAfterSeconds: %d})", db, x.tenures.Name(), "at_1", int(tenureKept.Seconds())),
	}
}

// EnsureIndexes creates the collections and their indexes where they are missing, and changes nothing that is there. It
// belongs before the first Admit: a collection that a transaction has to create makes the first ones conflict. A refusal by
// the server is a *PrivilegeError, an index of the same name or key with other options an error that names it.
func (x *Inbox) EnsureIndexes(ctx context.Context) error {
	ctx = mongo.NewSessionContext(ctx, nil)
	db := x.markers.Database()
	there, err := db.ListCollectionNames(ctx, bson.D{{Key: "name", Value: x.offsets.Name()}}, options.ListCollections().SetAuthorizedCollections(true))
	if err != nil {
		return privilege(err, "list the collections", "database "+db.Name())
	}
	if len(there) == 0 {
		if err := db.CreateCollection(ctx, x.offsets.Name()); err != nil && !hasCode(err, codeNamespaceExists) {
			return privilege(err, "create the collection", db.Name()+"."+x.offsets.Name())
		}
	}
	kept := options.Index().SetName("k_1")
	if !x.noTTL {
		kept.SetExpireAfterSeconds(0)
	}
	return errors.Join(
		index(ctx, x.markers, "k", kept),
		index(ctx, x.claims, "until", options.Index().SetName("until_1").SetExpireAfterSeconds(0)),
		index(ctx, x.tenures, "at", options.Index().SetName("at_1").SetExpireAfterSeconds(int32(tenureKept/time.Second))),
	)
}

func index(ctx context.Context, coll *mongo.Collection, field string, opts *options.IndexOptionsBuilder) error {
	on := coll.Database().Name() + "." + coll.Name()
	err := schema.Change(ctx, coll, func(ctx context.Context) error {
		_, err := coll.Indexes().CreateOne(ctx, mongo.IndexModel{Keys: bson.D{{Key: field, Value: 1}}, Options: opts})
		return err
	})
	if hasCode(err, codeIndexOptionsConflict) || hasCode(err, codeIndexKeySpecs) {
		return fmt.Errorf("the index on %s of %s exists with other options; drop it and start again, or configure the inbox as it was: %w", field, on, err)
	}
	return privilege(err, "create an index", on)
}

// privilege makes a refusal one that says what to grant.
func privilege(err error, action, on string) error {
	if err == nil {
		return nil
	}
	if hasCode(err, codeUnauthorized) {
		err = &PrivilegeError{Action: action, On: on, Err: err}
	}
	return fmt.Errorf("preparing the inbox: %w", err)
}

func hasCode(err error, code int) bool {
	var se mongo.ServerError
	return errors.As(err, &se) && se.HasErrorCode(code)
}
