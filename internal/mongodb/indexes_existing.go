package mongodb

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// ErrIndexConflict means that an index with other options has the keys or the name of a declared index.
var ErrIndexConflict = errors.New("an index of the same keys or name exists with other options")

// existingIndex is an index in the form that the command listIndexes returns.
type existingIndex struct {
	Name    string   `bson:"name"`
	Key     bson.Raw `bson:"key"`
	Partial bson.Raw `bson:"partialFilterExpression"`
	Unique  bool     `bson:"unique"`
	Sparse  bool     `bson:"sparse"`
	Hidden  bool     `bson:"hidden"`
	TTL     *float64 `bson:"expireAfterSeconds"`
}

// listIndexes returns the indexes of coll, or none if the collection does not exist.
func listIndexes(ctx context.Context, coll *mongo.Collection) ([]existingIndex, error) {
	cur, err := coll.Indexes().List(ctx)
	if HasCode(err, codeNamespaceNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, DescribeError(err, "listing indexes of "+Namespace(coll), "listIndexes", Namespace(coll))
	}

	var have []existingIndex
	if err := cur.All(ctx, &have); err != nil {
		return nil, fmt.Errorf("listing indexes of %s: %w", Namespace(coll), err)
	}
	return have, nil
}

// servesIndex reports whether h can replace want. The name does not matter. An index over all documents can
// replace a partial one, but costs more. An index that rejects or removes documents, or that no query may use,
// cannot replace it. A collation does not matter: the keys are times and numbers, or the collection is the relay's.
func (h existingIndex) servesIndex(want Index) bool {
	return h.hasKeys(want.Keys) && !h.Hidden && !h.Sparse && !h.Unique &&
		(h.TTL == nil) == (want.TTL == nil) && (h.TTL == nil || *h.TTL == float64(*want.TTL)) &&
		(h.Partial == nil || want.Partial != nil && sameDocument(h.Partial, want.Partial))
}

// hasKeys reports whether the keys of h are want. It compares numbers by value, because the server may store 1
// as an int32, an int64 or a double.
func (h existingIndex) hasKeys(want bson.D) bool {
	elems, err := h.Key.Elements()
	if err != nil || len(elems) != len(want) {
		return false
	}

	for i, e := range elems {
		n, ok := e.Value().AsInt64OK()
		direction, number := want[i].Value.(int32)
		if !ok || !number || n != int64(direction) || e.Key() != want[i].Key {
			return false
		}
	}
	return true
}

// sameDocument reports whether both documents have the same bytes, so the order of the fields matters.
func sameDocument(have bson.Raw, want bson.D) bool {
	encoded, err := bson.Marshal(want)
	return err == nil && bytes.Equal(have, encoded)
}
