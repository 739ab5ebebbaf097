package httpapi

import (
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// A request to a former path is rejected with the path or command that replaces it.
func TestAFormerPathNamesItsSuccessor(t *testing.T) {
	t.Parallel()
	served := newAPI(admin.Operator{}, "")
	for _, c := range []struct{ method, path, want string }{
		{"GET", "/api/v1/events?limit=1", "call /api/v1/audit, which replaces it"},
		{"POST", "/api/v1/events/trim", "call /api/v1/audit/trim, which replaces it"},
		{"GET", "/api/v1/failed", "call /api/v1/waiting?failed=true, which replaces it"},
		{"GET", "/api/v1/health", "call /api/v1/problems, which replaces it"},
		{"GET", "/api/v1/indexes", "run `outrelay doctor`"},
		{"POST", "/api/v1/indexes/rebuild", "run `outrelay setup`"},
		{"GET", "/api/v1/migrations", "run `outrelay setup`"},
		{"GET", "/api/v1/pending", "call /api/v1/waiting/topics, which replaces it"},
		{"POST", "/api/v1/recover/adopt", "call /api/v1/recover/accept-copy, which replaces it"},
		{"GET", "/api/v1/nothing", "/api/openapi.json lists the paths"},
	} {
		response := httptest.NewRecorder()
		served.ServeHTTP(response, httptest.NewRequestWithContext(t.Context(), c.method, c.path, nil))

		if response.Code != 404 || !strings.Contains(response.Body.String(), `"fix":"`+c.want) {
			t.Errorf("%s %s: %d %s, want %s", c.method, c.path, response.Code, response.Body, c.want)
		}
	}
}
