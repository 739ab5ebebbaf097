package mongodb

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// ErrIndexConflict means that an index with other options has the keys or the name of a declared index.
var ErrIndexConflict = errors.New("an index of the same keys or name exists with other options")

// DriftKind is the kind of difference between an existing index and the declared one.
type DriftKind string

// The kinds of drift.
const (
	IndexMissing     DriftKind = "missing"     // no existing index serves as well
	IndexDifferent   DriftKind = "different"   // an index has the name, but other keys or options
	IndexSuperfluous DriftKind = "superfluous" // only an older version or the relay can have made the index
)

// OwnPrefix begins the names of the indexes that only the relay makes, in addition to the declared ones.
const OwnPrefix = "outrelay_"

// Drift is one difference between the indexes of a collection and the declared ones.
type Drift struct {
	DB, Coll string
	Kind     DriftKind
	Index    Index  // the declared index; only its name if the index is superfluous
	Detail   string // the existing index
}

// Statements returns the mongosh statements that fix the difference.
func (d Drift) Statements() []string {
	switch d.Kind {
	case IndexMissing:
		return []string{d.Index.Statement(d.DB, d.Coll)}
	case IndexDifferent:
		return []string{d.Index.DropStatement(d.DB, d.Coll), d.Index.Statement(d.DB, d.Coll)}
	default:
		return []string{d.Index.DropStatement(d.DB, d.Coll)}
	}
}

// CompareIndexes reports how coll differs from want. superseded lists the indexes that an older version
// declared: if one still exists, it is superfluous. optional names indexes that may exist or not.
// CompareIndexes ignores indexes that outrelay did not create. If such an index is equivalent to a declared
// one, it satisfies that declaration. If the collection does not exist, all indexes are missing.
func CompareIndexes(
	ctx context.Context, coll *mongo.Collection, want, superseded []Index, optional ...string,
) ([]Drift, error) {
	have, err := listIndexes(ctx, coll)
	if err != nil {
		return nil, err
	}

	drift := func(kind DriftKind, i Index, detail string) Drift {
		return Drift{DB: coll.Database().Name(), Coll: coll.Name(), Kind: kind, Index: i, Detail: detail}
	}

	var out []Drift
	for _, w := range want {
		named := slices.IndexFunc(have, func(h existingIndex) bool { return h.Name == w.Name })
		switch {
		// An index with another name satisfies the declaration as well.
		case slices.ContainsFunc(have, func(h existingIndex) bool { return h.servesIndex(w) }):
		case named >= 0:
			out = append(out, drift(IndexDifferent, w, have[named].describeIndex()))
		default:
			out = append(out, drift(IndexMissing, w, ""))
		}
	}

	for _, h := range have {
		declared := slices.Contains(optional, h.Name) ||
			slices.ContainsFunc(want, func(w Index) bool { return w.Name == h.Name })
		// An index that has only the name of an older declaration may be one of the user's.
		old := slices.ContainsFunc(superseded, func(s Index) bool { return s.Name == h.Name && h.hasKeys(s.Keys) })
		if !declared && (old || strings.HasPrefix(h.Name, OwnPrefix)) {
			out = append(out, drift(IndexSuperfluous, Index{Name: h.Name}, h.describeIndex()))
		}
	}
	return out, nil
}

// RepairIndex fixes one difference: it creates a missing index, replaces a different one, and drops a
// superfluous one. During a replacement, the collection has no such index between the drop and the end of the
// build. RepairIndex may be repeated.
func RepairIndex(ctx context.Context, client *mongo.Client, d Drift) error {
	coll := Database(client, d.DB).Collection(d.Coll)
	if d.Kind != IndexMissing {
		if _, err := dropIndexNamed(ctx, coll, d.Index.Name); err != nil {
			return err
		}
	}

	if d.Kind == IndexSuperfluous {
		return nil
	}
	return CreateIndexes(ctx, coll, []Index{d.Index})
}

// existingIndex is an index in the form that the command listIndexes returns.
type existingIndex struct {
	Name      string   `bson:"name"`
	Key       bson.Raw `bson:"key"`
	Partial   bson.Raw `bson:"partialFilterExpression"`
	Collation bson.Raw `bson:"collation"`
	Unique    bool     `bson:"unique"`
	Sparse    bool     `bson:"sparse"`
	Hidden    bool     `bson:"hidden"`
	TTL       *float64 `bson:"expireAfterSeconds"`
}

// listIndexes returns the indexes of coll, or none if the collection does not exist.
func listIndexes(ctx context.Context, coll *mongo.Collection) ([]existingIndex, error) {
	cur, err := coll.Indexes().List(ctx)
	if HasCode(err, codeNamespaceNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, Refusal(err, "listing indexes of "+Namespace(coll), "listIndexes", Namespace(coll))
	}

	var have []existingIndex
	if err := cur.All(ctx, &have); err != nil {
		return nil, fmt.Errorf("listing indexes of %s: %w", Namespace(coll), err)
	}
	return have, nil
}

// servesIndex reports whether h can replace want. The name does not matter. An index over all documents can
// replace a partial one, but costs more. An index that rejects or removes documents, or that no query may use,
// cannot replace it.
func (h existingIndex) servesIndex(want Index) bool {
	return h.hasKeys(want.Keys) && !h.Hidden && !h.Sparse && !h.Unique && h.Collation == nil &&
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
		w, number := want[i].Value.(int32)
		if !ok || !number || n != int64(w) || e.Key() != want[i].Key {
			return false
		}
	}
	return true
}

// describeIndex returns the index as text for messages.
func (h existingIndex) describeIndex() string {
	parts := []string{h.Key.String()}
	if h.Partial != nil {
		parts = append(parts, "partial "+h.Partial.String())
	}
	if h.Collation != nil {
		parts = append(parts, "with a collation")
	}

	for _, o := range []struct {
		is   bool
		word string
	}{{h.Unique, "unique"}, {h.Sparse, "sparse"}, {h.Hidden, "hidden"}} {
		if o.is {
			parts = append(parts, o.word)
		}
	}

	if h.TTL != nil {
		parts = append(parts, fmt.Sprintf("expiring after %g s", *h.TTL))
	}
	return strings.Join(parts, ", ")
}

// sameDocument reports whether both documents have the same bytes, so the order of the fields matters.
func sameDocument(have bson.Raw, want bson.D) bool {
	w, err := bson.Marshal(want)
	return err == nil && bytes.Equal(have, w)
}
