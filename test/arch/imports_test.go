package arch

import (
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var none = []string{}

const (
	mostHouses = 9
	mostLayers = 20
)

func TestImportsFollowTheLayers(t *testing.T) {
	t.Parallel()
	reportProblems(t, layerProblems(t, parseModule(t)))
}

func TestLibrariesStayInTheirRooms(t *testing.T) {
	t.Parallel()
	reportProblems(t, libraryProblems(t, parseModule(t)))
}

// TestInternalHasFewHouses: internal/ has a directory for each house and nothing else, and the table of layers stays short.
func TestInternalHasFewHouses(t *testing.T) {
	t.Parallel()
	entries, err := os.ReadDir(filepath.Join(moduleRoot(t), "internal"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	reportProblems(t, houseProblems(names, houses))

	if len(houses) > mostHouses || len(layers) > mostLayers {
		t.Errorf("%d houses and %d layers, want at most %d and %d", len(houses), len(layers), mostHouses, mostLayers)
	}
}

func TestHouseRuleSeesWrongDirectories(t *testing.T) {
	t.Parallel()
	table := map[string]string{"base": "tools", "lab": ""}
	expectProblem(t, houseProblems([]string{"base", "lab"}, table), "house lab has no purpose")
	table["lab"] = "tries"
	expectProblem(t, houseProblems([]string{"base", "lab"}, table), "")
	expectProblem(t, houseProblems([]string{"base", "lab", "gadgets"}, table), "internal/gadgets is no house")
	expectProblem(t, houseProblems([]string{"base"}, table), "house lab has no directory")
}

// houseProblems compares the names in internal/ with the houses.
func houseProblems(names []string, houses map[string]string) []string {
	var out []string
	for _, n := range names {
		if _, ok := houses[n]; !ok {
			out = append(out, fmt.Sprintf("internal/%s is no house: move it into one", n))
		}
	}
	for _, h := range slices.Sorted(maps.Keys(houses)) {
		if !slices.Contains(names, h) {
			out = append(out, fmt.Sprintf("house %s has no directory", h))
		}
		if houses[h] == "" {
			out = append(out, fmt.Sprintf("house %s has no purpose", h))
		}
	}
	return out
}

// TestEachPackageStatesItsPurpose: a package of a house has a comment that begins with its name.
func TestEachPackageStatesItsPurpose(t *testing.T) {
	t.Parallel()
	reportProblems(t, purposeProblems(parseModule(t)))
}

func TestPurposeRuleSeesPackagesWithoutOne(t *testing.T) {
	t.Parallel()
	const file = "internal/base/gadget/a.go"
	expectProblem(t, purposeProblems([]source{parseSource(t, file, []byte("// Package gadget counts.\npackage gadget\n"))}), "")
	expectProblem(t, purposeProblems([]source{parseSource(t, file, []byte("package gadget\n"))}), "internal/base/gadget has no comment")
	expectProblem(t, purposeProblems([]source{parseSource(t, file, []byte("// Gadgets.\npackage gadget\n"))}), "internal/base/gadget has no comment")
	expectProblem(t, purposeProblems([]source{parseSource(t, "internal/base/gadget/a_test.go", []byte("package gadget\n"))}), "")
}

// purposeProblems returns the packages below internal/ without a comment.
func purposeProblems(files []source) []string {
	has := map[string]bool{}
	for _, f := range files {
		if isWithin(f.dir, "internal") && !f.test {
			has[f.dir] = has[f.dir] || strings.HasPrefix(f.ast.Doc.Text(), "Package "+f.ast.Name.Name+" ")
		}
	}

	var out []string
	for _, dir := range slices.Sorted(maps.Keys(has)) {
		if !has[dir] {
			out = append(out, fmt.Sprintf("package %s has no comment that begins with its name", dir))
		}
	}
	return out
}

func TestTablesAreConsistent(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, f := range layers {
		for _, d := range f.dirs {
			if seen[d] || f.why == "" {
				t.Errorf("directory %s appears twice or has no reason", d)
			}
			seen[d] = true
		}
	}

	paths := map[string]bool{}
	for _, l := range libraries {
		if paths[l.path] || l.why == "" {
			t.Errorf("library %s appears twice or has no reason", l.path)
		}
		paths[l.path] = true
	}
}

// TestTablesHaveNoStaleRows: each directory of the tables has files, and each library is used in each directory that may use it.
func TestTablesHaveNoStaleRows(t *testing.T) {
	t.Parallel()
	reportProblems(t, staleRows(t, parseModule(t), layers, libraries))
}

func TestStaleRowsAreFound(t *testing.T) {
	t.Parallel()
	src := parseSource(t, "internal/a/a.go", []byte("package a\nimport _ \""+module+"/internal/b\"\nimport _ \"github.com/x/used\"\n"))
	files := []source{src, parseSource(t, "internal/b/b.go", []byte("package b\n"))}
	table := []layer{{dirs: []string{"internal/b"}}, {dirs: []string{"internal/a"}}}
	used := []library{{path: "github.com/x/used", in: []string{"internal/a"}}}

	for _, c := range []struct {
		name      string
		layers    []layer
		libraries []library
		want      string
	}{
		{"in use", table, used, ""},
		{"no directory", append(slices.Clone(table), layer{dirs: []string{"internal/c"}}), used, "directory internal/c has no files"},
		{"unused library", table, append(slices.Clone(used), library{path: "github.com/x/other"}), "library github.com/x/other is not used"},
		{"directory without the library", table, []library{{path: "github.com/x/used", in: []string{"internal/a", "internal/b"}}}, "internal/b does not use github.com/x/used"},
		{"never in no directory", table, []library{{path: "github.com/x/used", never: []string{"internal/c"}}}, "internal/c, which has no files"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			expectProblem(t, staleRows(t, files, c.layers, c.libraries), c.want)
		})
	}
}

func TestLayerRuleSeesWrongImports(t *testing.T) {
	t.Parallel()
	const engine = "internal/relay/internal/"
	for _, c := range []struct{ file, imports, want string }{
		{engine + "pipeline/a.go", engine + "resolved", ""},
		{engine + "pipeline/a.go", engine + "sink", "do not import each other"},
		{engine + "pipeline/a.go", engine + "changestream", "do not import each other"},
		{engine + "pipeline/a.go", "internal/relay/changes", ""},
		{engine + "pipeline/a_test.go", engine + "sink", ""},
		{engine + "sink/a.go", engine + "fence", ""},
		{engine + "fence/a.go", engine + "sink", "may not import"},
		{engine + "term/a.go", engine + "sink", ""},
		{engine + "sink/a.go", engine + "term", "may not import"},
		{"internal/relay/stored/letters/a.go", "internal/relay/stored/outboxes", ""},
		{"internal/relay/stored/letters/a.go", "internal/relay/process", "may not import"},
		{"internal/relay/stored/letters/a.go", "internal/operate/admin", "may not import"},
		{"internal/kafkawire/a.go", "internal/mongodb", ""},
		{"internal/mongodb/a.go", "internal/kafkawire", "may not import"},
		{"internal/base/retry/a.go", "internal/contract/record", "may not import"},
		{"internal/service/inbox/a.go", "pkg/outbox", "may not import"},
		{"internal/service/agenda/a.go", "pkg/event", ""},
		{"pkg/relay/a.go", "internal/operate/admin", "may not import"},
		{"pkg/event/a.go", "internal/contract/envelope", ""},
		{"pkg/event/a.go", "internal/service/inbox", "may not import"},
		{"resume/a.go", "internal/contract/record", "may not import"},
		{"examples/x/a.go", "pkg/outbox", ""},
		{"examples/x/a.go", "internal/base/retry", "imports only public packages"},
		{"internal/relay/process/a.go", "internal/lab/devstack/stacktest", "for tests only"},
		{"internal/relay/stored/lease/a_test.go", "internal/lab/devstack/stacktest", ""},
		{"internal/service/gadgettest/a.go", "pkg/outbox", ""},
		{"test/fault/child/a.go", "internal/lab/devstack/stacktest", ""},
		{"tools/gadgets/a.go", "internal/contract/record", "is in no layer"},
		{"internal/relay/stored/lease/a.go", "test/fault", "may not import"},
	} {
		src := fmt.Sprintf("package x\nimport _ %q\n", module+"/"+c.imports)
		expectProblem(t, layerProblems(t, []source{parseSource(t, c.file, []byte(src))}), c.want)
	}
}

func TestLibraryRuleSeesWrongImports(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ file, imports, want string }{
		{"internal/kafkawire/batch/a.go", "github.com/segmentio/kafka-go/protocol", ""},
		{"internal/relay/internal/sink/a.go", "github.com/segmentio/kafka-go", "may not use github.com/segmentio/kafka-go"},
		{"internal/relay/internal/fence/a.go", "github.com/segmentio/kafka-go/protocol", "may not use github.com/segmentio/kafka-go"},
		{"internal/relay/process/a.go", "github.com/segmentio/kafka-go", "may not use github.com/segmentio/kafka-go"},
		{"internal/relay/internal/sink/a.go", "go.mongodb.org/mongo-driver/v2/mongo/options", "may not use"},
		{"internal/relay/internal/sink/a.go", "go.mongodb.org/mongo-driver/v2/bson", ""},
		{"internal/relay/stored/lease/a.go", "github.com/anishathalye/porcupine", "for tests only"},
		{"internal/relay/stored/lease/a_test.go", "github.com/anishathalye/porcupine", ""},
		{"internal/relay/stored/lease/a.go", "github.com/example/leftpad", "is not in the table"},
		{"internal/relay/stored/lease/a.go", "log/slog", ""},
	} {
		src := fmt.Sprintf("package x\nimport _ %q\n", c.imports)
		expectProblem(t, libraryProblems(t, []source{parseSource(t, c.file, []byte(src))}), c.want)
	}
}

// layerProblems returns the imports within the module that the table of layers does not allow. Tests, and packages for tests, may import
// anything.
func layerProblems(tb testing.TB, files []source) []string {
	tb.Helper()
	var out []string
	for _, f := range files {
		from := layerIn(layers, f.dir)
		if from < 0 {
			out = append(out, fmt.Sprintf("%s: package %s is in no layer", f.path, f.dir))
			continue
		}

		for _, p := range f.importPaths(tb) {
			dir, inside := strings.CutPrefix(p, module+"/")
			if !inside || f.test || isForTests(f.dir) {
				continue
			}
			if problem := importProblem(f.dir, from, dir, layerIn(layers, dir)); problem != "" {
				out = append(out, f.path+": "+problem)
			}
		}
	}
	return out
}

// importProblem returns why the package of one directory may not import that of another one, or "".
func importProblem(dir string, from int, target string, to int) string {
	of := layers[from]
	samePackage := func() bool { return isWithin(target, packageIn(of, dir)) }
	switch {
	case to < 0:
		return fmt.Sprintf("imports %s, which is in no layer", target)
	case isForTests(target):
		return fmt.Sprintf("imports %s, which is for tests only", target)
	case to > from:
		return fmt.Sprintf("%s (%s) may not import %s, which is on a higher layer (%s)", dir, of.why, target, layers[to].why)
	case of.public && isWithin(target, "internal"):
		return fmt.Sprintf("imports %s: %s imports only public packages", target, dir)
	case to == from && of.apart && !samePackage():
		return fmt.Sprintf("imports %s: the packages of this layer do not import each other (%s)", target, of.why)
	}
	return ""
}

// packageIn returns the directory directly below that of the layer that contains dir.
func packageIn(f layer, dir string) string {
	for _, d := range f.dirs {
		if rest, ok := strings.CutPrefix(dir, d+"/"); ok {
			first, _, _ := strings.Cut(rest, "/")
			return d + "/" + first
		}
	}
	return dir
}

// isForTests reports whether a package serves tests only: its name ends with "test". pkg has such packages for users, below the programs.
func isForTests(dir string) bool {
	return strings.HasSuffix(path.Base(dir), "test") && !isWithin(dir, "test")
}

// staleRows returns the directories of the tables without files, and the libraries that nobody uses or that one of their directories does not
// use.
func staleRows(tb testing.TB, files []source, layers []layer, libraries []library) []string {
	tb.Helper()
	dirs, uses, anywhere := map[string]bool{}, map[string]map[string]bool{}, map[string]bool{}
	for _, f := range files {
		dirs[f.dir] = true
		for _, p := range f.importPaths(tb) {
			l, ok := libraryIn(libraries, p)
			if !ok {
				continue
			}
			anywhere[l.path] = true
			if uses[l.path] == nil {
				uses[l.path] = map[string]bool{}
			}
			if !f.test {
				uses[l.path][f.dir] = true
			}
		}
	}
	among := func(set map[string]bool, parent string) bool {
		for d := range set {
			if isWithin(d, parent) {
				return true
			}
		}
		return false
	}

	var out []string
	for _, f := range layers {
		for _, d := range f.dirs {
			if !among(dirs, d) {
				out = append(out, fmt.Sprintf("directory %s has no files", d))
			}
		}
	}
	for _, l := range libraries {
		if !anywhere[l.path] && (l.in == nil || len(l.in) > 0) {
			out = append(out, fmt.Sprintf("library %s is not used: delete its row", l.path))
			continue
		}
		for _, d := range l.in {
			if !among(uses[l.path], d) {
				out = append(out, fmt.Sprintf("%s does not use %s: delete it from the row", d, l.path))
			}
		}
		for _, d := range l.never {
			if !among(dirs, d) {
				out = append(out, fmt.Sprintf("library %s refers to %s, which has no files", l.path, d))
			}
		}
	}
	return out
}

// layerIn returns the index of the layer of a directory: that with the longest matching directory. It returns -1 if there is none.
func layerIn(table []layer, dir string) int {
	best, length := -1, 0
	for i, f := range table {
		for _, d := range f.dirs {
			if isWithin(dir, d) && len(d) > length {
				best, length = i, len(d)
			}
		}
	}
	return best
}

// isWithin reports whether p is parent or below it.
func isWithin(p, parent string) bool {
	return p == parent || strings.HasPrefix(p, parent+"/")
}

// libraryProblems returns the imports from other modules that the table of libraries does not allow.
func libraryProblems(tb testing.TB, files []source) []string {
	tb.Helper()
	var out []string
	for _, f := range files {
		if f.test {
			continue
		}
		within := func(d string) bool { return isWithin(f.dir, d) }
		for _, p := range f.importPaths(tb) {
			if first, _, _ := strings.Cut(p, "/"); !strings.Contains(first, ".") || isWithin(p, module) {
				continue
			}

			switch l, ok := libraryIn(libraries, p); {
			case !ok:
				out = append(out, fmt.Sprintf("%s: library %s is not in the table of libraries", f.path, p))
			case l.testsOnly:
				out = append(out, fmt.Sprintf("%s: library %s is for tests only (%s)", f.path, l.path, l.why))
			case l.in != nil && !slices.ContainsFunc(l.in, within), slices.ContainsFunc(l.never, within):
				out = append(out, fmt.Sprintf("%s: %s may not use %s (%s)", f.path, f.dir, l.path, l.why))
			}
		}
	}
	return out
}

// libraryIn returns the library of an import path: the library with the longest matching path.
func libraryIn(table []library, p string) (library, bool) {
	var best library
	for _, l := range table {
		if isWithin(p, l.path) && len(l.path) > len(best.path) {
			best = l
		}
	}
	return best, best.path != ""
}
