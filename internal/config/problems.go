package config

import (
	"fmt"
	"slices"
	"strings"

	"github.com/agnivade/levenshtein"
)

// Problem is one thing that is wrong. No part of it holds a secret.
type Problem struct {
	Path    string `json:"path"`              // the key, or the name of a file or an environment variable
	Found   string `json:"found,omitempty"`   // what is there
	Allowed string `json:"allowed,omitempty"` // what may be there, or what to do
}

// String is the problem on one line.
func (p Problem) String() string {
	s := p.Path + ": " + p.Found
	if p.Allowed != "" {
		s += "; " + p.Allowed
	}
	return s
}

// Problems is the error of [Load]: everything that is wrong at once, in the order of the paths.
type Problems struct{ List []Problem }

// Error lists the problems, one a line.
func (p *Problems) Error() string {
	lines := make([]string, len(p.List))
	for i, one := range p.List {
		lines[i] = one.String()
	}
	if len(lines) == 1 {
		return "configuration: " + lines[0]
	}
	return fmt.Sprintf("configuration: %d problems\n  %s", len(lines), strings.Join(lines, "\n  "))
}

func (p *Problems) add(path, found, allowed string) {
	p.List = append(p.List, Problem{Path: path, Found: found, Allowed: allowed})
}

// has reports whether path or a key above it has a problem already, so that what follows from it is not reported too.
func (p *Problems) has(path string) bool {
	return slices.ContainsFunc(p.List, func(one Problem) bool {
		return one.Path == path || strings.HasPrefix(path, one.Path+".") || strings.HasPrefix(one.Path, path+".")
	})
}

// hide removes what a reference stands for from the problems: it may be a secret, also where none is expected. refers has the
// references by their paths.
func (p *Problems) hide(refers map[string]resolved) {
	for i := range p.List {
		one := &p.List[i]
		for path, r := range refers {
			if one.Path != path && !strings.HasPrefix(one.Path, path+"[") && !strings.HasPrefix(path, one.Path+".") {
				continue
			}
			if !strings.HasPrefix(one.Found, "found ") { // it may name the value, such as that of a file that cannot be read
				one.Found = strings.ReplaceAll(one.Found, r.value, r.text)
				continue
			}
			one.Found = fmt.Sprintf("found what %q stands for, which is not shown", r.text)
			if strings.Contains(one.Allowed, `"`) { // it may quote the value
				one.Allowed = "correct the value of the variable or the file"
			}
			break
		}
	}
}

// err is nil without a problem.
func (p *Problems) err() error {
	if len(p.List) == 0 {
		return nil
	}
	slices.SortStableFunc(p.List, func(a, b Problem) int { return strings.Compare(a.Path, b.Path) })
	p.List = slices.Compact(p.List)
	return p
}

// nearest is the candidate that name was probably meant to be, or "".
func nearest(name string, candidates []string) string {
	best, at := "", max(2, len(name)/3)+1
	for _, c := range candidates {
		if d := levenshtein.ComputeDistance(strings.ToLower(name), strings.ToLower(c)); d < at && d < len(name) {
			best, at = c, d
		}
	}
	return best
}
