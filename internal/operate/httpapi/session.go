package httpapi

import (
	"crypto/hmac"
	"crypto/pbkdf2"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

const (
	loginPath  = "/login"
	logoutPath = "/logout"
	staticPath = "/static/" // files of the page, which the form of the login needs

	// sessionCookie begins the name of the cookie. The port of the listener and its prefix follow: cookies do not distinguish ports.
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
func (s session) sign(tokens Tokens) string {
	text, _ := json.Marshal(s) // strings and a number
	claims := base64.RawURLEncoding.EncodeToString(text)
	return claims + "." + signature(claims, tokens.byRole(s.Role))
}

// readSession returns the session of a cookie. ok is false if it is not valid, and forged means that it is not merely over: no
// token of this listener has signed it.
func readSession(cookie string, tokens Tokens, now time.Time) (session session, ok, forged bool) {
	claims, signed, found := strings.Cut(cookie, ".")
	text, err := base64.RawURLEncoding.DecodeString(claims)
	if !found || err != nil || json.Unmarshal(text, &session) != nil {
		return session, false, true
	}
	token := tokens.byRole(session.Role)
	if token == "" || !hmac.Equal([]byte(signed), []byte(signature(claims, token))) {
		return session, false, true
	}
	return session, now.Unix() < session.Expires, false
}

func signature(claims, token string) string {
	mac := hmac.New(sha256.New, sessionKey(token))
	mac.Write([]byte(claims))
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

// keyIterations makes the key of sessions cost a tenth of a second, so that a stolen cookie is of little use to guess a
// short token.
const keyIterations = 600_000

// sessionKeys has the keys by the hash of their token.
var sessionKeys struct {
	mu    sync.Mutex
	byTok map[[sha256.Size]byte][]byte
}

// sessionKey returns the key that signs the sessions of a token. All nodes derive the same one.
func sessionKey(token string) []byte {
	sessionKeys.mu.Lock()
	defer sessionKeys.mu.Unlock()
	hash := sha256.Sum256([]byte(token))
	if key := sessionKeys.byTok[hash]; key != nil {
		return key
	}

	// Only configured tokens get here, so there are few.
	if sessionKeys.byTok == nil || len(sessionKeys.byTok) > 64 {
		sessionKeys.byTok = map[[sha256.Size]byte][]byte{}
	}
	// The parameters are valid, so there is no error.
	key, _ := pbkdf2.Key(sha256.New, token, []byte("outrelay session"), keyIterations, sha256.Size)
	sessionKeys.byTok[hash] = key
	return key
}

// identifyBySession identifies a caller by its cookie. ok is false if it has no valid one.
func (a *Access) identifyBySession(request *http.Request) (caller admin.Caller, problem string, ok bool) {
	cookie, err := request.Cookie(a.cookieName(request))
	if err != nil {
		return admin.Caller{}, "", false
	}
	session, ok, _ := readSession(cookie.Value, a.Tokens(), time.Now())
	if !ok {
		return admin.Caller{}, "", false
	}
	caller, problem = a.newCaller(request, session.Name, "session", session.Role)
	return caller, problem, true
}

// isForged reports whether the request has a session that no token of this listener has signed. Its signature is a guess at
// a token, like a wrong token, unless a token has changed.
func (a *Access) isForged(request *http.Request) bool {
	cookie, err := request.Cookie(a.cookieName(request))
	if err != nil || cookie.Value == "" {
		return false
	}
	_, _, forged := readSession(cookie.Value, a.Tokens(), time.Now())
	return forged
}

// noteForgedSession counts and logs a request with such a session.
func (d *door) noteForgedSession(request *http.Request) {
	d.rejected(rejectedLogin)
	d.log.Warn("a session at the operator's listener is rejected", "error", "no token of this listener has signed it",
		"remote", remoteIP(request).String(), "path", request.URL.Path)
}

// isSecure reports whether the browser uses TLS, also if a proxy ends it.
func (a *Access) isSecure(request *http.Request) bool { return request.TLS != nil || a.BehindTLS }

// cookieName returns the name of the session's cookie. Over TLS, no other host and no plain connection can set a cookie of this
// name.
func (a *Access) cookieName(request *http.Request) string {
	name := sessionCookie
	if at, ok := request.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr); ok {
		name += "_" + strconv.Itoa(at.Port)
	}
	// A host may serve the pages of several relays.
	name += strings.ReplaceAll(a.prefix, "/", "_")
	if a.isSecure(request) {
		name = "__Host-" + name
	}
	return name
}

// serveLogin shows the form of the login, or logs in. The rate limit has passed the request.
func (d *door) serveLogin(response http.ResponseWriter, request *http.Request) {
	tokens := d.access.Tokens()
	if d.loginForm == nil || tokens.none() {
		writeProblem(response, request, http.StatusNotFound, "this listener has no tokens to log in with",
			"set http.admin.token, or use the client certificate or proxy that the listener is configured for")
		return
	}
	// The target comes from the address, so only paths of this listener are followed.
	next := localPath(request.URL.Query().Get("next"))
	if request.Method != http.MethodPost {
		d.loginForm(response, request, http.StatusOK, "", next)
		return
	}

	request.Body = http.MaxBytesReader(response, request.Body, maxLoginForm)
	name := strings.TrimSpace(request.PostFormValue("name"))
	role := tokens.roleOf(strings.TrimSpace(request.PostFormValue("token")))
	switch {
	case role == "":
		d.rejected(rejectedLogin)
		d.log.Warn("a login at the operator's listener is rejected", "error", "the token is not one of this listener's",
			"remote", remoteIP(request).String(), "path", request.URL.Path)
		d.loginForm(response, request, http.StatusUnauthorized, "The token is not one of this listener's.", next)
		return
	// A shared token does not identify a person, but the audit log has to.
	case !isPrintable(name):
		d.loginForm(response, request, http.StatusBadRequest, "Type your name: the audit log shows who did what.", next)
		return
	}

	session := session{Name: name, Role: role, Expires: time.Now().Add(d.access.Session).Unix()}
	d.log.Info("a person logged in at the operator's listener", "actor", name, "role", role, "remote", remoteIP(request).String())
	http.SetCookie(response, d.access.sessionOf(request, session.sign(tokens), int(d.access.Session/time.Second)))
	http.Redirect(response, request, d.access.prefix+next, http.StatusSeeOther)
}

// serveLogout ends the session of a browser.
func (d *door) serveLogout(response http.ResponseWriter, request *http.Request) {
	if request.Method != http.MethodPost {
		response.Header().Set("Allow", http.MethodPost)
		writeProblem(response, request, http.StatusMethodNotAllowed, "a logout is a POST", "use the button on the page")
		return
	}
	http.SetCookie(response, d.access.sessionOf(request, "", -1))
	http.Redirect(response, request, d.access.prefix+loginPath, http.StatusSeeOther)
}

// sessionOf returns the cookie of a session. No script can read it, and no page of another site can send it.
func (a *Access) sessionOf(request *http.Request, value string, maxAge int) *http.Cookie {
	return &http.Cookie{
		Name: a.cookieName(request), Value: value, Path: "/", MaxAge: maxAge,
		HttpOnly: true, Secure: a.isSecure(request), SameSite: http.SameSiteStrictMode,
	}
}

// localPath returns text if it is a path of this listener, and otherwise the first page.
func localPath(text string) string {
	address, err := url.Parse(text)
	local := err == nil && address.Scheme == "" && address.Host == "" && strings.HasPrefix(text, "/") && !strings.HasPrefix(text, "//") &&
		!strings.ContainsAny(text, "\\\r\n\t") && address.Path != loginPath && address.Path != logoutPath
	if !local {
		return "/"
	}
	return text
}

// redirectToLogin responds to a browser that opens a page without a login. It returns false for other requests.
func (d *door) redirectToLogin(response http.ResponseWriter, request *http.Request) bool {
	opensPage := request.Method == http.MethodGet && !isAPI(request) && strings.Contains(request.Header.Get("Accept"), "text/html")
	if !opensPage || d.loginForm == nil || d.access.Tokens().none() || request.Header.Get("Authorization") != "" {
		return false
	}

	if d.access.isForged(request) {
		d.noteForgedSession(request)
		// The browser need not send it again.
		http.SetCookie(response, d.access.sessionOf(request, "", -1))
	}
	to := d.access.prefix + loginPath
	if next := localPath(request.URL.RequestURI()); next != "/" {
		to += "?next=" + url.QueryEscape(next)
	}
	d.log.Log(request.Context(), slog.LevelDebug, "a browser without a login is sent to the form", "remote", remoteIP(request).String())
	http.Redirect(response, request, to, http.StatusSeeOther)
	return true
}

// limitRate responds to a client that sends too many requests, and reports whether it did.
func (d *door) limitRate(response http.ResponseWriter, request *http.Request, client string) bool {
	wait := d.rates.reserve(client)
	if wait <= 0 {
		return false
	}
	d.rejected(rejectedRate)
	response.Header().Set("Retry-After", strconv.Itoa(int(wait.Seconds())+1))
	writeProblem(response, request, http.StatusTooManyRequests, "this client sends too many requests",
		"wait for the time in Retry-After, or raise http.admin.rate")
	return true
}
