package mongodb

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb/schema"
)

// codeIndexNotFound is the server's code for an index that does not exist.
const codeIndexNotFound = 27

// Index is one index that the relay declares.
type Index struct {
	Name    string
	Keys    bson.D
	Partial bson.D // nil indexes every document
	// TTL is the number of seconds after the date in the key at which the server removes a document. nil
	// keeps the document.
	TTL *int32
}

// Ascending returns the keys of an ascending index over fields.
func Ascending(fields ...string) bson.D {
	keys := make(bson.D, len(fields))
	for i, f := range fields {
		keys[i] = bson.E{Key: f, Value: int32(1)}
	}
	return keys
}

// Spec returns the index in the form that createIndexes takes. The checksum of a migration uses the same form.
func (i Index) Spec() bson.D {
	document := bson.D{{Key: "key", Value: i.Keys}, {Key: "name", Value: i.Name}}
	return append(document, i.listOptions()...)
}

// listOptions returns the options of the index that are not the default.
func (i Index) listOptions() bson.D {
	var document bson.D
	if i.Partial != nil {
		document = append(document, bson.E{Key: "partialFilterExpression", Value: i.Partial})
	}
	if i.TTL != nil {
		document = append(document, bson.E{Key: "expireAfterSeconds", Value: *i.TTL})
	}
	return document
}

// Statement returns the mongosh statement that creates the index.
func (i Index) Statement(db, coll string) string {
	// The error can be ignored: the keys consist of names and numbers.
	keys, _ := bson.MarshalExtJSON(i.Keys, false, false)
	text := fmt.Sprintf("db.getSiblingDB(%q).getCollection(%q).createIndex(%s", db, coll, keys)

	opts := i.listOptions()
	if len(opts) == 0 {
		return text + ")"
	}

	list := make([]string, len(opts))
	for n, o := range opts {
		// MarshalExtJSON takes documents only, so the value is wrapped in one, and cut out of the text.
		value, _ := bson.MarshalExtJSON(bson.D{{Key: "v", Value: o.Value}}, false, false)
		list[n] = o.Key + ": " + string(value[len(`{"v":`):len(value)-1])
	}
	return text + ", {" + strings.Join(list, ", ") + "})"
}

// DropStatement returns the mongosh statement that removes the index.
func (i Index) DropStatement(db, coll string) string {
	return fmt.Sprintf("db.getSiblingDB(%q).getCollection(%q).dropIndex(%q)", db, coll, i.Name)
}

// EnsureIndexSet creates the missing indexes of want, and the collection if it does not exist. It blocks until
// they are built. It needs createIndex only if an index is missing. Without this privilege, the error is a
// [*PrivilegeError] with the statements to run instead. If an index has the same keys or name but other
// options, the error is an [ErrIndexConflict] that names the collection, and the index stays unchanged.
func EnsureIndexSet(ctx context.Context, coll *mongo.Collection, want []Index) error {
	missing, err := MissingIndexes(ctx, coll, want)
	switch {
	case HasCode(err, CodeUnauthorized):
		// A user who may not list indexes may still create them. The server skips indexes that exist.
		missing = want
	case err != nil:
		return err
	}

	if len(missing) == 0 {
		return nil
	}
	return CreateIndexes(ctx, coll, missing)
}

// CreateIndexes creates the indexes, and the collection if it does not exist. It blocks until they are built.
func CreateIndexes(ctx context.Context, coll *mongo.Collection, list []Index) error {
	return createIndexes(ctx, coll, list, nil)
}

// CreateIndexesIn is CreateIndexes for the collection with the UUID. If the collection is gone or has another name,
// CreateIndexesIn creates nothing and returns [ErrCollectionGone]: a dropped database would exist again.
func CreateIndexesIn(ctx context.Context, coll *mongo.Collection, uuid [16]byte, list []Index) error {
	err := createIndexes(ctx, coll, list, bson.D{OnlyIn(uuid)})
	if HasCode(err, CodeCollectionUUIDMismatch) {
		return fmt.Errorf("creating indexes on %s: %w", Namespace(coll), ErrCollectionGone)
	}
	return err
}

// ErrCollectionGone means that the collection was dropped or renamed.
var ErrCollectionGone = errors.New("the collection was dropped or renamed")

