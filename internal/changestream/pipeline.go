package changestream

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/glob"
)

// Pipeline is what the server filters by. Beside the inserts it lets through whatever ends or moves a collection: a stream
// of inserts alone is closed by a drop without a word, and the driver's token would reopen and close it for ever.
//
// Plain names become conditions on `ns.db` and `ns.coll`, which the server pushes down into its scan of the oplog.
// Patterns do not: such a regular expression, pushed down, costs every foreign entry 10 µs, against 4 for a literal
// and 5 for an expression, which the server evaluates on what passed the literals (MongoDB 6.0.5). `{ns: {db, coll}}` is never used:
// it is evaluated on every event of the cluster.
func (s *Scope) Pipeline() mongo.Pipeline {
	match := bson.D{{Key: "operationType", Value: in([]string{"insert", "drop", "rename", "dropDatabase", "invalidate"})}}
	if s.kind != Collection {
		var or bson.A
		for _, b := range s.branches() {
			or = append(or, b)
		}
		// A rename is let through whatever its source: it may bring a collection into the scope (N27).
		or = append(or, bson.D{{Key: "operationType", Value: in([]string{"rename", "dropDatabase", "invalidate"})}})
		match = append(match, bson.E{Key: "$or", Value: or})
	}
	if !s.part.Whole() { // N28
		match = append(match, bson.E{Key: "$and", Value: bson.A{bson.D{{Key: "$or", Value: bson.A{
			bson.D{{Key: "operationType", Value: bson.D{{Key: "$ne", Value: "insert"}}}}, s.part.Filter("fullDocument.slot"),
		}}}}})
	}
	return mongo.Pipeline{{{Key: "$match", Value: match}}}
}

// PipelineHash identifies what the stream delivers: its kind, its target, its filter. A token taken under another hash may
// name an event that this stream does not see, which the server notices only much later (error 280).
func (s *Scope) PipelineHash() string {
	raw, err := bson.Marshal(bson.D{{Key: "kind", Value: s.kind.String()}, {Key: "db", Value: s.db}, {Key: "coll", Value: s.coll}, {Key: "pipeline", Value: s.Pipeline()}})
	if err != nil {
		panic(fmt.Sprintf("changestream: own pipeline: %v", err)) // strings and documents of our own always marshal
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:16])
}

// branches are the alternatives of the filter: one for each name of a collection, with the databases it is watched in.
func (s *Scope) branches() []bson.D {
	var names []string
	dbs := map[string][]string{}
	for _, p := range s.include {
		if dbs[p.coll] == nil {
			names = append(names, p.coll)
		}
		dbs[p.coll] = append(dbs[p.coll], p.db)
	}
	if s.kind == Database {
		return s.databaseBranches(names)
	}
	slices.Sort(names)
	out := make([]bson.D, 0, len(names))
	for _, name := range names {
		b := condition("coll", []string{name})
		b = merge(b, condition("db", dbs[name]))
		out = append(out, merge(b, s.except(name, dbs[name])))
	}
	return out
}

// databaseBranches puts all plain names into one $in: thirty collections of a database are still one condition.
func (s *Scope) databaseBranches(names []string) []bson.D {
	plain, globs := split(names)
	var out []bson.D
	if len(plain) > 0 {
		out = append(out, bson.D{{Key: "ns.coll", Value: in(plain)}})
	}
	for _, g := range globs {
		out = append(out, merge(condition("coll", []string{g}), s.except(g, []string{s.db})))
	}
	return out
}

// except is the condition that leaves out the own collections which this branch could reach.
func (s *Scope) except(coll string, dbs []string) bson.D {
	var nor bson.A
	for _, x := range s.exclude {
		reached := glob.Overlap(x.coll, coll) && slices.ContainsFunc(dbs, func(db string) bool { return glob.Overlap(x.db, db) })
		if !reached || serversOwn(x) {
			continue
		}
		nor = append(nor, merge(condition("db", []string{x.db}), condition("coll", []string{x.coll})))
	}
	if nor == nil {
		return nil
	}
	return bson.D{{Key: "$nor", Value: nor}}
}

// serversOwn are collections that no change stream ever reports.
func serversOwn(p pattern) bool {
	return p.db == "admin" || p.db == "local" || p.db == "config" || p.coll == "system.*"
}

// wildcards makes a quoted pattern an expression.
var wildcards = strings.NewReplacer(`\*`, `.*`, `\?`, `.`)

// condition is true if the database's or the collection's name matches one of the patterns; nil if any name does.
func condition(part string, patterns []string) bson.D {
	if slices.Contains(patterns, "*") {
		return nil
	}
	plain, globs := split(patterns)
	if len(globs) == 0 {
		return bson.D{{Key: "ns." + part, Value: in(plain)}}
	}
	alternatives := make([]string, 0, len(patterns))
	for _, p := range slices.Concat(plain, globs) {
		alternatives = append(alternatives, wildcards.Replace(regexp.QuoteMeta(p)))
	}
	return bson.D{{Key: "$expr", Value: bson.D{{Key: "$regexMatch", Value: bson.D{
		{Key: "input", Value: bson.D{{Key: "$ifNull", Value: bson.A{"$ns." + part, ""}}}}, // a dropDatabase names no collection
		{Key: "regex", Value: `(?s)^(?:` + strings.Join(alternatives, "|") + `)\z`},
	}}}}}
}

// merge joins two conditions; a field that both have is put into an $and.
func merge(a, b bson.D) bson.D {
	if len(a) == 0 {
		return b
	}
	for _, e := range b {
		if slices.ContainsFunc(a, func(x bson.E) bool { return x.Key == e.Key }) {
			return bson.D{{Key: "$and", Value: bson.A{a, b}}}
		}
	}
	return append(slices.Clone(a), b...)
}

func split(patterns []string) (plain, globs []string) {
	for _, p := range slices.Compact(slices.Sorted(slices.Values(patterns))) {
		if glob.HasWildcard(p) {
			globs = append(globs, p)
		} else {
			plain = append(plain, p)
		}
	}
	return plain, globs
}

// in is equality for one value: $in costs the pushed-down scan a little more.
func in(values []string) any {
	if len(values) == 1 {
		return values[0]
	}
	a := make(bson.A, len(values))
	for i, v := range values {
		a[i] = v
	}
	return bson.D{{Key: "$in", Value: a}}
}
