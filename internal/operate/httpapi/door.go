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
	access   Access
	rates    *rateLimiter
	log      *slog.Logger
	rejected func(reason string)
	origin   *http.CrossOriginProtection

	loginForm func(w http.ResponseWriter, r *http.Request, status int, problem, next string) // see [AdminOptions]

	// Operators have their own limit of concurrent requests, so that other callers cannot keep them
	// out.
	operators, others *requestLimit
}

// The reasons for which the door rejects a request.
const (
	rejectedHost   = "host"   // the host name is not one of the listener's
	rejectedOrigin = "origin" // a page of another origin sent it
	rejectedLogin  = "login"  // no valid login
	rejectedRate   = "rate"   // too many requests per second
	rejectedBusy   = "busy"   // too many concurrent requests
)

// Rejections are all reasons for which the door rejects a request.
var Rejections = []string{rejectedHost, rejectedOrigin, rejectedLogin, rejectedRate, rejectedBusy}

func newDoor(options AdminOptions) *door {
	door := &door{
		access:    options.Access,
		rates:     newRateLimiter(max(options.Access.Rate, 1)),
		log:       options.Log,
		rejected:  options.Rejected,
		loginForm: options.LoginForm,
		origin:    http.NewCrossOriginProtection(),
		operators: newRequestLimit(adminInFlight, adminOfOne),
		others:    newRequestLimit(adminInFlight, adminOfOne),
	}

	door.access.prefix = options.Prefix
	if door.access.Tokens == nil {
		door.access.Tokens = func() Tokens { return Tokens{} }
	}
	if door.rejected == nil {
		door.rejected = func(string) {}
	}
	return door
}

// wrap returns a handler that calls next with the caller in the context, for requests that pass all
// checks.
func (d *door) wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(response http.ResponseWriter, request *http.Request) {
		defer d.recoverPanic(response, request)
		setSecurityHeaders(response.Header(), request)

		if !d.access.allowsHost(request.Host) {
			d.rejected(rejectedHost)
			writeProblem(response, request, http.StatusMisdirectedRequest,
				"the request was sent to a name that is not one of this listener's",
				"use the address, or add the name to http.admin.hosts")
			return
		}
		if d.isForeign(request) {
			d.rejected(rejectedOrigin)
			writeProblem(response, request, http.StatusForbidden, "a page of another origin sent this request",
				"send it from the operator's page, or from a program without an Origin header")
			return
		}

		// The rate limit comes before the check of the login, so that it also limits guesses.
		caller, problem := d.access.identify(request)
		if problem == "" {
			// Strangers who open many connections must not end the requests of others.
			probes.SetRank(request, rankOf(caller))
		}
		client := clientName(request, caller)
		if d.limitRate(response, request, client) {
			// The login and the logout work without a login.
			return
		}

		isStatic := request.Method == http.MethodGet && strings.HasPrefix(request.URL.Path, staticPath)
		switch {
		case request.URL.Path == loginPath:
			d.serveLogin(response, request)
			return
		case request.URL.Path == logoutPath:
			d.serveLogout(response, request)
			return
		// The form of the login needs its style sheet and script.
		case problem != "" && d.loginForm != nil && isStatic:
			next.ServeHTTP(response, request)
			return
		case problem != "":
			if !d.redirectToLogin(response, request) {
				d.rejectLogin(response, request, problem)
			}
			return
		case d.access.isForged(request):
			d.noteForgedSession(request)
		}

		// Live streams have their own limit: they stay open, and would use up this one.
		if request.URL.Path != livePath {
			limit := d.others
			if caller.Operator() {
				limit = d.operators
			}
			if !limit.acquire(client) {
				d.rejected(rejectedBusy)
				response.Header().Set("Retry-After", "1")
				writeProblem(response, request, http.StatusServiceUnavailable, "there are too many concurrent requests",
					"try again in a second")
				return
			}
			defer limit.release(client)
		}

		request.Body = http.MaxBytesReader(response, request.Body, maxBody)
		next.ServeHTTP(response, request.WithContext(admin.WithCaller(request.Context(), caller)))
	})
}