func createIndexes(ctx context.Context, coll *mongo.Collection, list []Index, guard bson.D) error {
	specs := make(bson.A, len(list))
	statements := make([]string, len(list))
	for i, x := range list {
		specs[i] = x.Spec()
		statements[i] = x.Statement(coll.Database().Name(), coll.Name())
	}

	err := schema.Change(ctx, coll, func(ctx context.Context) error {
		create := bson.D{{Key: "createIndexes", Value: coll.Name()}, {Key: "indexes", Value: specs}}
		create = append(create, guard...)
		return coll.Database().RunCommand(ctx, create).Err()
	})
	// Only a person can decide about an index that somebody else has created.
	if HasCode(err, codeIndexOptionsConflict, codeIndexKeySpecsConflict) {
		return fmt.Errorf("creating indexes on %s: %w: drop it or rename it, then run: %s (%w)",
			Namespace(coll), ErrIndexConflict, strings.Join(statements, "; "), err)
	}

	return DescribeErrorWithFix(err, "creating indexes on "+Namespace(coll), "createIndex", Namespace(coll),
		"have somebody else run: "+strings.Join(statements, "; "))
}

// dropIndexIn removes the index from the collection with the UUID, and reports whether it removed one.
func dropIndexIn(ctx context.Context, coll *mongo.Collection, uuid [16]byte, index Index) (removed bool, err error) {
	attempts := 0
	err = schema.Change(ctx, coll, func(ctx context.Context) error {
		attempts++
		drop := bson.D{{Key: "dropIndexes", Value: coll.Name()}, {Key: "index", Value: index.Name}, OnlyIn(uuid)}
		return coll.Database().RunCommand(ctx, drop).Err()
	})
	if HasCode(err, codeNamespaceNotFound, codeIndexNotFound) {
		// An attempt that was ended because it took long may have removed the index, otherwise another process has.
		return attempts > 1, nil
	}
	return err == nil, DescribeErrorWithFix(err, "dropping index "+index.Name+" of "+Namespace(coll), "dropIndex", Namespace(coll),
		"have somebody else run: "+index.DropStatement(coll.Database().Name(), coll.Name()))
}

// EnsureTTLIn creates index in the collection with the UUID, or gives the existing one the TTL of index. If the TTL is
// nil, it removes the index. changed reports whether it changed anything. It never changes an index of others: one without a TTL,
// or with other keys or another condition. If such an index has the name or the keys, the error of a creation is an
// [ErrIndexConflict]. If the collection is gone, the error is [ErrCollectionGone].
func EnsureTTLIn(ctx context.Context, coll *mongo.Collection, uuid [16]byte, index Index) (changed bool, err error) {
	have, err := listIndexes(ctx, coll)
	if err != nil {
		return false, err
	}

	i := slices.IndexFunc(have, func(found existingIndex) bool {
		return found.Name == index.Name && found.TTL != nil && found.hasKeys(index.Keys) && sameDocument(found.Partial, index.Partial)
	})
	switch exists := i >= 0; {
	case index.TTL == nil && exists:
		changed, err = dropIndexIn(ctx, coll, uuid, index)
	case index.TTL == nil || exists && *have[i].TTL == float64(*index.TTL):
		return false, nil

	case exists:
		err = schema.Change(ctx, coll, func(ctx context.Context) error {
			return coll.Database().RunCommand(ctx, bson.D{
				{Key: "collMod", Value: coll.Name()},
				{Key: "index", Value: bson.D{
					{Key: "name", Value: index.Name}, {Key: "expireAfterSeconds", Value: *index.TTL},
				}},
				OnlyIn(uuid),
			}).Err()
		})
		changed, err = err == nil, DescribeError(err, "changing the TTL of "+Namespace(coll), "collMod", Namespace(coll))
	default:
		err = CreateIndexesIn(ctx, coll, uuid, []Index{index})
		changed = err == nil
	}

	if HasCode(err, CodeCollectionUUIDMismatch) {
		return false, fmt.Errorf("changing the TTL of %s: %w", Namespace(coll), ErrCollectionGone)
	}
	return changed, err
}

// MissingIndexes returns the indexes of want that the collection does not have.
func MissingIndexes(ctx context.Context, coll *mongo.Collection, want []Index) ([]Index, error) {
	have, err := listIndexes(ctx, coll)
	if err != nil {
		return nil, err
	}

	var missing []Index
	for _, w := range want {
		if !slices.ContainsFunc(have, func(index existingIndex) bool { return index.servesIndex(w) }) {
			missing = append(missing, w)
		}
	}
	return missing, nil
}
