//go:build unix

package integration

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

// listener is the operators' listener of a process.
type listener struct {
	t       *testing.T
	address string
	client  *http.Client
}

// findOperators returns the operators' listener of p. It waits until the log names its address.
func findOperators(t *testing.T, p *kit.Process) *listener {
	t.Helper()
	_, address, _ := strings.Cut(p.WaitForLog("operator's page and API are served"), "address")
	address = "http://" + strings.TrimSpace(strings.SplitN(strings.Trim(address, `=": `), "\"", 2)[0])
	l := &listener{t, address, &http.Client{
		Timeout:       kit.Patience,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	t.Cleanup(l.client.CloseIdleConnections)
	return l
}

func (l *listener) send(req *http.Request) (*http.Response, string) {
	l.t.Helper()
	res, err := l.client.Do(req)
	if err != nil {
		l.t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		l.t.Fatal(err)
	}
	return res, string(text)
}

func (l *listener) get(path, token string) (code int, body string) {
	l.t.Helper()
	req, err := http.NewRequestWithContext(l.t.Context(), http.MethodGet, l.address+path, nil)
	if err != nil {
		l.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	res, body := l.send(req)
	return res.StatusCode, body
}

// login sends the form of the page and returns the cookie of the session, or nil.
func (l *listener) login(token string) *http.Cookie {
	l.t.Helper()

	form := url.Values{"name": {"ann"}, "token": {token}}
	req, err := http.NewRequestWithContext(l.t.Context(), http.MethodPost, l.address+"/login", strings.NewReader(form.Encode()))
	if err != nil {
		l.t.Fatal(err)
	}

	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	req.Header.Set("Origin", l.address)
	res, _ := l.send(req)

	for _, c := range res.Cookies() {
		if c.Value != "" {
			return c
		}
	}
	return nil
}

// getWithSession returns the response to a request of a browser.
func (l *listener) getWithSession(path string, session *http.Cookie) *http.Response {
	l.t.Helper()
	req, err := http.NewRequestWithContext(l.t.Context(), http.MethodGet, l.address+path, nil)
	if err != nil {
		l.t.Fatal(err)
	}
	req.AddCookie(session)
	res, _ := l.send(req)
	return res
}

// The operators' token is a file that is replaced while the relay runs. After SIGHUP, the new token counts, the old token and its
// sessions do not, the relay is still the same owner, and each rejected login is counted.
func TestOperatorTokensAreReplacedWhileARelayRuns(t *testing.T) {
	t.Parallel()
	const first, second = "the-first-token-of-the-test", "the-second-token-of-the-test"
	file := filepath.Join(t.TempDir(), "token")
	write := func(token string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(token+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(first)

	s := kit.New(t, kit.Options{Set: map[string]any{"http.admin": map[string]any{"listen": "127.0.0.1:0", "token": "${file:" + file + "}"}}})
	p := s.StartRelay()
	p.WaitTookOver()
	l, epoch := findOperators(t, p), s.ReadStatus().Epoch
	rejected := func(n int) {
		t.Helper()
		if _, metrics := p.Get("/metrics"); !strings.Contains(metrics, fmt.Sprintf("outrelay_admin_rejected_total{reason=\"login\"} %d\n", n)) {
			t.Errorf("the metrics do not count %d rejected logins", n)
		}
	}

	rejected(0)
	session := l.login(first)
	if session == nil {
		t.Fatal("no session for the first token")
	}
	if code, _ := l.get("/api/v1/whoami", first); code != http.StatusOK {
		t.Errorf("the first token: %d", code)
	}
	if code, _ := l.get("/api/v1/whoami", second); code != http.StatusUnauthorized {
		t.Errorf("the second token before the reload: %d", code)
	}
	if l.login(second) != nil {
		t.Error("a session for an unknown token")
	}
	rejected(2)

	write(second)
	p.Reload()
	stacktest.Eventually(t, "the new token counts", func() bool {
		code, _ := l.get("/api/v1/whoami", second)
		return code == http.StatusOK
	})
	if code, _ := l.get("/api/v1/whoami", first); code != http.StatusUnauthorized {
		t.Errorf("the first token after the reload: %d", code)
	}
	if res := l.getWithSession("/", session); res.StatusCode == http.StatusOK {
		t.Error("a session of the first token is valid after the reload")
	}
	if session := l.login(second); session == nil || l.getWithSession("/", session).StatusCode != http.StatusOK {
		t.Error("no session for the second token")
	}
	if now := s.ReadStatus().Epoch; now != epoch || p.HasLogged(second) || p.HasLogged(first) {
		t.Errorf("epoch %d, want %d; or a token is in the log", now, epoch)
	}
}
