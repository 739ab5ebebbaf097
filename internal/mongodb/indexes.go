package mongodb

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/schema"
)

const codeIndexNotFound = 27

// ReplayIndex is the name of the index of the envelopes that a replay has queued.
const ReplayIndex = "origin_1_replayOf_1"

// Index is one index that the relay declares.
type Index struct {
	Name    string
	Keys    bson.D
	Partial bson.D // nil indexes every document
	Unique  bool
	TTL     *int32 // seconds after the date in the key at which the server removes a document; nil keeps it
}

func Ascending(fields ...string) bson.D {
	keys := make(bson.D, len(fields))
	for i, f := range fields {
		keys[i] = bson.E{Key: f, Value: int32(1)}
	}
	return keys
}

// Spec is the index as createIndexes takes it. It is also what a migration's checksum is made of.
func (i Index) Spec() bson.D {
	d := bson.D{{Key: "key", Value: i.Keys}, {Key: "name", Value: i.Name}}
	return append(d, i.options()...)
}

func (i Index) options() bson.D {
	var d bson.D
	if i.Partial != nil {
		d = append(d, bson.E{Key: "partialFilterExpression", Value: i.Partial})
	}
	if i.Unique {
		d = append(d, bson.E{Key: "unique", Value: true})
	}
	if i.TTL != nil {
		d = append(d, bson.E{Key: "expireAfterSeconds", Value: *i.TTL})
	}
	return d
}

// Statement is what an administrator types into mongosh to make the index.
func (i Index) Statement(db, coll string) string {
	keys, _ := bson.MarshalExtJSON(i.Keys, false, false) // made of names and numbers
	s := fmt.Sprintf("db.getSiblingDB(%q).getCollection(%q).createIndex(%s", db, coll, keys)
	opts := i.options()
	if len(opts) == 0 {
		return s + ")"
	}
	list := make([]string, len(opts))
	for n, o := range opts {
		value, _ := bson.MarshalExtJSON(bson.D{{Key: "v", Value: o.Value}}, false, false)
		list[n] = o.Key + ": " + string(value[len(`{"v":`):len(value)-1])
	}
	return s + ", {" + strings.Join(list, ", ") + "})"
}

// DropStatement is what an administrator types into mongosh to remove the index.
func (i Index) DropStatement(db, coll string) string {
	return fmt.Sprintf("db.getSiblingDB(%q).getCollection(%q).dropIndex(%q)", db, coll, i.Name)
}

// EnsureIndexSet makes the indexes of want that are missing, and the collection with them, and waits until they are
// built. It needs createIndex only if one is missing; without that privilege the error is a [*PrivilegeError] with the
// statements to run instead. An index of the same keys or name that was made in another way is an [ErrIndexConflict]
// that names the collection, and is left alone.
func EnsureIndexSet(ctx context.Context, coll *mongo.Collection, want []Index) error {
	missing, err := MissingIndexes(ctx, coll, want)
	switch {
	case HasCode(err, CodeUnauthorized):
		missing = want // may not look, but perhaps may create, which does nothing to those that are there
	case err != nil:
		return err
	}
	if len(missing) == 0 {
		return nil
	}
	return CreateIndexes(ctx, coll, missing)
}

// CreateIndexes makes the indexes and the collection, and waits until they are built.
func CreateIndexes(ctx context.Context, coll *mongo.Collection, list []Index) error {
	specs := make(bson.A, len(list))
	statements := make([]string, len(list))
	for i, x := range list {
		specs[i] = x.Spec()
		statements[i] = x.Statement(coll.Database().Name(), coll.Name())
	}
	err := schema.Change(ctx, coll, func(ctx context.Context) error {
		return coll.Database().RunCommand(ctx, bson.D{{Key: "createIndexes", Value: coll.Name()}, {Key: "indexes", Value: specs}}).Err()
	})
	if HasCode(err, codeIndexOptionsConflict, codeIndexKeySpecsConflict) {
		return fmt.Errorf("creating indexes on %s: %w: drop it or rename it, then run: %s (%w)",
			Namespace(coll), ErrIndexConflict, strings.Join(statements, "; "), err)
	}
	if err != nil {
		return DescribeRefusal(err, "creating indexes on "+Namespace(coll), "createIndex", Namespace(coll),
			"have somebody else run: "+strings.Join(statements, "; "))
	}
	return nil
}

// DropIndex removes the index of that name and those keys. One that is not there, or has the name over other keys, is
// left alone; removed reports whether it was there.
func DropIndex(ctx context.Context, coll *mongo.Collection, index Index) (removed bool, err error) {
	have, err := listIndexes(ctx, coll)
	if err != nil {
		return false, err
	}
	if !slices.ContainsFunc(have, func(h existing) bool { return h.Name == index.Name && h.sameKeys(index.Keys) }) {
		return false, nil
	}
	return DropIndexNamed(ctx, coll, index.Name)
}

// DropIndexNamed removes the index of that name, and reports whether it was there.
func DropIndexNamed(ctx context.Context, coll *mongo.Collection, name string) (removed bool, err error) {
	err = schema.Change(ctx, coll, func(ctx context.Context) error { return coll.Indexes().DropOne(ctx, name) })
	if HasCode(err, CodeNamespaceNotFound, codeIndexNotFound) {
		return false, nil // somebody was faster
	}
	if err != nil {
		return false, DescribeRefusal(err, "dropping index "+name+" of "+Namespace(coll), "dropIndex", Namespace(coll),
			"have somebody else run: "+Index{Name: name}.DropStatement(coll.Database().Name(), coll.Name()))
	}
	return true, nil
}

// MissingIndexes returns those of want that the collection does not have.
func MissingIndexes(ctx context.Context, coll *mongo.Collection, want []Index) ([]Index, error) {
	have, err := listIndexes(ctx, coll)
	if err != nil {
		return nil, err
	}
	var missing []Index
	for _, w := range want {
		if !slices.ContainsFunc(have, func(h existing) bool { return h.serves(w) }) {
			missing = append(missing, w)
		}
	}
	return missing, nil
}
