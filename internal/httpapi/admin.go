package httpapi

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/logging"
	"github.com/outrelay/outrelay/internal/probes"
)

// Access says who may come in, and as what. Somebody is known by what a trusted proxy says, else by a client certificate,
// else by a token; Anonymous is for whoever shows nothing.
type Access struct {
	Token, ViewerToken string         // "" is none
	ProxyHeader        string         // in which a proxy names the person; "" trusts none
	ProxyFrom          []netip.Prefix // addresses of the proxy
	Operators          []string       // names, of certificates and from the proxy, that may act; * and ? may stand in them
	Anonymous          string         // admin.RoleViewer, admin.RoleOperator, or anything else for nobody
	Payloads           string         // the lowest role that may see payloads, or anything else for nobody
	Local              bool           // only this machine can reach it: then the name it is called by has to be one of this machine
	Hosts              []string       // or one of these
	Rate               int            // requests a second of one client; at least 1
}

// AdminOptions is what the operator's listener serves.
type AdminOptions struct {
	Listen   string                      // host:port; port 0 takes a free one
	TLS      func() (*tls.Config, error) // asked again when a client connects, at most every ten seconds; nil serves plain HTTP
	Reloaded func(ok bool)               // called when files that have changed were read; optional
	Refused  func(reason string)         // called for each request that is refused before anything is served; optional
	Access   Access
	Operator admin.Operator // its Watcher is that of the configuration
	Page     http.Handler   // everything that is not below /api/; nil: nothing is. It finds the caller by admin.CallerOf
	Log      *slog.Logger
}

// Bounds of the operator's listener.
const (
	adminRead     = 30 * time.Second
	adminWrite    = 40 * time.Second
	adminInFlight = 32 // requests of operators, and as many of everybody else, without those of /api/v1/live
	adminOfOne    = 16 // of these, of one client
	adminConns    = 1024
	maxBody       = 32 << 20
	maxAddress    = 128 << 10 // of a request: a cursor or a list of ids, escaped
	certsEvery    = 10 * time.Second
)

// ListenAdmin binds the operator's listener: the API below /api/, documented at /api/openapi.json, and the page elsewhere.
//
// Every request passes, in this order: a check of the name it was sent to, the refusal of what a foreign web page had a browser
// send, the question who sends it, the rate of that client, the bounds of requests under way, and the bound of its body.
// Only then the page or the API see it. Answers of the API are problem+json where something is wrong, and never hold a
// payload unless the caller may see it and asks for it.
func ListenAdmin(o AdminOptions) (*probes.Server, error) {
	listener, err := net.Listen("tcp", o.Listen)
	if err != nil {
		return nil, fmt.Errorf("listening on %s: %w", o.Listen, err)
	}
	if o.TLS != nil {
		first, err := o.TLS()
		if err != nil {
			return nil, errors.Join(fmt.Errorf("reading the certificates: %w", err), listener.Close())
		}
		listener = tls.NewListener(listener, reloading(first, o))
	}
	base, stop := context.WithCancel(context.Background())
	return probes.NewServer(listener, &http.Server{
		Handler:        adminHandler(o),
		BaseContext:    func(net.Listener) context.Context { return base },
		ReadTimeout:    adminRead,
		WriteTimeout:   adminWrite,
		MaxHeaderBytes: maxAddress,
		ErrorLog:       slog.NewLogLogger(o.Log.Handler(), slog.LevelDebug),
	}, adminConns, stop), nil
}

// reloading is a configuration whose files are read again while it is in use. Files that cannot be used leave the old ones.
func reloading(first *tls.Config, o AdminOptions) *tls.Config {
	var mu sync.Mutex
	now, at, refused := first, time.Now(), false
	told := func(ok bool) {
		if o.Reloaded != nil {
			o.Reloaded(ok)
		}
	}
	outer := first.Clone()
	outer.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		mu.Lock()
		defer mu.Unlock()
		if time.Since(at) < certsEvery {
			return now, nil
		}
		at = time.Now()
		next, err := o.TLS()
		if err != nil {
			if !refused {
				o.Log.Warn("the certificates of the operator's listener cannot be read; the old ones stay in use", "reason", err)
				told(false)
			}
			refused = true
			return now, nil
		}
		if refused = false; !sameCertificates(now, next) {
			o.Log.Info("the certificates of the operator's listener have changed and are used from now on")
			told(true)
		}
		now = next
		return now, nil
	}
	return outer
}

// sameCertificates reports whether two configurations show the same certificate and trust the same authorities.
func sameCertificates(a, b *tls.Config) bool {
	return a.ClientCAs.Equal(b.ClientCAs) && slices.EqualFunc(a.Certificates, b.Certificates, func(x, y tls.Certificate) bool {
		return slices.EqualFunc(x.Certificate, y.Certificate, bytes.Equal)
	})
}

