package readable

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestVariablesOfOneLetter(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	const text = `package a

import "testing"

func (r *receiver) f(t *testing.T, a, long int) (b bool, err error) {
	x, name, ok := 1, 2, true
	for c := 0; c < 3; c++ {
		var d int
		_ = func(e int) {}
	}
	for k, v := range list {
	}
	return
}
`
	if err := os.WriteFile(filepath.Join(dir, "a.go"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	m := New()
	if err := m.AddTree(dir, false); err != nil {
		t.Fatal(err)
	}

	// Locals: x, name, d. Parameters and results: a, long, b, e.
	if m.locals != 3 || m.oneLetterLocals != 2 {
		t.Errorf("%d locals, %d of one letter", m.locals, m.oneLetterLocals)
	}
	if m.parameters != 4 || m.oneLetterParameters != 3 {
		t.Errorf("%d parameters, %d of one letter", m.parameters, m.oneLetterParameters)
	}
}

func TestBareBooleanArguments(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	const text = `package a

type store interface{ read(name string, all bool) }

type hooks struct{ report func(on bool, n int) }

func load[T any](value T, again bool) {}

func call(s store, h hooks) {
	closed := func(name string, wait bool) {}
	s.read("a", true)
	h.report(false, 1)
	load[int](1, false)
	closed("a", true)
	join(true)
	other.Set("a", true)
	IfNull("a", false)
	s.read("a", all)
}

func join(begun bool) {}

func IfNull(field string, value any) {}
`
	if err := os.WriteFile(filepath.Join(dir, "a.go"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	m := New()
	if err := m.AddTree(dir, false); err != nil {
		t.Fatal(err)
	}

	// Not join, which has one argument, not other.Set, which the files do not declare, and not IfNull, whose argument is data.
	got := m.BareBooleans()
	for i, want := range []string{"a.go:11: bare boolean argument: read", "a.go:12: bare boolean argument: report", "a.go:13: bare boolean argument: load", "a.go:14: bare boolean argument: closed"} {
		if len(got) != 4 || !strings.HasSuffix(got[i], want) {
			t.Fatalf("%q, want %q at %d", got, want, i)
		}
	}
}

func TestMarkdownThatPeopleWrite(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for path, text := range map[string]string{"README.md": "12345", "docs/a.md": "1<!-- generated: a -->\n| b |\n<!-- end -->23", "docs/cli.md": "generated", "docs/a.txt": "text"} {
		file := filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}

	sizes, err := Markdown(dir)
	if err != nil || len(sizes) != 2 || sizes["README.md"] != 5 || sizes["docs/a.md"] != 3 {
		t.Errorf("%v, %v", sizes, err)
	}
}
