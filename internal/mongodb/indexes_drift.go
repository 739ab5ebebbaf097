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

// ErrIndexConflict says that an index stands where another is declared.
var ErrIndexConflict = errors.New("an index of the same keys or name exists with other options")

// DriftKind says how what is there differs from what is declared.
type DriftKind string

// The kinds of drift.
const (
	IndexMissing     DriftKind = "missing"     // nothing that is there serves as well
	IndexDifferent   DriftKind = "different"   // the name is there, with other keys or options
	IndexSuperfluous DriftKind = "superfluous" // an index of an older version, or one that only the relay can have made
)

// OwnPrefix begins the names of indexes that only the relay makes, beside those it declares.
const OwnPrefix = "outrelay_"

// Drift is one difference between the indexes of a collection and the declared ones.
type Drift struct {
	DB, Coll string
	Kind     DriftKind
	Index    Index  // the declared one; of a superfluous one the name alone
	Detail   string // what is there instead
}

// Statements are what an administrator types into mongosh to mend it.
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

// CompareIndexes reports how coll differs from want. superseded are indexes that an older version declared: one that is
// still there is superfluous. optional names indexes that may be there or not. Those that other people made are nobody's
// drift, and one of theirs that serves as well as a declared one stands for it. A collection that does not exist misses all.
func CompareIndexes(ctx context.Context, coll *mongo.Collection, want, superseded []Index, optional ...string) ([]Drift, error) {
	have, err := listIndexes(ctx, coll)
	if err != nil {
		return nil, err
	}
	drift := func(kind DriftKind, i Index, detail string) Drift {
		return Drift{DB: coll.Database().Name(), Coll: coll.Name(), Kind: kind, Index: i, Detail: detail}
	}
	var out []Drift
	for _, w := range want {
		named := slices.IndexFunc(have, func(h existing) bool { return h.Name == w.Name })
		switch {
		case slices.ContainsFunc(have, func(h existing) bool { return h.serves(w) }):
		case named >= 0:
			out = append(out, drift(IndexDifferent, w, have[named].text()))
		default:
			out = append(out, drift(IndexMissing, w, ""))
		}
	}
	for _, h := range have {
		declared := slices.Contains(optional, h.Name) || slices.ContainsFunc(want, func(w Index) bool { return w.Name == h.Name })
		old := slices.ContainsFunc(superseded, func(s Index) bool { return s.Name == h.Name && h.sameKeys(s.Keys) })
		if !declared && (old || strings.HasPrefix(h.Name, OwnPrefix)) {
			out = append(out, drift(IndexSuperfluous, Index{Name: h.Name}, h.text()))
		}
	}
	return out, nil
}

// RepairIndex mends one difference: it makes what is missing, replaces what is different, and drops what is superfluous.
// Between the drop and the end of the build of a different one the collection is without it. It may be repeated.
func RepairIndex(ctx context.Context, client *mongo.Client, d Drift) error {
	coll := client.Database(d.DB).Collection(d.Coll)
	if d.Kind != IndexMissing {
		if _, err := DropIndexNamed(ctx, coll, d.Index.Name); err != nil {
			return err
		}
	}
	if d.Kind == IndexSuperfluous {
		return nil
	}
	return CreateIndexes(ctx, coll, []Index{d.Index})
}

// existing is an index as listIndexes tells of it.
type existing struct {
	Name      string   `bson:"name"`
	Key       bson.Raw `bson:"key"`
	Partial   bson.Raw `bson:"partialFilterExpression"`
	Collation bson.Raw `bson:"collation"`
	Unique    bool     `bson:"unique"`
	Sparse    bool     `bson:"sparse"`
	Hidden    bool     `bson:"hidden"`
	TTL       *float64 `bson:"expireAfterSeconds"`
}

// listIndexes is empty for a collection that does not exist.
func listIndexes(ctx context.Context, coll *mongo.Collection) ([]existing, error) {
	cur, err := coll.Indexes().List(ctx)
	if HasCode(err, CodeNamespaceNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, DescribeRefusal(err, "listing indexes of "+Namespace(coll), "listIndexes", Namespace(coll), "")
	}
	var have []existing
	if err := cur.All(ctx, &have); err != nil {
		return nil, fmt.Errorf("listing indexes of %s: %w", Namespace(coll), err)
	}
	return have, nil
}

// serves reports whether h does what want is for, whatever its name. An index over everything serves as well as a partial
// one, it only costs more; one that refuses or removes documents, or that no query may use, does not.
func (h existing) serves(want Index) bool {
	return h.sameKeys(want.Keys) && !h.Hidden && !h.Sparse && h.Collation == nil && h.Unique == want.Unique &&
		(h.TTL == nil) == (want.TTL == nil) && (h.TTL == nil || *h.TTL == float64(*want.TTL)) &&
		(h.Partial == nil || want.Partial != nil && sameDocument(h.Partial, want.Partial))
}

// sameKeys compares numerically: 1 may be stored as an int32, an int64 or a double.
func (h existing) sameKeys(want bson.D) bool {
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

// text is the index for people.
func (h existing) text() string {
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

func sameDocument(have bson.Raw, want bson.D) bool {
	w, err := bson.Marshal(want)
	return err == nil && bytes.Equal(have, w)
}