// rankOf returns how much the listener prefers to keep the connection of a caller.
func rankOf(caller admin.Caller) probes.Rank {
	if caller.Operator() {
		return probes.Trusted
	}
	return probes.Known
}

func setSecurityHeaders(header http.Header, request *http.Request) {
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Referrer-Policy", "no-referrer")
	header.Set("X-Frame-Options", "DENY")
	header.Set("Cross-Origin-Resource-Policy", "same-origin")
	if request.TLS != nil {
		header.Set("Strict-Transport-Security", "max-age=31536000")
	}
	if isAPI(request) {
		header.Set("Cache-Control", "no-store")
		header.Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
	}
}

// isForeign reports whether a page of another origin made a browser send the request. Such a page
// may link to the operator's page. It must not read or trigger anything else, also not by a GET.
func (d *door) isForeign(request *http.Request) bool {
	if d.origin.Check(request) != nil {
		return true
	}
	// The check permits each GET. Browsers without Sec-Fetch-Site send the origin of a page that reads the response.
	if origin := request.Header.Get("Origin"); origin != "" && request.Header.Get("Sec-Fetch-Site") == "" && !isOriginOf(origin, request.Host) {
		return true
	}

	site := request.Header.Get("Sec-Fetch-Site")
	if site != "cross-site" && site != "same-site" {
		return false
	}
	isLink := request.Header.Get("Sec-Fetch-Mode") == "navigate" && request.Header.Get("Sec-Fetch-Dest") == "document"
	return isAPI(request) || !isLink
}

// isOriginOf reports whether an origin has this host.
func isOriginOf(origin, host string) bool {
	address, err := url.Parse(origin)
	return err == nil && address.Host != "" && strings.EqualFold(address.Host, host)
}

// rejectLogin requests a login. A browser that opens the page asks the person for it. A program gets
// a problem.
func (d *door) rejectLogin(response http.ResponseWriter, request *http.Request, problem string) {
	d.rejected(rejectedLogin)

	// A browser sends its first request without a login, so only a wrong login is a warning.
	level := slog.LevelDebug
	if request.Header.Get("Authorization") != "" || d.access.isForged(request) || request.TLS != nil && len(request.TLS.PeerCertificates) > 0 {
		level = slog.LevelWarn
	}
	d.log.Log(request.Context(), level, "a login at the operator's listener is rejected",
		"error", problem, "remote", remoteIP(request).String(), "path", request.URL.Path)

	// The service has logged the person in, and no token can change its decision.
	if d.access.Identify != nil {
		writeProblem(response, request, http.StatusForbidden, problem, "log in to the service as a person who may use this page")
		return
	}
	if !d.access.Tokens().none() {
		response.Header().Add("WWW-Authenticate", `Bearer realm="outrelay"`)
		response.Header().Add("WWW-Authenticate", `Basic realm="outrelay", charset="UTF-8"`)
	}
	writeProblem(response, request, http.StatusUnauthorized, problem,
		"send the token as Authorization: Bearer; in a browser, open "+d.access.prefix+loginPath)
}

// recoverPanic ends a request that panicked with an error, so that the process continues.
func (d *door) recoverPanic(response http.ResponseWriter, request *http.Request) {
	panicked := recover()
	if panicked == nil {
		return
	}
	if err, ok := panicked.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		panic(panicked)
	}

	d.log.Error("a request of the operator's listener broke off",
		"method", request.Method, "path", request.URL.Path, "error", logging.Clean(fmt.Sprint(panicked)), "stack", string(debug.Stack()))
	writeProblem(response, request, http.StatusInternalServerError, "the request failed with an internal error",
		"the log of the process contains the cause; please report it")
}
