package changestream

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/outrelay/outrelay/internal/glob"
	"github.com/outrelay/outrelay/internal/slot"
)

// Kind says over what a stream is opened.
type Kind uint8

// The kinds of streams.
const (
	Collection Kind = iota // one exact collection
	Database               // several collections of one database
	Cluster                // collections of several databases
)

func (k Kind) String() string { return [...]string{"collection", "database", "cluster"}[k] }

// Scope is the set of collections that a watcher reads. It is immutable.
type Scope struct {
	kind    Kind
	db      string // for a collection or database stream
	coll    string // for a collection stream
	include []pattern
	exclude []pattern
	part    slot.Range
}

// Of is the scope of one slot of a watcher: of the inserts, those of the part's keys. Drops and renames are for all (N28).
func (s *Scope) Of(p slot.Range) *Scope {
	of := *s
	of.part = p
	return &of
}

// pattern is "db.coll" where each part may be a pattern of package glob. The dot between the parts is the first one: a
// database's name has none, a collection's may.
type pattern struct{ db, coll string }

func (p pattern) String() string { return p.db + "." + p.coll }

func (p pattern) matches(db, coll []byte) bool {
	return glob.Match(p.db, db) && glob.Match(p.coll, coll)
}

// covers reports whether everything that q matches is matched by p.
func (p pattern) covers(q pattern) bool {
	return glob.Covers(p.db, q.db) && glob.Covers(p.coll, q.coll)
}

func (p pattern) meets(q pattern) bool {
	return glob.Overlap(p.db, q.db) && glob.Overlap(p.coll, q.coll)
}

// ownCollections are never watched, whatever a pattern says (N27): dead letters would be published again, and inboxes,
// sagas, the server's own databases and system collections hold no envelopes. What the server copies for $out and for a
// rename into another database counts once it has its name.
var ownCollections = []pattern{
	{"*", "*_dead"},
	{"*", "*_cron"},
	{"*", "inbox"},
	{"*", "inbox_*"},
	{"*", "*_sagas"},
	{"*", "saga_types"},
	{"admin", "*"},
	{"local", "*"},
	{"config", "*"},
	{"*", "system.*"},
	{"*", "tmp.agg_out.*"},
	{"*", "tmp*.renameCollection"},
}

// ParseScope reads patterns like `shop.outbox`, `tenant_*.outbox` and `*.outbox`. exclude names, in the same form,
// collections that belong to outrelay itself beside those: the state database ("outrelay.*").
// They are never read, and naming one of them as a collection to watch is an error. All problems are reported at once.
func ParseScope(patterns []string, exclude ...string) (*Scope, error) {
	s := &Scope{exclude: slices.Clone(ownCollections)}
	var problems []error
	for _, text := range exclude {
		p, err := parsePattern(text)
		if err != nil {
			problems = append(problems, err)
			continue
		}
		s.exclude = append(s.exclude, p)
	}
	for _, text := range patterns {
		p, err := parsePattern(text)
		if err != nil {
			problems = append(problems, err)
			continue
		}
		if i := slices.IndexFunc(s.exclude, func(x pattern) bool { return x.covers(p) }); i >= 0 {
			problems = append(problems, fmt.Errorf("%s: nothing of it can be watched, because %s is outrelay's or the server's own", p, s.exclude[i]))
			continue
		}
		s.include = append(s.include, p)
	}
	if len(patterns) == 0 {
		problems = append(problems, errors.New("no collection to watch: name at least one as database.collection"))
	}
	if len(problems) > 0 {
		return nil, errors.Join(problems...)
	}
	s.settle()
	return s, nil
}

// settle brings the patterns into one order without repetitions, so that the same set always has the same pipeline, and
// chooses the narrowest stream.
func (s *Scope) settle() {
	byName := func(a, b pattern) int { return strings.Compare(a.String(), b.String()) }
	slices.SortFunc(s.include, byName)
	s.include = slices.Compact(s.include)
	slices.SortFunc(s.exclude, byName)
	s.exclude = slices.Compact(s.exclude)
	all := s.include
	s.include = nil
	for i, p := range all {
		covered := func(j int) bool { return i != j && all[j].covers(p) }
		if !slices.ContainsFunc(indices(len(all)), covered) {
			s.include = append(s.include, p)
		}
	}
	s.exclude = slices.DeleteFunc(s.exclude, func(x pattern) bool {
		return !slices.ContainsFunc(s.include, x.meets)
	})
	first := s.include[0]
	oneDB := !glob.HasWildcard(first.db) && !slices.ContainsFunc(s.include, func(p pattern) bool { return p.db != first.db })
	switch {
	case oneDB && len(s.include) == 1 && !glob.HasWildcard(first.coll):
		s.kind, s.db, s.coll = Collection, first.db, first.coll
	case oneDB:
		s.kind, s.db = Database, first.db
	default:
		s.kind = Cluster
	}
}

func indices(n int) []int {
	is := make([]int, n)
	for i := range is {
		is[i] = i
	}
	return is
}

func parsePattern(text string) (pattern, error) {
	db, coll, found := strings.Cut(text, ".")
	switch {
	case !found || db == "" || coll == "":
		return pattern{}, fmt.Errorf("%q is not a collection: write database.collection, where * stands for any run of characters and ? for one", text)
	case strings.ContainsAny(db, "/\\ \"$\x00"):
		return pattern{}, fmt.Errorf(`%q: a database's name has no space and none of / \ " $`, text)
	case strings.ContainsAny(coll, "$\x00"):
		return pattern{}, fmt.Errorf("%q: a collection's name has no $", text)
	}
	return pattern{squeeze(db), squeeze(coll)}, nil
}

// squeeze makes one star of several in a row, so that equal patterns are equal strings.
func squeeze(s string) string {
	for strings.Contains(s, "**") {
		s = strings.ReplaceAll(s, "**", "*")
	}
	return s
}

// Kind is what the stream is opened over.
func (s *Scope) Kind() Kind { return s.kind }

// Target is the database and the collection of a collection stream, the database of a database stream, else empty.
func (s *Scope) Target() (db, coll string) { return s.db, s.coll }

// String names the scope as it was written, in one order.
func (s *Scope) String() string {
	names := make([]string, len(s.include))
	for i, p := range s.include {
		names[i] = p.String()
	}
	return strings.Join(names, ",")
}

// Matches reports whether a collection is watched. It does not allocate.
func (s *Scope) Matches(db, coll []byte) bool {
	in := false
	for i := range s.include {
		if s.include[i].matches(db, coll) {
			in = true
			break
		}
	}
	if !in {
		return false
	}
	for i := range s.exclude {
		if s.exclude[i].matches(db, coll) {
			return false
		}
	}
	return true
}

// Multiple reports whether more than one collection can be in the scope: then records say which one they are from (N7).
func (s *Scope) Multiple() bool { return s.kind != Collection }
