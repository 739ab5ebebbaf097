package httpapi

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// A proxy may pass the prefix on or remove it. In both cases, a person logs in, and redirects lead below the prefix.
func TestAPrefixIsPassedOnOrRemoved(t *testing.T) {
	t.Parallel()
	s := openSite(t, withForm(nil, time.Hour), func(options *AdminOptions) { options.Prefix = "/ops" })
	if status, to, _ := s.newBrowser().send("/ops", nil); status != http.StatusSeeOther || to != "/ops/" {
		t.Errorf("the prefix without a slash: %d to %s", status, to)
	}
	for _, prefix := range []string{"/ops", ""} {
		b := s.newBrowser()
		if status, to, _ := b.send(prefix+"/dead?key=1", nil); status != http.StatusSeeOther || to != "/ops/login?next=%2Fdead%3Fkey%3D1" {
			t.Errorf("%q, without a login: %d to %s", prefix, status, to)
		}
		if status, _, body := b.send(prefix+"/static/app.css", nil); status != http.StatusOK || body != "no caller at /static/app.css" {
			t.Errorf("%q, a file of the form: %d %s", prefix, status, body)
		}
		b.url += prefix
		if status, to := b.logIn("ann", operatorToken); status != http.StatusSeeOther || to != "/ops/dead?key=1" {
			t.Errorf("%q, the login: %d to %s", prefix, status, to)
		}
		if status, _, body := b.send("/dead", nil); status != http.StatusOK || body != "ann page/session operator" {
			t.Errorf("%q, after the login: %d %s", prefix, status, body)
		}
		if status, to, _ := b.send("/logout", map[string][]string{}); status != http.StatusSeeOther || to != "/ops/login" {
			t.Errorf("%q, the logout: %d to %s", prefix, status, to)
		}

		var document struct{ Servers []struct{ URL string } }
		s.mustCall(&document, http.MethodGet, prefix+"/api/openapi.json", "")
		if len(document.Servers) != 1 || document.Servers[0].URL != "/ops" {
			t.Errorf("%q: servers of the description: got %v, want /ops", prefix, document.Servers)
		}
	}
}

// A service decides who uses a mounted page. No token and no session count then, and a caller without a role is rejected.
func TestTheServiceAuthorizesCallers(t *testing.T) {
	t.Parallel()
	handler := NewHandler(AdminOptions{
		Log: discard(),
		Access: Access{
			Tokens: func() Tokens { return Tokens{operatorToken, viewerToken} },
			Rate:   100,
			Identify: func(request *http.Request) (admin.Caller, error) {
				name, role, known := strings.Cut(request.Header.Get("X-User"), ":")
				if !known {
					return admin.Caller{}, errors.New("log in to the shop first")
				}
				return admin.Caller{Actor: admin.Actor{Name: name}, Role: role}, nil
			},
		},
		Page: http.HandlerFunc(func(response http.ResponseWriter, request *http.Request) {
			caller, _ := admin.CallerOf(request.Context())
			_, _ = io.WriteString(response, caller.Actor.Name+" "+caller.Actor.Source+" "+caller.Role)
		}),
	})

	for _, c := range []struct {
		user   string
		status int
		body   string
	}{
		{"ann:operator", http.StatusOK, "ann page/service operator"},
		{"bob:viewer", http.StatusOK, "bob page/service viewer"},
		{"", http.StatusForbidden, "log in to the shop first"},
		{"eve:root", http.StatusForbidden, "must be viewer or operator"},
		{":operator", http.StatusForbidden, "the name of the caller is empty"},
	} {
		request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/dead", nil)
		request.Header.Set("X-User", c.user)
		request.Header.Set("Authorization", "Bearer "+operatorToken)
		recorder := httptest.NewRecorder()
		handler.ServeHTTP(recorder, request)
		if recorder.Code != c.status || !strings.Contains(recorder.Body.String(), c.body) {
			t.Errorf("%q: got %d %s, want %d %s", c.user, recorder.Code, recorder.Body, c.status, c.body)
		}
	}
}
