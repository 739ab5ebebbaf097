package httpapi

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/test/generated"
)

func describeAPI(t *testing.T) []byte {
	t.Helper()
	raw, err := newOperations(http.NewServeMux(), admin.Operator{}, "").OpenAPI().MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := json.Indent(&out, raw, "", "  "); err != nil {
		t.Fatal(err)
	}
	out.WriteByte('\n')
	return out.Bytes()
}

func TestOpenAPIFileIsCurrent(t *testing.T) {
	t.Parallel()
	generated.Check(t, "docs/openapi.json", string(describeAPI(t)))
}

// TestLimitsOfListsAreThoseOfTheUseCases: tags repeat the bounds of a page, because they can only be literals.
func TestLimitsOfListsAreThoseOfTheUseCases(t *testing.T) {
	t.Parallel()
	var doc any
	if err := json.Unmarshal(describeAPI(t), &doc); err != nil {
		t.Fatal(err)
	}

	found := 0
	var visit func(path string, node any)
	visit = func(path string, node any) {
		switch n := node.(type) {
		case []any:
			for i, child := range n {
				visit(fmt.Sprintf("%s/%d", path, i), child)
			}
		case map[string]any:
			schema, _ := n["schema"].(map[string]any)
			if n["name"] != "limit" {
				schema, _ = n["limit"].(map[string]any)
			}
			if schema != nil {
				found++
				most := schema["maximum"]
				if schema["default"] != float64(admin.DefaultPage) || most != float64(admin.MaxPage) && most != float64(admin.DefaultPage) {
					t.Errorf("%s: %v, want default %d, maximum %d", path, schema, admin.DefaultPage, admin.MaxPage)
				}
			}
			for name, child := range n {
				visit(path+"/"+name, child)
			}
		}
	}
	visit("", doc)

	if found < 5 {
		t.Errorf("found %d limits in the description", found)
	}
}

func TestEveryOperationNamesItsRoleAndHintsAtItsErrors(t *testing.T) {
	t.Parallel()
	doc := readSpec(t)
	if doc.OpenAPI != "3.1.0" {
		t.Errorf("version %s", doc.OpenAPI)
	}

	n := 0
	for path, item := range doc.Paths {
		for method, op := range item {
			n++
			if op.Summary == "" || op.OperationID == "" || !strings.HasPrefix(path, "/api/v1/") {
				t.Errorf("%s %s has no summary, no id or another path", method, path)
			}
			if want := wantedRole(method, path); op.Role != want {
				t.Errorf("%s %s: role %q, want %q", method, path, op.Role, want)
			}
			if _, ok := op.Responses["422"]; !ok && method != "get" {
				t.Errorf("%s %s names no problem", method, path)
			}
		}
	}
	if n < 50 {
		t.Errorf("%d operations", n)
	}
	if p := doc.Components.Schemas["ErrorBody"]; p == nil || p.Properties["fix"] == nil {
		t.Errorf("problems have no fix: %+v", p)
	}
}

// wantedRole returns the role that an operation must require: every role may read, and only operators may change something.
func wantedRole(method, path string) string {
	reads := []string{"/api/v1/dead/search", "/api/v1/replays/plan"}
	if method == "get" || slices.Contains(reads, path) {
		return "viewer"
	}
	return "operator"
}

// routes is a router that records the registered routes.
type routes struct {
	*http.ServeMux
	patterns []string
}

func (r *routes) HandleFunc(pattern string, handler func(http.ResponseWriter, *http.Request)) {
	r.patterns = append(r.patterns, pattern)
	r.ServeMux.HandleFunc(pattern, handler)
}

// Tests that try every operation take the list from the description: no route of the router may be missing there.
func TestEveryRouteIsDescribed(t *testing.T) {
	t.Parallel()
	r := &routes{ServeMux: http.NewServeMux()}
	newOperations(r, admin.Operator{}, "")
	doc := readSpec(t)
	for _, pattern := range r.patterns {
		method, path, _ := strings.Cut(pattern, " ")
		switch _, described := doc.Paths[path][strings.ToLower(method)]; {
		case described, strings.HasPrefix(path, "/api/openapi"):
		default:
			t.Errorf("%q is not in the description", pattern)
		}
	}

	if len(r.patterns) < 50 {
		t.Errorf("%d routes", len(r.patterns))
	}
}
