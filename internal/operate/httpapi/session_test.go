package httpapi

import (
	"crypto/hmac"
	"crypto/pbkdf2"
	"crypto/sha256"
	"encoding/base64"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// browser is a client with cookies that does not follow redirects.
type browser struct {
	t    *testing.T
	url  string
	http *http.Client
}

func (s *site) newBrowser() *browser {
	s.t.Helper()
	jar, err := cookiejar.New(nil)
	if err != nil {
		s.t.Fatal(err)
	}
	return &browser{s.t, s.url, &http.Client{
		Jar: jar, Transport: s.client.Transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// send sends a form, or without one a GET, and returns the status, the address of a redirect and the body.
func (b *browser) send(path string, form url.Values, headers ...string) (status int, to, body string) {
	b.t.Helper()
	method, content := http.MethodGet, ""
	if form != nil {
		method, content = http.MethodPost, form.Encode()
	}

	r, err := http.NewRequestWithContext(b.t.Context(), method, b.url+path, strings.NewReader(content))
	if err != nil {
		b.t.Fatal(err)
	}

	r.Header.Set("Accept", "text/html,application/xhtml+xml")
	if form != nil {
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}

	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}

	res, err := b.http.Do(r)
	if err != nil {
		b.t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		b.t.Fatal(err)
	}

	return res.StatusCode, res.Header.Get("Location"), string(text)
}

func (b *browser) logIn(name, token string) (status int, to string) {
	b.t.Helper()
	status, to, _ = b.send("/login?next=%2Fdead%3Fkey%3D1", url.Values{"name": {name}, "token": {token}})
	return status, to
}

// withForm adds a page and the form of its login. tokens are the current ones.
func withForm(tokens *atomic.Pointer[Tokens], session time.Duration) func(*AdminOptions) {
	return func(o *AdminOptions) {
		o.Access.Session = session
		if tokens != nil {
			o.Access.Tokens = func() Tokens { return *tokens.Load() }
		}

		o.LoginForm = func(w http.ResponseWriter, _ *http.Request, status int, problem, next string) {
			w.WriteHeader(status)
			_, _ = io.WriteString(w, "form "+problem+" "+next)
		}

		o.Page = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			caller, known := admin.CallerOf(r.Context())
			if !known {
				_, _ = io.WriteString(w, "no caller at "+r.URL.Path)
				return
			}
			_, _ = io.WriteString(w, caller.Actor.Name+" "+caller.Actor.Source+" "+caller.Role)
		})
	}
}

func TestAPersonLogsInAndOut(t *testing.T) {
	t.Parallel()
	s := openSite(t, withForm(nil, time.Hour))
	b := s.newBrowser()
	if status, to, _ := b.send("/dead?key=1", nil); status != http.StatusSeeOther || to != "/login?next=%2Fdead%3Fkey%3D1" {
		t.Errorf("without a login: %d to %s", status, to)
	}
	if status, _, body := b.send("/static/app.css", nil); status != http.StatusOK || body != "no caller at /static/app.css" {
		t.Errorf("a file of the form: %d %s", status, body)
	}
	if status, _, body := b.send("/login?next=%2Fdead", nil); status != http.StatusOK || body != "form  /dead" {
		t.Errorf("the form: %d %s", status, body)
	}

	for name, form := range map[string]url.Values{
		"a wrong token": {"name": {"ann"}, "token": {"guessed-token-1"}}, "no name": {"name": {" "}, "token": {operatorToken}},
		"a control character": {"name": {"a\x07"}, "token": {operatorToken}}, "nothing": {},
	} {
		if status, to, body := b.send("/login", form); status < 400 || to != "" || !strings.HasPrefix(body, "form ") || strings.Contains(body, operatorToken) {
			t.Errorf("%s: %d to %s: %s", name, status, to, body)
		}
	}

	if status, to := b.logIn("ann", operatorToken); status != http.StatusSeeOther || to != "/dead?key=1" {
		t.Fatalf("login: %d to %s", status, to)
	}
	if _, _, body := b.send("/dead?key=1", nil); body != "ann page/session operator" {
		t.Errorf("after the login: %s", body)
	}
	if status, _, body := b.send("/dead", url.Values{}, "Origin", "https://evil.example", "Sec-Fetch-Site", "cross-site"); status != http.StatusForbidden {
		t.Errorf("a page of another origin: %d %s", status, body)
	}

	if status, to, _ := b.send("/logout", url.Values{}); status != http.StatusSeeOther || to != "/login" {
		t.Errorf("logout: %d to %s", status, to)
	}
	if status, _, _ := b.send("/dead", nil); status != http.StatusSeeOther {
		t.Errorf("after the logout: %d", status)
	}
	if status, _, _ := b.send("/logout", nil); status != http.StatusMethodNotAllowed {
		t.Errorf("a link to the logout: %d", status)
	}
}

// The form opens only pages of this listener.
func TestTheLoginLeadsNowhereElse(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"/dead?key=1": "/dead?key=1", "": "/", "//evil.example": "/", "https://evil.example": "/", "/\\evil.example": "/", "dead": "/",
		"/login": "/", "/logout": "/", "javascript:alert(1)": "/", "/a\tb": "/", "/%2Fevil.example": "/%2Fevil.example",
	} {
		if got := localPath(text); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}

// A session ends after its time and when the token changes, without a restart. No client can change its role or its
// time.
func TestASessionEnds(t *testing.T) {
	t.Parallel()
	var tokens atomic.Pointer[Tokens]
	tokens.Store(&Tokens{operatorToken, viewerToken})
	s := openSite(t, withForm(&tokens, time.Hour))
	b := s.newBrowser()
	if status, _ := b.logIn("vera", viewerToken); status != http.StatusSeeOther {
		t.Fatal(status)
	}
	if _, _, body := b.send("/", nil); body != "vera page/session viewer" {
		t.Errorf("a viewer: %s", body)
	}

	tokens.Store(&Tokens{operatorToken, "another-viewer-token"})
	if status, _, _ := b.send("/", nil); status != http.StatusSeeOther {
		t.Errorf("after a change of the token: %d", status)
	}
	if status, _ := b.logIn("vera", viewerToken); status != http.StatusUnauthorized {
		t.Errorf("with the old token: %d", status)
	}
	if status, _ := b.logIn("vera", "another-viewer-token"); status != http.StatusSeeOther {
		t.Errorf("with the new token: %d", status)
	}

	now := time.Now()
	old, other := Tokens{operatorToken, viewerToken}, Tokens{operatorToken, ""}
	valid := session{"ann", admin.RoleViewer, now.Add(time.Minute).Unix()}
	forged := session{"ann", admin.RoleOperator, now.Add(time.Minute).Unix()}
	claims, _, _ := strings.Cut(forged.sign(old), ".")
	_, signed, _ := strings.Cut(valid.sign(old), ".")
	for name, c := range map[string]struct {
		cookie string
		tokens Tokens
		at     time.Time
		ok     bool
	}{
		"valid":              {valid.sign(old), old, now, true},
		"over":               {valid.sign(old), old, now.Add(2 * time.Minute), false},
		"another role":       {claims + "." + signed, old, now, false},
		"no token":           {session{"ann", admin.RoleViewer, now.Add(time.Minute).Unix()}.sign(other), other, now, false},
		"no role":            {session{"ann", "", now.Add(time.Minute).Unix()}.sign(old), old, now, false},
		"nothing":            {"", old, now, false},
		"without signature":  {claims, old, now, false},
		"an empty signature": {claims + ".", old, now, false},
	} {
		if s, ok, forged := readSession(c.cookie, c.tokens, c.at); ok != c.ok || forged == (ok || name == "over") {
			t.Errorf("%s: got %+v, %t", name, s, ok)
		}
	}
}

// A stolen cookie lets its thief check guesses at the token without the listener. Each guess costs as much as a hash of a password.
func TestAStolenSessionIsOfLittleUseToGuessItsToken(t *testing.T) {
	t.Parallel()
	cookie := session{"ann", admin.RoleViewer, time.Now().Add(time.Minute).Unix()}.sign(Tokens{operatorToken, viewerToken})
	claims, signed, _ := strings.Cut(cookie, ".")
	isSignedBy := func(key []byte) bool {
		mac := hmac.New(sha256.New, key)
		mac.Write([]byte(claims))
		return base64.RawURLEncoding.EncodeToString(mac.Sum(nil)) == signed
	}

	hash := sha256.Sum256([]byte(viewerToken))
	for name, cheap := range map[string][]byte{"the token": []byte(viewerToken), "its hash": hash[:]} {
		if isSignedBy(cheap) {
			t.Errorf("%s signs the session", name)
		}
	}

	// The recommendation of OWASP for PBKDF2 with SHA-256. A node with another number would reject the sessions of the others.
	key, err := pbkdf2.Key(sha256.New, viewerToken, []byte("outrelay session"), 600_000, sha256.Size)
	if err != nil || !isSignedBy(key) {
		t.Errorf("the key of the session does not cost 600,000 hashes (%v)", err)
	}
}
