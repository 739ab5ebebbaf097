package state

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/schema"
)

// ErrUnusable means that the configured state database belongs to others: it has a collection of a name that the
// relay needs and did not create, or it has the format of another version.
var ErrUnusable = errors.New("the state database cannot be used")

const (
	// markerName is the collection whose only document shows that the relay created the collections with the prefix.
	markerName = "marker"
	markerID   = "outrelay"

	// format is the version of the state database. A version of the relay works with this format only.
	format = 1

	codeNamespaceExists = 48
)

// marker is the document of the marker.
type marker struct {
	Format int `bson:"format"`
	// Collections are the names, without the prefix, that the relay created or was about to create.
	Collections []string `bson:"collections"`
}

// Check returns [ErrUnusable] if the state database belongs to others, with the collection and the fix. It returns
// nil if the database is empty, or if the relay created its collections. It reads two times and writes nothing.
func (d Database) Check(ctx context.Context) error {
	_, _, err := d.inspect(ctx)
	return err
}

// errNotSetUp means that the state database has no collection of the relay yet.
var errNotSetUp = errors.New("the state database is empty")

// CheckReady is Check for a caller that writes. It also returns an error if the relay has not created the
// collections: one that the caller created would be a stranger's.
func (d Database) CheckReady(ctx context.Context) error {
	found, _, err := d.inspect(ctx)
	if err == nil && found.Format == 0 {
		return fmt.Errorf("%w: %s has no collections with the prefix %s: check state.database and state.prefix, or start a relay "+
			"or run outrelay setup first", errNotSetUp, d.Name(), d.prefix)
	}
	return err
}

// Ensure creates the collections that are missing, with their indexes, after it has checked the database as [Check]
// does. Two processes may call it at the same time. log gets each creation with its statement, and each index that
// the user may not create: without it, the relay works, and queries are slow.
//
// If the user may not create a collection, the error contains the statements to run.
func (d Database) Ensure(ctx context.Context, log *slog.Logger) error {
	found, exist, err := d.inspect(ctx)
	if err != nil {
		return err
	}
	if err := d.writeMarker(ctx, found, exist); err != nil {
		return err
	}

	for _, c := range Table() {
		if !slices.Contains(exist, d.prefix+c.Name) {
			if err := d.createCollection(ctx, c.Name, log); err != nil {
				return err
			}
		}
		if err := d.ensureIndexes(ctx, c, log); err != nil {
			return err
		}
	}
	return nil
}

// Statements returns the mongosh statements that create the collections and their indexes. A relay whose user may
// create neither works after them.
func (d Database) Statements() []string {
	statements := []string{d.createStatement(markerName)}
	for _, c := range Table() {
		statements = append(statements, d.createStatement(c.Name))
		for _, i := range c.Indexes {
			statements = append(statements, i.Statement(d.Name(), d.prefix+c.Name))
		}
	}
	return append(statements, fmt.Sprintf("db.getSiblingDB(%q).getCollection(%q).insertOne({_id: %q, format: %d, collections: [%s]})",
		d.Name(), d.prefix+markerName, markerID, format, `"`+strings.Join(tableNames(), `", "`)+`"`))
}

// inspect returns the marker, and the full names of those of the collections that exist.
func (d Database) inspect(ctx context.Context) (found marker, exist []string, err error) {
	if found, err = d.readMarker(ctx); err != nil {
		return found, nil, err
	}
	if exist, err = d.listExisting(ctx); err != nil {
		return found, nil, err
	}
	if len(d.listStrangers(found, exist)) == 0 {
		return found, exist, nil
	}

	// Another process may have written the marker and created the collections since the first read. It writes the
	// marker first.
	if found, err = d.readMarker(ctx); err != nil {
		return found, nil, err
	}
	if strangers := d.listStrangers(found, exist); len(strangers) > 0 {
		return found, nil, fmt.Errorf("%w: %s.%s exists and was not created by outrelay: set state.prefix or state.database to "+
			"another value", ErrUnusable, d.Name(), strangers[0])
	}
	return found, exist, nil
}

// readMarker returns the marker, or the zero value if there is none.
func (d Database) readMarker(ctx context.Context) (marker, error) {
	coll := mongodb.Majority(d.Collection(markerName))
	var found marker
	err := coll.FindOne(ctx, bson.D{{Key: "_id", Value: markerID}}).Decode(&found)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return marker{}, nil
	}
	if err != nil {
		return marker{}, mongodb.DescribeError(err, "reading the marker of the state database", "find", mongodb.Namespace(coll))
	}

	if found.Format != format {
		return marker{}, fmt.Errorf("%w: %s has format %d, and this version of outrelay works with format %d: run the version "+
			"that created it, or set state.prefix or state.database to another value",
			ErrUnusable, mongodb.Namespace(coll), found.Format, format)
	}
	return found, nil
}

// listExisting returns the full names of those of the collections that exist. A user without the privilege
// listCollections sees the collections that it may read.
func (d Database) listExisting(ctx context.Context) ([]string, error) {
	names, err := d.db.ListCollectionNames(ctx, bson.D{{Key: "name", Value: bson.D{{Key: "$in", Value: d.Names()}}}},
		options.ListCollections().SetAuthorizedCollections(true))
	return names, mongodb.DescribeError(err, "listing the collections of "+d.Name(), "listCollections", d.Name())
}

