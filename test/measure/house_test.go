package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestHouseCountsTheProduct(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":                   "module example.com/m\n\ngo 1.26\n",
		"cmd/m/main.go":            "package main\n",
		"resume/a.go":              "package resume\n",
		"pkg/p/a.go":               "package p\n\nfunc F() {}\n",
		"internal/a/x/a.go":        "package x\n\nimport _ \"example.com/m/internal/b\"\nimport _ \"example.com/m/pkg/p\"\n\ntype one interface { F(int); G() }\ntype two interface { F(int); H() }\ntype short interface { F(int) }\n",
		"internal/a/x/a_test.go":   "package x\n\ntype fake struct{}\n\nfunc (fake) F(int) {}\nfunc (fake) G() {}\n",
		"internal/b/b.go":          "package b\n\ntype T[V any] struct{}\n\nfunc (*T[V]) F(int) {}\nfunc (T[V]) G() {}\nfunc (T[V]) H() {}\n",
		"internal/tool/sub/sub.go": "package sub\n\nimport _ \"example.com/m/internal/b\"\nimport _ \"example.com/m/pkg/p\"\n\ntype U struct{}\n\nfunc (U) F(int) {}\nfunc (U) H() {}\n",
	} {
		file := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}

	h, err := measureHouse(root, []string{"internal/tool"})
	if err != nil {
		t.Fatal(err)
	}
	if len(h.rooms()) != 3 || len(h.packages) != 3 || len(h.arrows) != 2 || len(h.public) != 1 || h.lines != 20 {
		t.Errorf("%d rooms, packages %v, arrows %v, public %v, %d lines", len(h.rooms()), h.packages, h.arrows, h.public, h.lines)
	}
	// T and the tool implement two; only T implements one, because tests do not count.
	if got := h.single(); !slices.Equal(got, []string{"internal/a/x.one"}) {
		t.Errorf("interfaces with one implementation: %q", got)
	}
}
