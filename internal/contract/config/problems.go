package config

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/agnivade/levenshtein"
	"go.yaml.in/yaml/v3"
)

// Problem is one problem of the configuration. It never contains a secret.
type Problem struct {
	Path    string `json:"path"`              // the key, or the name of a file or an environment variable
	Line    int    `json:"line,omitempty"`    // where the file has the key, from 1; 0 if the value is not from the file
	Source  string `json:"source,omitempty"`  // the variable or flag that has the value; "" for the file and for defaults
	Found   string `json:"found,omitempty"`   // the value found, or the mistake
	Allowed string `json:"allowed,omitempty"` // the allowed values, or the fix

	absent bool // a file or a variable does not exist on this machine
}

// String returns the problem on one line.
func (p Problem) String() string {
	text := p.Path
	switch {
	case p.Source == SetFlag:
		text = SetFlag + " " + p.Path
	case p.Source != "":
		text += " (" + p.Source + ")"
	case p.Line > 0:
		text += fmt.Sprintf(" (line %d)", p.Line)
	}
	text += ": " + p.Found
	if p.Allowed != "" {
		text += "; " + p.Allowed
	}
	return text
}

// Problems is the error of [Load]. It holds all problems, sorted by path.
type Problems struct {
	List []Problem

	fileLost bool // the file could not be loaded, so keys that are missing are not reported

	// withoutSecrets makes problems that are absent into warnings: see [LoadWithoutSecrets].
	withoutSecrets bool
	// unchecked has these problems.
	unchecked []Problem
}

// Error lists the problems, one per line.
func (p *Problems) Error() string {
	lines := make([]string, len(p.List))
	for i, problem := range p.List {
		lines[i] = problem.String()
	}

	if len(lines) == 1 {
		return "configuration: " + lines[0]
	}
	return fmt.Sprintf("configuration: %d problems\n  %s", len(lines), strings.Join(lines, "\n  "))
}

func (p *Problems) report(path, found, allowed string) {
	p.List = append(p.List, Problem{Path: path, Found: found, Allowed: allowed})
}

// reportFile adds a problem of a file or a reference. If it may be absent here, the value is only not checked.
func (p *Problems) reportFile(problem Problem) {
	if problem.absent && p.withoutSecrets {
		p.unchecked = append(p.unchecked, problem)
		return
	}
	p.List = append(p.List, problem)
}

// listUnchecked returns a warning for each value that is not checked, sorted by path.
func (p *Problems) listUnchecked() (warnings []string) {
	for _, problem := range p.unchecked {
		warnings = append(warnings, problem.Path+" is not checked: "+problem.Found)
	}
	slices.Sort(warnings)
	return warnings
}

// hasProblem reports whether path, a key above it or a key below it has a problem, or is not checked. Its consequences are
// not reported again.
func (p *Problems) hasProblem(path string) bool {
	concerns := func(problem Problem) bool {
		return problem.Path == path || strings.HasPrefix(path, problem.Path+".") || strings.HasPrefix(problem.Path, path+".")
	}
	return slices.ContainsFunc(p.List, concerns) || slices.ContainsFunc(p.unchecked, concerns)
}

// hideReferences removes the values of references from the problems, because a value may be a secret
// even in a field that is not secret. references holds the references by path.
func (p *Problems) hideReferences(references map[string]resolvedText) {
	for i := range p.List {
		problem := &p.List[i]
		// A problem may concern the value itself, an element of its list, or the section around it.
		for path, r := range references {
			isElement := strings.HasPrefix(problem.Path, path+"[")
			isSection := strings.HasPrefix(path, problem.Path+".")
			if problem.Path != path && !isElement && !isSection {
				continue
			}

			// Another text may contain the value, such as the path of a file that cannot be read.
			if !strings.HasPrefix(problem.Found, "found ") {
				problem.Found = strings.ReplaceAll(problem.Found, r.value, r.text)
				continue
			}

			problem.Found = fmt.Sprintf("found the value of %q, which is not shown", r.text)
			// A text with quotes may quote the value.
			if strings.Contains(problem.Allowed, `"`) {
				problem.Allowed = "correct the value of the variable or the file"
			}
			break
		}
	}
}

// setSources sets the source of each problem whose value is not that of the file, and the line of each other one. sources holds the
// sources by the path of their values. isInFile reports whether the file has a key.
func (p *Problems) setSources(sources map[string]string, document *yaml.Node, isInFile func(key string) bool) {
	for i := range p.List {
		problem := &p.List[i]
		if problem.Source == "" {
			problem.Source = findSource(sources, problem.Path, isInFile)
		}
		if problem.Source == "" && document != nil {
			problem.Line = lineOf(document, problem.Path)
		}
	}
}

// findSource returns the source of the value at path, or of a value below it if the file has no such section. It returns "" if
// there is none.
func findSource(sources map[string]string, path string, isInFile func(key string) bool) string {
	// A problem may concern an element of a list or of a section that one source sets as a whole.
	for above := path; above != ""; above = above[:max(0, strings.LastIndexAny(above, ".["))] {
		if source, ok := sources[above]; ok {
			return source
		}
	}
	if isInFile(path) {
		return ""
	}
	for _, key := range slices.Sorted(maps.Keys(sources)) {
		if strings.HasPrefix(key, path+".") {
			return sources[key]
		}
	}
	return ""
}

// lineOf returns the line of the key at path, or of the deepest key above it in the file. It returns 0 if the file
// has neither.
func lineOf(n *yaml.Node, path string) int {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}

	if n.Kind == yaml.MappingNode {
		for i := 0; i+1 < len(n.Content); i += 2 {
			key, value := n.Content[i], n.Content[i+1]
			rest, ok := strings.CutPrefix(path, key.Value)
			if !ok || rest != "" && rest[0] != '.' && rest[0] != '[' {
				continue
			}
			// If the deepest key is missing in the file, the line of its section helps as well.
			return cmp.Or(lineOf(value, strings.TrimPrefix(rest, ".")), key.Line)
		}
	}
	if n.Kind == yaml.SequenceNode {
		index, rest, _ := strings.Cut(strings.TrimPrefix(path, "["), "]")
		i, err := strconv.Atoi(index)
		if err == nil && i >= 0 && i < len(n.Content) {
			return cmp.Or(lineOf(n.Content[i], strings.TrimPrefix(rest, ".")), n.Content[i].Line)
		}
	}
	return 0
}

// asError sorts the problems, removes duplicates and returns p. It returns nil if there is no problem.
func (p *Problems) asError() error {
	if len(p.List) == 0 {
		return nil
	}
	slices.SortStableFunc(p.List, func(a, b Problem) int { return strings.Compare(a.Path, b.Path) })
	p.List = slices.Compact(p.List)
	return p
}

// NearestName returns the candidate that was probably meant by name, or "" if none is similar. Half of the letters have to agree.
func NearestName(name string, candidates []string) string {
	best, bestDistance := "", max(2, len(name)/3)+1
	for _, c := range candidates {
		distance := levenshtein.ComputeDistance(strings.ToLower(name), strings.ToLower(c))
		if distance < bestDistance && 2*distance <= len(name) {
			best, bestDistance = c, distance
		}
	}
	return best
}