// adminHandler is everything behind the listener.
func adminHandler(o AdminOptions) http.Handler {
	api := newAPI(o)
	inner := http.NewServeMux()
	inner.Handle("/api/", api)
	if o.Page != nil {
		inner.Handle("/", o.Page)
	} else {
		inner.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
			writeProblem(w, r, http.StatusNotFound, "nothing is served here", "the API is below /api/v1, its description at /api/openapi.json")
		})
	}
	d := &door{
		access: o.Access, limits: newLimiter(max(o.Access.Rate, 1)), log: o.Log, refused: o.Refused, origin: http.NewCrossOriginProtection(),
		operators: newRoom(adminInFlight, adminOfOne), others: newRoom(adminInFlight, adminOfOne),
	}
	if d.refused == nil {
		d.refused = func(string) {}
	}
	return d.wrap(inner)
}

// door is what each request passes before anything is served.
type door struct {
	access  Access
	limits  *limiter
	log     *slog.Logger
	refused func(reason string)
	origin  *http.CrossOriginProtection
	// Requests under way. Operators have a room of their own, which nobody else can fill.
	operators, others *room
}

// The reasons for which a request is refused at the door.
const (
	RefusedHost   = "host"   // sent to a name that is not the listener's
	RefusedOrigin = "origin" // sent by a page of another origin
	RefusedLogin  = "login"  // nobody is logged in, or the token is wrong
	RefusedRate   = "rate"   // too many requests a second
	RefusedBusy   = "busy"   // too many requests under way
)

// Refusals are the reasons for which a request is refused at the door.
var Refusals = []string{RefusedHost, RefusedOrigin, RefusedLogin, RefusedRate, RefusedBusy}

// foreign reports whether a page of another origin had a browser send the request. Such a page may only link to the
// operator's page: everything else that it can read or trigger, also by a GET, is none of its business.
func (d *door) foreign(r *http.Request) bool {
	if d.origin.Check(r) != nil {
		return true
	}
	site, mode := r.Header.Get("Sec-Fetch-Site"), r.Header.Get("Sec-Fetch-Mode")
	if site != "cross-site" && site != "same-site" {
		return false
	}
	return isAPI(r) || mode != "navigate" || r.Header.Get("Sec-Fetch-Dest") != "document"
}

func (d *door) wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer d.recovered(w, r)
		h := w.Header()
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
		if !d.access.named(r.Host) {
			d.refused(RefusedHost)
			writeProblem(w, r, http.StatusMisdirectedRequest, "the request was sent to a name that is not one of this listener's", "use the address, or add the name to http.admin.hosts")
			return
		}
		if d.foreign(r) {
			d.refused(RefusedOrigin)
			writeProblem(w, r, http.StatusForbidden, "a page of another origin sent this request", "send it from the operator's page, or from a program without an Origin header")
			return
		}
		caller, problem := d.access.caller(r)
		name := client(r, caller)
		if wait := d.limits.take(name); wait > 0 {
			d.refused(RefusedRate)
			h.Set("Retry-After", itoa(int(wait.Seconds())+1))
			writeProblem(w, r, http.StatusTooManyRequests, "this client sends too many requests", "wait as long as Retry-After says, or raise http.admin.rate")
			return
		}
		if problem != "" {
			d.refuse(w, r, problem)
			return
		}
		if r.URL.Path != livePath {
			room := d.others
			if caller.Operator() {
				room = d.operators
			}
			if !room.enter(name) {
				d.refused(RefusedBusy)
				h.Set("Retry-After", "1")
				writeProblem(w, r, http.StatusServiceUnavailable, "too many requests are under way", "try again in a second")
				return
			}
			defer room.leave(name)
		}
		r.Body = http.MaxBytesReader(w, r.Body, maxBody)
		next.ServeHTTP(w, r.WithContext(admin.WithCaller(r.Context(), caller)))
	})
}

// refuse asks for a login. A browser that opens the page asks the person; a program gets a problem.
func (d *door) refuse(w http.ResponseWriter, r *http.Request, problem string) {
	d.refused(RefusedLogin)
	level := slog.LevelDebug // a browser first asks without a login
	if r.Header.Get("Authorization") != "" || r.TLS != nil && len(r.TLS.PeerCertificates) > 0 {
		level = slog.LevelWarn
	}
	d.log.Log(r.Context(), level, "a login at the operator's listener is refused", "reason", problem, "remote", remoteIP(r).String(), "path", r.URL.Path)
	if d.access.Token != "" || d.access.ViewerToken != "" {
		w.Header().Add("WWW-Authenticate", `Bearer realm="outrelay"`)
		w.Header().Add("WWW-Authenticate", `Basic realm="outrelay", charset="UTF-8"`)
	}
	writeProblem(w, r, http.StatusUnauthorized, problem, "send Authorization: Bearer with the token; in a browser any user name, with the token as the password")
}

// recovered keeps a panic of one request from being more than that.
func (d *door) recovered(w http.ResponseWriter, r *http.Request) {
	p := recover()
	if p == nil {
		return
	}
	if err, ok := p.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		panic(p)
	}
	d.log.Error("a request of the operator's listener broke off", "method", r.Method, "path", r.URL.Path, "reason", logging.Clean(fmt.Sprint(p)), "stack", string(debug.Stack()))
	writeProblem(w, r, http.StatusInternalServerError, "the request broke off", "the log of the process says where; please report it")
}

func isAPI(r *http.Request) bool { return strings.HasPrefix(r.URL.Path, "/api/") }
