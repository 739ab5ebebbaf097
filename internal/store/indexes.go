package store

import (
	"bytes"
	"context"
	"fmt"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// Index is one index of an outbox collection.
type Index struct {
	Name    string
	Keys    bson.D
	Partial bson.D // nil indexes every document
}

// Indexes are those of every outbox collection: ts for purge and sweep; the others only hold exceptions, so a healthy
// envelope pays for one entry.
func Indexes() []Index {
	present := func(field string) bson.D {
		return bson.D{{Key: field, Value: bson.D{{Key: "$exists", Value: true}}}}
	}
	return []Index{
		{"ts_1", bson.D{{Key: "ts", Value: int32(1)}}, nil},
		{"dueAt_1", bson.D{{Key: "dueAt", Value: int32(1)}}, present("dueAt")},
		{"nextAt_1", bson.D{{Key: "nextAt", Value: int32(1)}}, present("nextAt")},
		{"state_1_key_1_pos_1", bson.D{{Key: "state", Value: int32(1)}, {Key: "key", Value: int32(1)}, {Key: "pos", Value: int32(1)}}, present("state")},
	}
}

func (i Index) spec() bson.D {
	d := bson.D{{Key: "key", Value: i.Keys}, {Key: "name", Value: i.Name}}
	if i.Partial != nil {
		d = append(d, bson.E{Key: "partialFilterExpression", Value: i.Partial})
	}
	return d
}

// Statement is what an administrator types into mongosh to make the index.
func (i Index) Statement(db, coll string) string {
	keys, _ := bson.MarshalExtJSON(i.Keys, false, false) // made of names and ones
	s := fmt.Sprintf("db.getSiblingDB(%q).getCollection(%q).createIndex(%s", db, coll, keys)
	if i.Partial != nil {
		p, _ := bson.MarshalExtJSON(i.Partial, false, false)
		s += fmt.Sprintf(", {partialFilterExpression: %s}", p)
	}
	return s + ")"
}

// IndexStatements are the statements for all indexes of an outbox collection, for people without the relay's privileges.
func IndexStatements(db, coll string) []string {
	var out []string
	for _, i := range Indexes() {
		out = append(out, i.Statement(db, coll))
	}
	return out
}

// EnsureIndexes makes the indexes that are missing, and the collection with them. It needs createIndex only if one is;
// without that privilege the error is a [*PrivilegeError] with the statements to run instead. An index of the same keys
// that was made in another way is an error that names it, and is left alone.
func EnsureIndexes(ctx context.Context, coll *mongo.Collection) error {
	missing, err := MissingIndexes(ctx, coll)
	switch {
	case hasCode(err, codeUnauthorized):
		missing = Indexes() // may not look, but perhaps may create, which does nothing to those that are there
	case err != nil:
		return err
	}
	if len(missing) == 0 {
		return nil
	}
	specs := make(bson.A, len(missing))
	statements := make([]string, len(missing))
	for i, m := range missing {
		specs[i] = m.spec()
		statements[i] = m.Statement(coll.Database().Name(), coll.Name())
	}
	err = coll.Database().RunCommand(ctx, bson.D{{Key: "createIndexes", Value: coll.Name()}, {Key: "indexes", Value: specs}}).Err()
	if hasCode(err, codeIndexOptionsConflict, codeIndexKeySpecsConflict) {
		return fmt.Errorf("creating indexes on %s: one of the same keys or name exists with other options; drop it or rename it, then run: %s: %w",
			Namespace(coll), strings.Join(statements, "; "), err)
	}
	if err != nil {
		return privilege(err, "creating indexes on "+Namespace(coll), "createIndex", Namespace(coll),
			"have somebody else run: "+strings.Join(statements, "; "))
	}
	return nil
}

// MissingIndexes are those of [Indexes] that coll does not have, whatever the names of those it has. A collection that
// does not exist misses all.
func MissingIndexes(ctx context.Context, coll *mongo.Collection) ([]Index, error) {
	cur, err := coll.Indexes().List(ctx)
	if hasCode(err, codeNamespaceNotFound) {
		return Indexes(), nil
	}
	if err != nil {
		return nil, privilege(err, "listing indexes of "+Namespace(coll), "listIndexes", Namespace(coll), "")
	}
	var have []struct {
		Key     bson.Raw `bson:"key"`
		Partial bson.Raw `bson:"partialFilterExpression"`
	}
	if err := cur.All(ctx, &have); err != nil {
		return nil, fmt.Errorf("listing indexes of %s: %w", Namespace(coll), err)
	}
	var missing []Index
	for _, want := range Indexes() {
		found := false
		for _, h := range have {
			// An index over everything serves as well as the partial one, it only costs more.
			found = found || sameKeys(h.Key, want.Keys) && (h.Partial == nil || want.Partial != nil && sameDocument(h.Partial, want.Partial))
		}
		if !found {
			missing = append(missing, want)
		}
	}
	return missing, nil
}

// sameKeys compares numerically: 1 may be stored as an int32, an int64 or a double.
func sameKeys(have bson.Raw, want bson.D) bool {
	elems, err := have.Elements()
	if err != nil || len(elems) != len(want) {
		return false
	}
	for i, e := range elems {
		n, ok := e.Value().AsInt64OK()
		if !ok || n != 1 || e.Key() != want[i].Key {
			return false
		}
	}
	return true
}

func sameDocument(have bson.Raw, want bson.D) bool {
	w, err := bson.Marshal(want)
	return err == nil && bytes.Equal(have, w)
}
