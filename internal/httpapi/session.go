package httpapi

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/admin"
)

const (
	loginPath  = "/login"
	logoutPath = "/logout"
	staticPath = "/static/" // files of the page, which the form of the login needs

	sessionCookie = "outrelay_session"
	maxLoginForm  = 8 << 10 // bytes
)

// Tokens are the tokens of the listener. "" disables one.
type Tokens struct{ Operator, Viewer string }

// none reports whether there is no token to log in with.
func (t Tokens) none() bool { return t.Operator == "" && t.Viewer == "" }

// roleOf returns the role of a token, or "".
func (t Tokens) roleOf(token string) string {
	// Both comparisons always run, so that the time of the response reveals nothing about a token.
	isOperator := equalTokens(token, t.Operator)
	isViewer := equalTokens(token, t.Viewer)
	switch {
	case isOperator:
		return admin.RoleOperator
	case isViewer:
		return admin.RoleViewer
	}
	return ""
}

// byRole returns the token of a role.
func (t Tokens) byRole(role string) string {
	switch role {
	case admin.RoleOperator:
		return t.Operator
	case admin.RoleViewer:
		return t.Viewer
	}
	return ""
}

// session is the login of a browser, in its cookie. The token of the role signs it. So a session ends with its token, needs no
// store, and is valid at every node with the same tokens.
type session struct {
	Name    string `json:"n"` // the person chooses it
	Role    string `json:"r"`
	Expires int64  `json:"e"` // Unix seconds
}

// sign returns the text of the cookie.
func (s session) sign(t Tokens) string {
	text, _ := json.Marshal(s) // strings and a number
	claims := base64.RawURLEncoding.EncodeToString(text)
	return claims + "." + signature(claims, t.byRole(s.Role))
}

// readSession returns the valid session of a cookie.
func readSession(cookie string, t Tokens, now time.Time) (s session, ok bool) {
	claims, signed, found := strings.Cut(cookie, ".")
	text, err := base64.RawURLEncoding.DecodeString(claims)
	if !found || err != nil || json.Unmarshal(text, &s) != nil {
		return s, false
	}
	token := t.byRole(s.Role)
	ok = token != "" && hmac.Equal([]byte(signed), []byte(signature(claims, token))) && now.Unix() < s.Expires
	return s, ok
}

func signature(claims, token string) string {
	mac := hmac.New(sha256.New, []byte("outrelay session\x00"+token))
	mac.Write([]byte(claims))
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

// identifyBySession identifies a caller by its cookie. ok is false if it has no valid one.
func (a *Access) identifyBySession(r *http.Request) (caller admin.Caller, problem string, ok bool) {
	c, err := r.Cookie(sessionCookie)
	if err != nil {
		return admin.Caller{}, "", false
	}
	s, ok := readSession(c.Value, a.Tokens(), time.Now())
	if !ok {
		return admin.Caller{}, "", false
	}
	caller, problem = a.newCaller(r, s.Name, "session", s.Role)
	return caller, problem, true
}

// serveLogin shows the form of the login, or logs in. The rate limit has passed the request.
func (d *door) serveLogin(w http.ResponseWriter, r *http.Request) {
	tokens := d.access.Tokens()
	if d.loginForm == nil || tokens.none() {
		writeProblem(w, r, http.StatusNotFound, "this listener has no tokens to log in with",
			"set http.admin.token, or use the client certificate or proxy that the listener is configured for")
		return
	}
	// The target comes from the address, so only paths of this listener are followed.
	next := localPath(r.URL.Query().Get("next"))
	if r.Method != http.MethodPost {
		d.loginForm(w, r, http.StatusOK, "", next)
		return
	}

	r.Body = http.MaxBytesReader(w, r.Body, maxLoginForm)
	name := strings.TrimSpace(r.PostFormValue("name"))
	role := tokens.roleOf(strings.TrimSpace(r.PostFormValue("token")))
	switch {
	case role == "":
		d.refused(refusedLogin)
		d.log.Warn("a login at the operator's listener is refused", "reason", "the token is not one of this listener's",
			"remote", remoteIP(r).String(), "path", r.URL.Path)
		d.loginForm(w, r, http.StatusUnauthorized, "The token is not one of this listener's.", next)
		return
	// A shared token does not identify a person, but the events log has to.
	case !isPrintable(name):
		d.loginForm(w, r, http.StatusBadRequest, "Type your name: the events log shows who did what.", next)
		return
	}

	s := session{Name: name, Role: role, Expires: time.Now().Add(d.access.Session).Unix()}
	d.log.Info("a person logged in at the operator's listener", "actor", name, "role", role, "remote", remoteIP(r).String())
	http.SetCookie(w, sessionOf(r, s.sign(tokens), int(d.access.Session/time.Second)))
	http.Redirect(w, r, next, http.StatusSeeOther)
}

// serveLogout ends the session of a browser.
func (d *door) serveLogout(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		writeProblem(w, r, http.StatusMethodNotAllowed, "a logout is a POST", "use the button on the page")
		return
	}
	http.SetCookie(w, sessionOf(r, "", -1))
	http.Redirect(w, r, loginPath, http.StatusSeeOther)
}

// sessionOf returns the cookie of a session. No script can read it, and no page of another site can send it.
func sessionOf(r *http.Request, value string, maxAge int) *http.Cookie {
	return &http.Cookie{
		Name: sessionCookie, Value: value, Path: "/", MaxAge: maxAge,
		HttpOnly: true, Secure: r.TLS != nil, SameSite: http.SameSiteStrictMode,
	}
}

// localPath returns text if it is a path of this listener, and otherwise the first page.
func localPath(text string) string {
	u, err := url.Parse(text)
	local := err == nil && u.Scheme == "" && u.Host == "" && strings.HasPrefix(text, "/") && !strings.HasPrefix(text, "//") &&
		!strings.ContainsAny(text, "\\\r\n\t") && u.Path != loginPath && u.Path != logoutPath
	if !local {
		return "/"
	}
	return text
}

// redirectToLogin answers a browser that opens a page without a login. It returns false for other requests.
func (d *door) redirectToLogin(w http.ResponseWriter, r *http.Request) bool {
	opensPage := r.Method == http.MethodGet && !isAPI(r) && strings.Contains(r.Header.Get("Accept"), "text/html")
	if !opensPage || d.loginForm == nil || d.access.Tokens().none() || r.Header.Get("Authorization") != "" {
		return false
	}

	to := loginPath
	if next := localPath(r.URL.RequestURI()); next != "/" {
		to += "?next=" + url.QueryEscape(next)
	}
	d.log.Log(r.Context(), slog.LevelDebug, "a browser without a login is sent to the form", "remote", remoteIP(r).String())
	http.Redirect(w, r, to, http.StatusSeeOther)
	return true
}

// limitRate answers a client that sends too many requests, and reports whether it did.
func (d *door) limitRate(w http.ResponseWriter, r *http.Request, client string) bool {
	wait := d.rates.reserve(client)
	if wait <= 0 {
		return false
	}
	d.refused(refusedRate)
	w.Header().Set("Retry-After", strconv.Itoa(int(wait.Seconds())+1))
	writeProblem(w, r, http.StatusTooManyRequests, "this client sends too many requests",
		"wait for the time in Retry-After, or raise http.admin.rate")
	return true
}