// listStrangers returns the full names of the existing collections that the marker does not list.
func (d Database) listStrangers(marker marker, exist []string) []string {
	return slices.DeleteFunc(slices.Clone(exist), func(name string) bool {
		short := strings.TrimPrefix(name, d.prefix)
		return short == markerName || slices.Contains(marker.Collections, short)
	})
}

// writeMarker makes the marker list all collections of this version. The marker is written before a collection is
// created, so that a process that finds a collection without a marker has found a stranger's.
func (d Database) writeMarker(ctx context.Context, found marker, exist []string) error {
	names := tableNames()
	if !slices.ContainsFunc(names, func(name string) bool { return !slices.Contains(found.Collections, name) }) {
		return nil
	}

	coll := d.Collection(markerName)
	if found.Format == 0 && slices.Contains(exist, coll.Name()) {
		// A process that starts at the same moment has created the collection, and at most its document is in it.
		other, err := mongodb.Exists(ctx, coll, bson.D{{Key: "_id", Value: bson.D{{Key: "$ne", Value: markerID}}}})
		if err != nil {
			return err
		}
		if other {
			return fmt.Errorf("%w: %s exists and was not created by outrelay: set state.prefix or state.database to another value",
				ErrUnusable, mongodb.Namespace(coll))
		}
	}
	if found.Format == 0 {
		if err := d.createCollection(ctx, markerName, slog.New(slog.DiscardHandler)); err != nil {
			return err
		}
	}

	_, err := coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: markerID}}, bson.D{
		{Key: "$set", Value: bson.D{{Key: "format", Value: format}}},
		{Key: "$addToSet", Value: bson.D{{Key: "collections", Value: bson.D{{Key: "$each", Value: names}}}}},
	}, options.UpdateOne().SetUpsert(true))
	if mongo.IsDuplicateKeyError(err) {
		// Another process has inserted the document at the same moment, so the next attempt updates it.
		return d.writeMarker(ctx, found, exist)
	}
	return mongodb.DescribeError(err, "writing the marker of the state database", "insert and update", mongodb.Namespace(coll))
}

// createCollection creates a collection. Another process may have created it.
func (d Database) createCollection(ctx context.Context, name string, log *slog.Logger) error {
	err := d.db.RunCommand(ctx, bson.D{
		{Key: "create", Value: d.prefix + name},
		// Without it, a default of the database would not matter either, but the choice is not obvious.
		{Key: "collation", Value: bson.D{{Key: "locale", Value: "simple"}}},
	}).Err()
	switch {
	case mongodb.HasCode(err, codeNamespaceExists):
		return nil
	case err != nil:
		return mongodb.DescribeErrorWithFix(err, "creating "+d.Namespace(name), "createCollection", d.Namespace(name),
			"have somebody else run: "+strings.Join(d.Statements(), "; "))
	}
	log.Info("created a collection of the state database", "statement", d.createStatement(name))
	return nil
}

// ensureIndexes creates the missing indexes of a collection. A missing privilege, an index of others or a long
// transaction is logged.
func (d Database) ensureIndexes(ctx context.Context, collection Collection, log *slog.Logger) error {
	coll := d.Collection(collection.Name)
	missing, err := mongodb.MissingIndexes(ctx, coll, collection.Indexes)
	if err == nil && len(missing) == 0 {
		return nil
	}
	if err == nil {
		err = mongodb.CreateIndexes(ctx, coll, missing)
	}

	var rejected *mongodb.PrivilegeError
	if errors.As(err, &rejected) || errors.Is(err, mongodb.ErrIndexConflict) || errors.Is(err, schema.ErrBusy) {
		log.Warn("an index of the state database is missing; queries are slow", "collection", mongodb.Namespace(coll), "error", err)
		return nil
	}
	if err != nil {
		return err
	}
	for _, i := range missing {
		log.Info("created an index of the state database", "statement", i.Statement(d.Name(), coll.Name()))
	}
	return nil
}

// createStatement returns the mongosh statement that creates a collection.
func (d Database) createStatement(name string) string {
	return fmt.Sprintf("db.getSiblingDB(%q).createCollection(%q, {collation: {locale: \"simple\"}})", d.Name(), d.prefix+name)
}

// tableNames returns the names of the collections without the prefix.
func tableNames() []string {
	var names []string
	for _, c := range Table() {
		names = append(names, c.Name)
	}
	return names
}

// Missing returns the mongosh statements that create the collections and indexes that are missing. It writes nothing.
func (d Database) Missing(ctx context.Context) ([]string, error) {
	exist, err := d.listExisting(ctx)
	if err != nil {
		return nil, err
	}

	var statements []string
	for _, c := range Table() {
		name := d.prefix + c.Name
		missing := c.Indexes
		if slices.Contains(exist, name) {
			if missing, err = mongodb.MissingIndexes(ctx, d.Collection(c.Name), c.Indexes); err != nil {
				return nil, err
			}
		} else {
			statements = append(statements, d.createStatement(c.Name))
		}
		for _, i := range missing {
			statements = append(statements, i.Statement(d.Name(), name))
		}
	}
	return statements, nil
}
