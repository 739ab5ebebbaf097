package changes

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/outrelay/outrelay/internal/base/glob"
	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/contract/slot"
)

// Kind is the kind of a change stream.
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
	slot    slot.Range
}

// Of returns the scope of one slot of a watcher: only the inserts with the keys of slot, but all drops
// and renames (N28).
func (s *Scope) Of(slot slot.Range) *Scope {
	scope := *s
	scope.slot = slot
	return &scope
}

// pattern is "db.coll", where each part may be a pattern of package glob. The first dot separates the
// parts, because a database's name has no dot, and a collection's name may have dots.
type pattern struct{ db, coll string }

func (p pattern) String() string { return p.db + "." + p.coll }

func (p pattern) matches(db, coll []byte) bool {
	return glob.Match(p.db, db) && glob.Match(p.coll, coll)
}

// covers reports whether p matches every name that pattern matches.
func (p pattern) covers(pattern pattern) bool {
	return glob.Covers(p.db, pattern.db) && glob.Covers(p.coll, pattern.coll)
}

// overlaps reports whether some name matches both patterns.
func (p pattern) overlaps(pattern pattern) bool {
	return glob.Overlap(p.db, pattern.db) && glob.Overlap(p.coll, pattern.coll)
}

// ParseScope parses patterns such as `shop.outbox`, `tenant_*.outbox` and `*.outbox`. exclude has the
// same form. It names further collections of outrelay itself: the state database ("outrelay.*").
// Excluded collections are never read. A pattern that matches nothing else is an error. ParseScope
// reports all problems at once.
func ParseScope(patterns []string, exclude ...string) (*Scope, error) {
	scope := &Scope{}
	// N27: a stream would publish dead letters and marks again.
	for _, own := range config.OwnCollections {
		scope.exclude = append(scope.exclude, pattern{own.DB, own.Coll})
	}
	var problems []error
	for _, text := range exclude {
		pattern, err := parsePattern(text)
		if err != nil {
			problems = append(problems, err)
			continue
		}
		scope.exclude = append(scope.exclude, pattern)
	}

	for _, text := range patterns {
		p, err := parsePattern(text)
		if err != nil {
			problems = append(problems, err)
			continue
		}
		if i := slices.IndexFunc(scope.exclude, func(pattern pattern) bool { return pattern.covers(p) }); i >= 0 {
			problems = append(problems, fmt.Errorf(
				"%s: cannot be watched, because %s belongs to outrelay or to the server", p, scope.exclude[i]))
			continue
		}
		scope.include = append(scope.include, p)
	}

	if len(patterns) == 0 {
		problems = append(problems, errors.New("no collection to watch: name at least one as database.collection"))
	}
	if len(problems) > 0 {
		return nil, errors.Join(problems...)
	}

	scope.normalize()
	return scope, nil
}

// normalize sorts the patterns and removes redundant ones, so that the same set always has the same
// pipeline. It chooses the narrowest kind of stream.
func (s *Scope) normalize() {
	byName := func(a, b pattern) int { return strings.Compare(a.String(), b.String()) }
	slices.SortFunc(s.include, byName)
	s.include = slices.Compact(s.include)
	slices.SortFunc(s.exclude, byName)
	s.exclude = slices.Compact(s.exclude)

	all := s.include
	s.include = nil
	for i, p := range all {
		covered := false
		for j, q := range all {
			covered = covered || i != j && q.covers(p)
		}
		if !covered {
			s.include = append(s.include, p)
		}
	}

	// Exclusions that no pattern can match would only make the filter longer.
	s.exclude = slices.DeleteFunc(s.exclude, func(pattern pattern) bool {
		return !slices.ContainsFunc(s.include, pattern.overlaps)
	})

	first := s.include[0]
	oneDB := !glob.HasWildcard(first.db) &&
		!slices.ContainsFunc(s.include, func(pattern pattern) bool { return pattern.db != first.db })
	switch {
	case oneDB && len(s.include) == 1 && !glob.HasWildcard(first.coll):
		s.kind, s.db, s.coll = Collection, first.db, first.coll
	case oneDB:
		s.kind, s.db = Database, first.db
	default:
		s.kind = Cluster
	}
}

func parsePattern(text string) (pattern, error) {
	db, coll, found := strings.Cut(text, ".")
	switch {
	case !found || db == "" || coll == "":
		return pattern{}, fmt.Errorf("%q is not a collection: write database.collection, "+
			"where * matches any characters and ? matches one", text)
	case strings.ContainsAny(db, "/\\ \"$\x00"):
		return pattern{}, fmt.Errorf(`%q: the name of a database cannot contain a space or any of / \ " $`, text)
	case strings.ContainsAny(coll, "$\x00"):
		return pattern{}, fmt.Errorf("%q: the name of a collection cannot contain $", text)
	}
	return pattern{collapseStars(db), collapseStars(coll)}, nil
}

// collapseStars replaces several consecutive stars by one, so that equal patterns are equal strings.
func collapseStars(text string) string {
	for strings.Contains(text, "**") {
		text = strings.ReplaceAll(text, "**", "*")
	}
	return text
}

// Kind returns the kind of the stream.
func (s *Scope) Kind() Kind { return s.kind }

// Target returns the database and the collection of a collection stream, or the database of a
// database stream. Both are empty for a cluster stream.
func (s *Scope) Target() (db, coll string) { return s.db, s.coll }

// String returns the sorted patterns of the scope, without redundant ones.
func (s *Scope) String() string {
	names := make([]string, len(s.include))
	for i, p := range s.include {
		names[i] = p.String()
	}
	return strings.Join(names, ",")
}

// Matches reports whether a collection is watched. It does not allocate.
func (s *Scope) Matches(db, coll []byte) bool {
	included := false
	for i := range s.include {
		if s.include[i].matches(db, coll) {
			included = true
			break
		}
	}
	if !included {
		return false
	}

	for i := range s.exclude {
		if s.exclude[i].matches(db, coll) {
			return false
		}
	}
	return true
}
