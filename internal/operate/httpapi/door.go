package httpapi

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"runtime/debug"
	"strings"

	"github.com/outrelay/outrelay/internal/base/logging"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/probes"
)

// door checks each request before anything is served.
type door struct {
	access  Access
	rates   *rateLimiter
	log     *slog.Logger
	refused func(reason string)
	origin  *http.CrossOriginProtection

	loginForm func(w http.ResponseWriter, r *http.Request, status int, problem, next string) // see [AdminOptions]

	// Operators have their own limit of concurrent requests, so that other callers cannot keep them
	// out.
	operators, others *requestLimit
}

// The reasons for which the door rejects a request.
const (
	refusedHost   = "host"   // the host name is not one of the listener's
	refusedOrigin = "origin" // a page of another origin sent it
	refusedLogin  = "login"  // no valid login
	refusedRate   = "rate"   // too many requests per second
	refusedBusy   = "busy"   // too many concurrent requests
)

// Refusals are all reasons for which the door rejects a request.
var Refusals = []string{refusedHost, refusedOrigin, refusedLogin, refusedRate, refusedBusy}

func newDoor(o AdminOptions) *door {
	d := &door{
		access:    o.Access,
		rates:     newRateLimiter(max(o.Access.Rate, 1)),
		log:       o.Log,
		refused:   o.Refused,
		loginForm: o.LoginForm,
		origin:    http.NewCrossOriginProtection(),
		operators: newRequestLimit(adminInFlight, adminOfOne),
		others:    newRequestLimit(adminInFlight, adminOfOne),
	}

	if d.access.Tokens == nil {
		d.access.Tokens = func() Tokens { return Tokens{} }
	}
	if d.refused == nil {
		d.refused = func(string) {}
	}
	return d
}

// wrap returns a handler that calls next with the caller in the context, for requests that pass all
// checks.
func (d *door) wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer d.recoverPanic(w, r)
		setSecurityHeaders(w.Header(), r)

		if !d.access.allowsHost(r.Host) {
			d.refused(refusedHost)
			writeProblem(w, r, http.StatusMisdirectedRequest,
				"the request was sent to a name that is not one of this listener's",
				"use the address, or add the name to http.admin.hosts")
			return
		}
		if d.isForeign(r) {
			d.refused(refusedOrigin)
			writeProblem(w, r, http.StatusForbidden, "a page of another origin sent this request",
				"send it from the operator's page, or from a program without an Origin header")
			return
		}

		// The rate limit comes before the check of the login, so that it also limits guesses.
		caller, problem := d.access.identify(r)
		if problem == "" {
			// Strangers who open many connections must not end the requests of others.
			probes.SetRank(r, rankOf(caller))
		}
		client := clientName(r, caller)
		if d.limitRate(w, r, client) {
			// The login and the logout work without a login.
			return
		}

		isStatic := r.Method == http.MethodGet && strings.HasPrefix(r.URL.Path, staticPath)
		switch {
		case r.URL.Path == loginPath:
			d.serveLogin(w, r)
			return
		case r.URL.Path == logoutPath:
			d.serveLogout(w, r)
			return
		// The form of the login needs its style sheet and script.
		case problem != "" && d.loginForm != nil && isStatic:
			next.ServeHTTP(w, r)
			return
		case problem != "":
			if !d.redirectToLogin(w, r) {
				d.rejectLogin(w, r, problem)
			}
			return
		case d.access.isForged(r):
			d.noteForgedSession(r)
		}

		// Live streams have their own limit: they stay open, and would use up this one.
		if r.URL.Path != livePath {
			limit := d.others
			if caller.Operator() {
				limit = d.operators
			}
			if !limit.acquire(client) {
				d.refused(refusedBusy)
				w.Header().Set("Retry-After", "1")
				writeProblem(w, r, http.StatusServiceUnavailable, "there are too many concurrent requests",
					"try again in a second")
				return
			}
			defer limit.release(client)
		}

		r.Body = http.MaxBytesReader(w, r.Body, maxBody)
		next.ServeHTTP(w, r.WithContext(admin.WithCaller(r.Context(), caller)))
	})
}

// rankOf returns how much the listener prefers to keep the connection of a caller.
func rankOf(c admin.Caller) probes.Rank {
	if c.Operator() {
		return probes.Trusted
	}
	return probes.Known
}

func setSecurityHeaders(h http.Header, r *http.Request) {
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	if r.TLS != nil {
		h.Set("Strict-Transport-Security", "max-age=31536000")
	}
	if isAPI(r) {
		h.Set("Cache-Control", "no-store")
		h.Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
	}
}

// isForeign reports whether a page of another origin made a browser send the request. Such a page
// may link to the operator's page. It must not read or trigger anything else, also not by a GET.
func (d *door) isForeign(r *http.Request) bool {
	if d.origin.Check(r) != nil {
		return true
	}
	// The check permits each GET. Browsers without Sec-Fetch-Site send the origin of a page that reads the response.
	if origin := r.Header.Get("Origin"); origin != "" && r.Header.Get("Sec-Fetch-Site") == "" && !isOriginOf(origin, r.Host) {
		return true
	}

	site := r.Header.Get("Sec-Fetch-Site")
	if site != "cross-site" && site != "same-site" {
		return false
	}
	isLink := r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document"
	return isAPI(r) || !isLink
}

// isOriginOf reports whether an origin has this host.
func isOriginOf(origin, host string) bool {
	u, err := url.Parse(origin)
	return err == nil && u.Host != "" && strings.EqualFold(u.Host, host)
}

// rejectLogin requests a login. A browser that opens the page asks the person for it. A program gets
// a problem.
func (d *door) rejectLogin(w http.ResponseWriter, r *http.Request, problem string) {
	d.refused(refusedLogin)

	// A browser sends its first request without a login, so only a wrong login is a warning.
	level := slog.LevelDebug
	if r.Header.Get("Authorization") != "" || d.access.isForged(r) || r.TLS != nil && len(r.TLS.PeerCertificates) > 0 {
		level = slog.LevelWarn
	}
	d.log.Log(r.Context(), level, "a login at the operator's listener is refused",
		"error", problem, "remote", remoteIP(r).String(), "path", r.URL.Path)

	if !d.access.Tokens().none() {
		w.Header().Add("WWW-Authenticate", `Bearer realm="outrelay"`)
		w.Header().Add("WWW-Authenticate", `Basic realm="outrelay", charset="UTF-8"`)
	}
	writeProblem(w, r, http.StatusUnauthorized, problem,
		"send the token as Authorization: Bearer; in a browser, open /login")
}

// recoverPanic ends a request that panicked with an error, so that the process continues.
func (d *door) recoverPanic(w http.ResponseWriter, r *http.Request) {
	p := recover()
	if p == nil {
		return
	}
	if err, ok := p.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		panic(p)
	}

	d.log.Error("a request of the operator's listener broke off",
		"method", r.Method, "path", r.URL.Path, "error", logging.Clean(fmt.Sprint(p)), "stack", string(debug.Stack()))
	writeProblem(w, r, http.StatusInternalServerError, "the request failed with an internal error",
		"the log of the process contains the cause; please report it")
}
