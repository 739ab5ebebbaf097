package arch

import (
	"go/ast"
	"go/doc"
	"go/parser"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestRenamedNamesAreInTheChangelog: a service that was written for an earlier build finds the successor of each name that does
// not exist any more. api/renamed.txt has the earlier names.
func TestRenamedNamesAreInTheChangelog(t *testing.T) {
	t.Parallel()
	now := exportedNames(t)
	earlier := earlierNames(t)
	text, err := os.ReadFile(filepath.Join("..", "..", "CHANGELOG.md"))
	if err != nil {
		t.Fatal(err)
	}
	rows := parseRenamed(string(text))

	gone := 0
	for _, id := range earlier {
		pkg, name, _ := strings.Cut(id, " ")
		typ, _, isMember := strings.Cut(name, ".")
		if slices.Contains(now[pkg], name) || isMember && !slices.Contains(now[pkg], typ) {
			continue
		}
		gone++
		if !slices.ContainsFunc(rows, func(r renamedRow) bool {
			return slices.Contains(r.packages, pkg) && slices.Contains(r.before, name)
		}) {
			t.Errorf("%s: %s is not exported any more, and no row under \"Renamed and removed names\" in CHANGELOG.md has it", pkg, name)
		}
	}
	if gone < 500 {
		t.Errorf("only %d names are gone", gone)
	}

	for _, r := range rows {
		for _, name := range r.before {
			if !slices.ContainsFunc(r.packages, func(pkg string) bool { return slices.Contains(earlier, pkg+" "+name) }) {
				t.Errorf("CHANGELOG.md: %v never exported %s", r.packages, name)
			}
		}
		for _, successor := range r.after {
			if !existsNow(now, r.packages[0], successor) {
				t.Errorf("CHANGELOG.md: the successor %s in a row of %v does not exist", successor, r.packages)
			}
		}
	}
}

// existsNow reports whether name, as a row about pkg writes it, is an exported name.
func existsNow(now map[string][]string, pkg, name string) bool {
	if slices.Contains(now[pkg], name) {
		return true
	}
	qualifier, rest, _ := strings.Cut(name, ".")
	for p, names := range now {
		if path.Base(p) == qualifier && slices.Contains(names, rest) {
			return true
		}
	}
	return false
}

// earlierNames returns the names of api/renamed.txt, as "<package> <name>".
func earlierNames(t *testing.T) (ids []string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("api", "renamed.txt"))
	if err != nil {
		t.Fatal(err)
	}

	for line := range strings.Lines(string(text)) {
		if pkg, names, ok := strings.Cut(line, ": "); ok && !strings.HasPrefix(line, "#") {
			for _, name := range strings.Fields(names) {
				ids = append(ids, pkg+" "+name)
			}
		}
	}
	return ids
}

// renamedRow is a row of the tables of renamed names in CHANGELOG.md.
type renamedRow struct {
	packages      []string // of the heading
	before, after []string
}

// The names at the beginning of a code span: Name, Type.Member, package.Name or package.Type.Member.
var (
	earlierName   = regexp.MustCompile("`([A-Z]\\w*(?:\\.[A-Z]\\w*)?)[^`]*`")
	successorName = regexp.MustCompile("`((?:[a-z]\\w*\\.)?[A-Z]\\w*(?:\\.[A-Z]\\w*)?)[^`]*`")
)

// parseRenamed returns the rows of the section with the renamed names.
func parseRenamed(changelog string) (rows []renamedRow) {
	_, section, _ := strings.Cut(changelog, "### Renamed and removed names\n")
	var packages []string
	for line := range strings.Lines(section) {
		if title, ok := strings.CutPrefix(line, "#### "); ok {
			packages = strings.Split(strings.TrimSpace(title), ", ")
			continue
		}
		if strings.HasPrefix(line, "## ") {
			break
		}

		cells := strings.Split(line, "|")
		if len(cells) != 4 || len(packages) == 0 {
			continue
		}
		row := renamedRow{packages: packages}
		for _, m := range earlierName.FindAllStringSubmatch(cells[1], -1) {
			row.before = append(row.before, m[1])
		}
		// Names in parentheses explain the successors: they are earlier names as well.
		after := regexp.MustCompile(`\([^)]*\)`).ReplaceAllString(cells[2], "")
		for _, m := range successorName.FindAllStringSubmatch(after, -1) {
			row.after = append(row.after, m[1])
		}
		if len(row.before) > 0 {
			rows = append(rows, row)
		}
	}
	return rows
}

// exportedNames returns the exported names of each public package: Name, Type.Method and Type.Field.
func exportedNames(t *testing.T) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	for _, dir := range publicPackages(t) {
		set := token.NewFileSet()
		pkg, err := doc.NewFromFiles(set, parseDir(t, set, dir, false, parser.ParseComments), dir)
		if err != nil {
			t.Fatal(err)
		}
		add := func(names ...string) { all[dir] = append(all[dir], names...) }
		members := func(typ string, list *ast.FieldList) {
			for _, field := range list.List {
				for _, name := range field.Names {
					add(typ + "." + name.Name)
				}
				if len(field.Names) == 0 {
					if embedded, ok := field.Type.(*ast.Ident); ok {
						add(typ + "." + embedded.Name)
					}
				}
			}
		}

		for _, v := range slices.Concat(pkg.Consts, pkg.Vars) {
			add(v.Names...)
		}
		for _, f := range pkg.Funcs {
			add(f.Name)
		}
		for _, typ := range pkg.Types {
			add(typ.Name)
			for _, v := range slices.Concat(typ.Consts, typ.Vars) {
				add(v.Names...)
			}
			for _, f := range typ.Funcs {
				add(f.Name)
			}
			for _, m := range typ.Methods {
				add(typ.Name + "." + m.Name)
			}
			for _, spec := range typ.Decl.Specs {
				named, ok := spec.(*ast.TypeSpec)
				if !ok || named.Name.Name != typ.Name {
					continue
				}
				switch under := named.Type.(type) {
				case *ast.StructType:
					members(typ.Name, under.Fields)
				case *ast.InterfaceType:
					members(typ.Name, under.Methods)
				}
			}
		}
	}
	return all
}

func TestARowWithoutSuccessorOrNameIsFound(t *testing.T) {
	t.Parallel()
	rows := parseRenamed("### Renamed and removed names\n\n#### pkg/a, pkg/b\n\n| before | after |\n|---|---|\n| `Old(x)`, `T.M` | `new.Name(y)` (`Old`), `F` |\n")
	if len(rows) != 1 || !slices.Equal(rows[0].before, []string{"Old", "T.M"}) || !slices.Equal(rows[0].after, []string{"new.Name", "F"}) {
		t.Fatalf("got %+v", rows)
	}
	now := map[string][]string{"pkg/a": {"F"}, "pkg/new": {"Name"}}
	if !existsNow(now, "pkg/a", "F") || !existsNow(now, "pkg/a", "new.Name") || existsNow(now, "pkg/a", "new.F") || existsNow(now, "pkg/a", "Name") {
		t.Error("existsNow gives a wrong answer")
	}
}
