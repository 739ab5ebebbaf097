package arch

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestImportsFollowTheLayers(t *testing.T) {
	t.Parallel()
	reportProblems(t, layerProblems(t, parseModule(t)))
}

func TestLibrariesStayInTheirRooms(t *testing.T) {
	t.Parallel()
	reportProblems(t, libraryProblems(t, parseModule(t)))
}

func TestTablesAreConsistent(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, r := range rooms {
		if seen[r.dir] || r.why == "" {
			t.Errorf("room %s appears twice or has no reason", r.dir)
		}
		seen[r.dir] = true
	}

	for _, r := range rooms {
		for _, d := range slices.Concat(r.also, r.only) {
			if !seen[d] {
				t.Errorf("room %s refers to %s, which is not a room", r.dir, d)
			}
		}
	}

	paths := map[string]bool{}
	for _, l := range libraries {
		if paths[l.path] || l.why == "" {
			t.Errorf("library %s appears twice or has no reason", l.path)
		}
		paths[l.path] = true
		for _, d := range slices.Concat(l.in, l.never) {
			if !seen[d] {
				t.Errorf("library %s refers to %s, which is not a room", l.path, d)
			}
		}
	}
}

// TestTablesHaveNoStaleRows: each room is a directory, uses each room that it alone may use, and each library is used by each room that may
// use it.
func TestTablesHaveNoStaleRows(t *testing.T) {
	t.Parallel()
	reportProblems(t, staleRows(t, parseModule(t), rooms, libraries))
}

func TestStaleRowsAreFound(t *testing.T) {
	t.Parallel()
	src := parseSource(t, "internal/a/a.go", []byte("package a\nimport _ \""+module+"/internal/b\"\nimport _ \"github.com/x/used\"\n"))
	files := []source{src, parseSource(t, "internal/b/b.go", []byte("package b\n"))}
	table := []room{{dir: "internal/a", layer: 1}, {dir: "internal/b", only: []string{}}}
	used := []library{{path: "github.com/x/used", in: []string{"internal/a"}}}

	for _, c := range []struct {
		name      string
		rooms     []room
		libraries []library
		want      string
	}{
		{"in use", table, used, ""},
		{"no directory", append(slices.Clone(table), room{dir: "internal/c"}), used, "room internal/c has no files"},
		{"unused room", []room{table[1], {dir: "internal/a", also: []string{"internal/b", "internal/c"}}}, used, "room internal/a does not import internal/c"},
		{"unused library", table, append(slices.Clone(used), library{path: "github.com/x/other"}), "library github.com/x/other is not used"},
		{"room without the library", table, []library{{path: "github.com/x/used", in: []string{"internal/a", "internal/b"}}}, "internal/b does not use github.com/x/used"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			expectProblem(t, staleRows(t, files, c.rooms, c.libraries), c.want)
		})
	}
}

func TestLayerRuleSeesWrongImports(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ file, imports, want string }{
		{"internal/pipeline/a.go", "internal/watermark", ""},
		{"internal/pipeline/a.go", "internal/sink", "may not import internal/sink"},
		{"internal/pipeline/a_test.go", "internal/sink", ""},
		{"internal/fence/a.go", "internal/kafkawire/batch", ""},
		{"internal/sink/a.go", "internal/fence", ""},
		{"internal/kafkawire/a.go", "internal/sink", "may not import internal/sink"},
		{"internal/fence/a.go", "internal/sink", "may not import internal/sink"},
		{"internal/lease/a.go", "internal/process", "may not import internal/process"},
		{"internal/lease/a.go", "internal/outboxes", "may not import internal/outboxes"},
		{"internal/letters/a.go", "internal/outboxes", ""},
		{"internal/process/a.go", "internal/devstack/stacktest", "for tests only"},
		{"internal/lease/a_test.go", "internal/devstack/stacktest", ""},
		{"test/fault/child/a.go", "internal/devstack/stacktest", ""},
		{"pkg/event/a.go", "internal/envelope", ""},
		{"pkg/event/a.go", "internal/metrics", "may not import internal/metrics"},
		{"resume/a.go", "internal/record", "may not import internal/record"},
		{"internal/gadgets/a.go", "internal/record", "has no room"},
		{"internal/lease/a.go", "test/fault", "may not import test/fault"},
	} {
		src := fmt.Sprintf("package x\nimport _ %q\n", module+"/"+c.imports)
		expectProblem(t, layerProblems(t, []source{parseSource(t, c.file, []byte(src))}), c.want)
	}
}

func TestLibraryRuleSeesWrongImports(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ file, imports, want string }{
		{"internal/kafkawire/batch/a.go", "github.com/segmentio/kafka-go/protocol", ""},
		{"internal/sink/a.go", "github.com/segmentio/kafka-go", "may not use github.com/segmentio/kafka-go"},
		{"internal/fence/a.go", "github.com/segmentio/kafka-go/protocol", "may not use github.com/segmentio/kafka-go"},
		{"internal/process/a.go", "github.com/segmentio/kafka-go", "may not use github.com/segmentio/kafka-go"},
		{"internal/sink/a.go", "go.mongodb.org/mongo-driver/v2/mongo/options", "may not use"},
		{"internal/sink/a.go", "go.mongodb.org/mongo-driver/v2/bson", ""},
		{"internal/lease/a.go", "github.com/anishathalye/porcupine", "for tests only"},
		{"internal/lease/a_test.go", "github.com/anishathalye/porcupine", ""},
		{"internal/lease/a.go", "github.com/example/leftpad", "is not in the table"},
		{"internal/lease/a.go", "log/slog", ""},
	} {
		src := fmt.Sprintf("package x\nimport _ %q\n", c.imports)
		expectProblem(t, libraryProblems(t, []source{parseSource(t, c.file, []byte(src))}), c.want)
	}
}

