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
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/probes"
)

// Access configures who may use the page and the API, and with which role. With Identify, the service decides that
// alone. Otherwise a caller is identified by the header of a trusted proxy, else by a client certificate, else by a token.
// Anonymous is the role of a caller without any of these.
type Access struct {
	// Identify returns the caller of a request, or an error with the reason why it is rejected. Optional.
	Identify func(request *http.Request) (admin.Caller, error)

	Tokens      func() Tokens  // the current tokens; nil means none
	Session     time.Duration  // how long a login in a browser lasts
	ProxyHeader string         // header in which a proxy names the person; "" trusts no proxy
	ProxyFrom   []netip.Prefix // addresses of the proxy
	// IgnoreCertificates does not identify callers by client certificates: another program decides which ones it accepts.
	IgnoreCertificates bool

	Operators []string // names from certificates and the proxy that may act; with the wildcards * and ?
	Anonymous string   // admin.RoleViewer or admin.RoleOperator; any other value disables it
	Payloads  string   // the lowest role that may see payloads; any other value hides them from all
	Local     bool     // only this machine reaches the listener: requests must name this machine
	Hosts     []string // further names that requests may use if Local is set
	BehindTLS bool     // a proxy ends the TLS of browsers, so that cookies are for TLS only
	Rate      int      // requests per second of one client; at least 1

	prefix string // see [AdminOptions]
}

// AdminOptions configures the operator's listener.
type AdminOptions struct {
	Listen string // host:port; port 0 selects a free one

	// Prefix is the path below which clients reach the page and the API, such as /outrelay, or "". Paths are served with and
	// without it, because a proxy in front may pass it on or remove it. All addresses in responses have it.
	Prefix string

	// TLS returns the configuration of the listener. It is called again when a client connects, at
	// most every ten seconds. Nil serves plain HTTP.
	TLS func() (*tls.Config, error)

	Reloaded func(ok bool)       // called after changed files were read; optional
	Rejected func(reason string) // called for each request that is rejected before anything is served; optional
	Access   Access
	Operator admin.Operator // its Watcher is that of the configuration
	Page     http.Handler   // serves all paths that are not below /api/, for the caller of admin.CallerOf; may be nil
	Log      *slog.Logger

	// LoginForm shows the form of the login, which sends the fields name and token to the same address. problem is why the last
	// attempt failed, and next the page to be opened. Nil means that the page has no login.
	LoginForm func(w http.ResponseWriter, r *http.Request, status int, problem, next string)
}

// Bounds of the operator's listener.
const (
	adminRead     = 30 * time.Second
	adminWrite    = 40 * time.Second
	adminInFlight = 32 // concurrent requests of operators, and of all other callers; /api/v1/live does not count
	adminOfOne    = 16 // concurrent requests of one client
	adminConns    = 1024
	maxBody       = 32 << 20
	maxAddress    = 128 << 10 // bytes of a request line: a cursor or a list of ids, escaped
	certsEvery    = 10 * time.Second
)

// ListenAdmin binds the operator's listener. It serves the API below /api/, documented at
// /api/openapi.json, and the page elsewhere.
//
// Each request passes these checks in order: the host name, the origin, the identity of the caller,
// the rate of that client, the number of concurrent requests, and the size of the body. Responses of
// the API to a rejected request are problem+json. They contain a payload only if the caller may see
// it and requests it.
func ListenAdmin(options AdminOptions) (*probes.Server, error) {
	listener, err := probes.Bind("http.admin.listen", options.Listen)
	if err != nil {
		return nil, err
	}

	// A certificate that cannot be read is an error at the start, and only a warning later.
	if options.TLS != nil {
		first, err := options.TLS()
		if err != nil {
			return nil, errors.Join(fmt.Errorf("http.admin.tls: reading the certificates: %w", err), listener.Close())
		}
		listener = tls.NewListener(listener, newReloadingConfig(first, options))
	}

	// Live streams end with the server, because their requests do not end.
	base, stop := context.WithCancel(context.Background())
	return probes.NewServer(listener, &http.Server{
		Handler:        NewHandler(options),
		BaseContext:    func(net.Listener) context.Context { return base },
		ReadTimeout:    adminRead,
		WriteTimeout:   adminWrite,
		MaxHeaderBytes: maxAddress,
		ErrorLog:       slog.NewLogLogger(options.Log.Handler(), slog.LevelDebug),
	}, adminConns, stop), nil
}

// newReloadingConfig returns a configuration whose files are read again while it is in use. If the
// files are invalid, the previous certificates stay in use.
func newReloadingConfig(first *tls.Config, options AdminOptions) *tls.Config {
	var mu sync.Mutex
	current := first
	readAt := time.Now()
	failed := false
	reportReload := func(ok bool) {
		if options.Reloaded != nil {
			options.Reloaded(ok)
		}
	}

	outer := first.Clone()
	outer.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		mu.Lock()
		defer mu.Unlock()
		// Reading the files at each connection would let strangers cause reads of the disk.
		if time.Since(readAt) < certsEvery {
			return current, nil
		}

		readAt = time.Now()
		next, err := options.TLS()
		if err != nil {
			// Report the first failure only, not one for each connection.
			if !failed {
				options.Log.Warn("the certificates of the operator's listener cannot be read; the old ones stay in use", "error", err)
				reportReload(false)
			}
			failed = true
			return current, nil
		}

		failed = false
		if !equalCertificates(current, next) {
			options.Log.Info("the certificates of the operator's listener have changed and are used from now on")
			reportReload(true)
		}
		current = next
		return current, nil
	}
	return outer
}

// equalCertificates reports whether two configurations present the same certificates and trust the
// same authorities.
func equalCertificates(a, b *tls.Config) bool {
	return a.ClientCAs.Equal(b.ClientCAs) &&
		slices.EqualFunc(a.Certificates, b.Certificates, func(x, y tls.Certificate) bool {
			return slices.EqualFunc(x.Certificate, y.Certificate, bytes.Equal)
		})
}

// NewHandler returns the handler of the listener, for the listener of another program. Requests pass the same checks as in
// [ListenAdmin], and the options of the listener itself have no effect: Listen, TLS and Reloaded.
func NewHandler(options AdminOptions) http.Handler {
	inner := http.NewServeMux()
	inner.Handle("/api/", newAPI(options.Operator, options.Prefix))
	if options.Page != nil {
		inner.Handle("/", options.Page)
	} else {
		inner.HandleFunc("/", func(response http.ResponseWriter, request *http.Request) {
			writeProblem(response, request, http.StatusNotFound, "nothing is served here",
				"the API is below /api/v1, its description at /api/openapi.json")
		})
	}
	return withPrefix(options.Prefix, newDoor(options).wrap(inner))
}

// withPrefix serves the paths of next with and without prefix.
func withPrefix(prefix string, next http.Handler) http.Handler {
	if prefix == "" {
		return next
	}
	below := http.StripPrefix(prefix, next)

	return http.HandlerFunc(func(response http.ResponseWriter, request *http.Request) {
		switch {
		case request.URL.Path == prefix:
			http.Redirect(response, request, prefix+"/", http.StatusSeeOther)
		case strings.HasPrefix(request.URL.Path, prefix+"/"):
			below.ServeHTTP(response, request)
		default:
			next.ServeHTTP(response, request)
		}
	})
}

func isAPI(request *http.Request) bool { return strings.HasPrefix(request.URL.Path, "/api/") }
