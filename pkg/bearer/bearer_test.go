package bearer_test

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/pkg/bearer"
)

func TestMain(m *testing.M) {
	// A test runs this program as its source of tokens.
	if text := os.Getenv("BEARER_TEST_PRINT"); text != "" {
		fmt.Fprintln(os.Stderr, "a hint for people")
		fmt.Println(text)
		if os.Getenv("BEARER_TEST_FAIL") != "" {
			os.Exit(3)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// jwt returns an unsigned token that expires after a time.
func jwt(after time.Duration) string {
	claims := fmt.Sprintf(`{"exp":%d}`, time.Now().Add(after).Unix())
	return "e30." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".c2ln"
}

func TestAFileIsReadForEachConnection(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "token")
	source := bearer.FromFile(path)
	if _, err := source(t.Context()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without a file: %v", err)
	}
	for text, want := range map[string]string{"one\n": "one", "  two  ": "two"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := source(t.Context()); got != want || err != nil {
			t.Errorf("got %q (%v), want %q", got, err, want)
		}
	}

	const secret = "planted"
	for _, text := range []string{"", "\n", secret + " x", secret + "\x01auth=", secret + `"`, strings.Repeat(secret, 10_000)} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := source(t.Context())
		if err == nil || strings.Contains(err.Error(), secret) || !strings.Contains(err.Error(), path) {
			t.Errorf("%.20q: %v", text, err)
		}
	}
}

// The test sets the environment, so it is not parallel.
func TestACommandPrintsTheToken(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	want := jwt(time.Hour)
	t.Setenv("BEARER_TEST_PRINT", want)
	source := bearer.FromCommand(self)
	if got, err := source(t.Context()); got != want || err != nil {
		t.Errorf("got %q, %v", got, err)
	}

	// It does not run again before 80 % of the lifetime.
	t.Setenv("BEARER_TEST_PRINT", "other")
	if got, err := source(t.Context()); got != want || err != nil {
		t.Errorf("a second time: got %q, %v", got, err)
	}

	t.Setenv("BEARER_TEST_FAIL", "1")
	_, err = bearer.FromCommand(self)(t.Context())
	if err == nil || !strings.Contains(err.Error(), "exit status 3: a hint for people") || strings.Contains(err.Error(), "other") {
		t.Errorf("a command that fails: %v", err)
	}
	if _, err := bearer.FromCommand(filepath.Join(t.TempDir(), "missing"))(t.Context()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a command that does not exist: %v", err)
	}
}

// server is an authorization server.
type server struct {
	*httptest.Server
	requests atomic.Int32
	response atomic.Pointer[func(w http.ResponseWriter, r *http.Request)]
}

func newServer(t *testing.T, response func(w http.ResponseWriter, r *http.Request)) *server {
	t.Helper()
	s := &server{}
	s.response.Store(&response)
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.requests.Add(1)
		w.Header().Set("Content-Type", "application/json")
		(*s.response.Load())(w, r)
	}))
	t.Cleanup(s.Close)
	return s
}

func TestClientCredentials(t *testing.T) {
	t.Parallel()
	s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		user, password, _ := r.BasicAuth()
		if user != "relay" || password != "s3cret" || r.FormValue("grant_type") != "client_credentials" || r.FormValue("scope") != "a b" || r.FormValue("audience") != "kafka" {
			w.WriteHeader(http.StatusUnauthorized)
			fmt.Fprint(w, `{"error":"invalid_client"}`)
			return
		}
		fmt.Fprint(w, `{"access_token":"opaque","token_type":"Bearer","expires_in":3600}`)
	})
	c := bearer.ClientCredentials{TokenURL: s.URL, ClientID: "relay", ClientSecret: "s3cret", Scopes: []string{"a", "b"}, Audience: "kafka"}
	source := bearer.FromClientCredentials(c)

	// Connections at the same time share one request, and later ones its token.
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			if got, err := source(t.Context()); got != "opaque" || err != nil {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
	group.Wait()
	if n := s.requests.Load(); n != 1 {
		t.Errorf("%d requests, want 1", n)
	}

	c.ClientSecret = "planted"
	_, err := bearer.FromClientCredentials(c)(t.Context())
	if err == nil || !strings.Contains(err.Error(), "401") || !strings.Contains(err.Error(), "invalid_client") || strings.Contains(err.Error(), "planted") {
		t.Errorf("a wrong secret: %v", err)
	}

	empty := func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"access_token":"a b","token_type":"Bearer"}`)
	}
	s.response.Store(&empty)
	if _, err := bearer.FromClientCredentials(c)(t.Context()); err == nil || strings.Contains(err.Error(), "a b") {
		t.Errorf("an invalid token: %v", err)
	}
	s.Close()
	if _, err := bearer.FromClientCredentials(c)(t.Context()); err == nil || strings.Contains(err.Error(), "planted") {
		t.Errorf("a server that is away: %v", err)
	}
}

// A token is renewed after 80 % of its lifetime. While that fails, it is used until it expires.
func TestATokenIsRenewedInTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		away := errors.New("away")
		var n int
		var fail bool
		source := bearer.Keep(func(context.Context) (string, time.Time, error) {
			if fail {
				return "", time.Time{}, away
			}
			n++
			return fmt.Sprint("token-", n), time.Now().Add(100 * time.Second), nil
		})

		want := func(token string, fault error) {
			t.Helper()
			if got, err := source(t.Context()); got != token || !errors.Is(err, fault) {
				t.Errorf("got %q, %v, want %q, %v", got, err, token, fault)
			}
		}
		want("token-1", nil)
		<-time.After(79 * time.Second)
		want("token-1", nil)
		<-time.After(2 * time.Second)
		want("token-2", nil)

		fail = true
		<-time.After(99 * time.Second)
		want("token-2", nil)
		<-time.After(2 * time.Second)
		want("", away)

		// The end of a connection does not end the request.
		ended, cancel := context.WithCancelCause(t.Context())
		cancel(away)
		fail = false
		if _, err := source(ended); err != nil && !errors.Is(err, away) {
			t.Error(err)
		}
		synctest.Wait()
		want("token-3", nil)
	})
}