// layerProblems returns the imports within the module that the table of layers does not allow. Tests
// may import anything.
func layerProblems(tb testing.TB, files []source) []string {
	tb.Helper()
	var out []string
	for _, f := range files {
		from, ok := roomOf(f.dir)
		if !ok {
			out = append(out, fmt.Sprintf("%s: package %s has no room in the table of layers", f.path, f.dir))
			continue
		}

		for _, p := range f.importPaths(tb) {
			dir, inside := strings.CutPrefix(p, module+"/")
			if !inside || f.test {
				continue
			}

			to, ok := roomOf(dir)
			switch {
			case !ok:
				out = append(out, fmt.Sprintf("%s: imports %s, which has no room in the table of layers", f.path, dir))
			case to.testsOnly && !from.testsOnly:
				out = append(out, fmt.Sprintf("%s: imports %s, which is for tests only", f.path, dir))
			case !mayImport(from, to):
				out = append(out, fmt.Sprintf("%s: %s (layer %d: %s) may not import %s (layer %d)", f.path, from.dir, from.layer, from.why, dir, to.layer))
			}
		}
	}
	return out
}

// staleRows returns the rooms without files, the rooms that a room may import and does not, and the libraries that nobody uses or that one of
// their rooms does not use.
func staleRows(tb testing.TB, files []source, rooms []room, libraries []library) []string {
	tb.Helper()
	filled, uses, anywhere := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, f := range files {
		from, _ := roomIn(rooms, f.dir)
		filled[from.dir] = true
		for _, p := range f.importPaths(tb) {
			if dir, inside := strings.CutPrefix(p, module+"/"); inside {
				if to, _ := roomIn(rooms, dir); !f.test {
					uses[from.dir+" "+to.dir] = true
				}
				continue
			}

			l, _ := libraryIn(libraries, p)
			anywhere[l.path] = true
			if !f.test {
				uses[from.dir+" "+l.path] = true
			}
		}
	}

	var out []string
	for _, r := range rooms {
		if !filled[r.dir] {
			out = append(out, fmt.Sprintf("room %s has no files", r.dir))
			continue
		}
		for _, to := range slices.Concat(r.also, r.only) {
			if !uses[r.dir+" "+to] {
				out = append(out, fmt.Sprintf("room %s does not import %s: delete it from its row", r.dir, to))
			}
		}
	}
	for _, l := range libraries {
		if !anywhere[l.path] && (l.in == nil || len(l.in) > 0) {
			out = append(out, fmt.Sprintf("library %s is not used: delete its row", l.path))
			continue
		}
		for _, dir := range l.in {
			if !uses[dir+" "+l.path] {
				out = append(out, fmt.Sprintf("%s does not use %s: delete it from the row", dir, l.path))
			}
		}
	}
	return out
}

// mayImport reports whether the room from may import the room to.
func mayImport(from, to room) bool {
	switch {
	case from.dir == to.dir || slices.Contains(from.also, to.dir):
		return true
	case from.only != nil:
		return slices.Contains(from.only, to.dir)
	}
	return to.layer < from.layer
}

// roomOf returns the room of a directory: the room with the longest matching name.
func roomOf(dir string) (room, bool) { return roomIn(rooms, dir) }

func roomIn(table []room, dir string) (room, bool) {
	var best room
	for _, r := range table {
		if isWithin(dir, r.dir) && len(r.dir) > len(best.dir) {
			best = r
		}
	}
	return best, best.dir != ""
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
		at, _ := roomOf(f.dir)
		for _, p := range f.importPaths(tb) {
			if first, _, _ := strings.Cut(p, "/"); !strings.Contains(first, ".") || isWithin(p, module) {
				continue
			}

			switch l, ok := libraryOf(p); {
			case !ok:
				out = append(out, fmt.Sprintf("%s: library %s is not in the table of libraries", f.path, p))
			case l.testsOnly:
				out = append(out, fmt.Sprintf("%s: library %s is for tests only (%s)", f.path, l.path, l.why))
			case l.in != nil && !slices.Contains(l.in, at.dir), slices.Contains(l.never, at.dir):
				out = append(out, fmt.Sprintf("%s: %s may not use %s (%s)", f.path, at.dir, l.path, l.why))
			}
		}
	}
	return out
}

// libraryOf returns the library of an import path: the library with the longest matching path.
func libraryOf(p string) (library, bool) { return libraryIn(libraries, p) }

func libraryIn(table []library, p string) (library, bool) {
	var best library
	for _, l := range table {
		if isWithin(p, l.path) && len(l.path) > len(best.path) {
			best = l
		}
	}
	return best, best.path != ""
}
