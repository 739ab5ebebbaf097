// Package probes serves what probes and scrapers ask for: /livez, /readyz and /metrics, on one listener, without a login.
// Nothing it serves holds a payload, a key or a secret.
//
// Every answer is made from memory: a server that is away makes /readyz say so, never hang. A slow or hostile client is
// bounded by time-outs and header limits and costs one goroutine meanwhile.
package probes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/outrelay/outrelay/internal/health"
)

// Health is what the process knows about itself. Its methods must not block and may be called at any time. What they say
// is served as it is, to anyone: it holds no secret.
type Health interface {
	// Live is nil while the process can go on by itself; an error asks for a restart.
	Live() error
	// Ready says whether the process does its part: as owner or as standby, which is what role tells. Reasons say what is
	// wrong, also while ok is still true because it has not lasted long enough.
	Ready() (ok bool, role string, reasons []string)
	// Report is what the health rules say of what was counted; nil in a process that does not judge.
	Report() *health.Report
}

const (
	headerTimeout = 5 * time.Second // a client on a busy machine may be slow to send them
	readTimeout   = 10 * time.Second
	writeTimeout  = 15 * time.Second
	idleTimeout   = time.Minute
	maxHeader     = 16 << 10
	stopTimeout   = time.Second // for answers under way when it stops
	maxScrapes    = 4
	maxConns      = 256
)

// Server is a bound listener. Create it with [Listen] or [NewServer].
type Server struct {
	listener net.Listener
	http     *http.Server
	stop     context.CancelFunc // ends responses that have no end, such as event streams; nil: there are none
}

// NewServer returns a Server for a listener that is bound already. It bounds the times for headers and idle
// connections, and closes the connection that is idle longest when there are more than maxConns. stop, which may be nil, is called when the Server stops.
func NewServer(listener net.Listener, s *http.Server, maxConns int, stop context.CancelFunc) *Server {
	s.ConnState = newConnections(maxConns).changed
	s.ReadHeaderTimeout = headerTimeout
	s.IdleTimeout = idleTimeout
	return &Server{listener: listener, http: s, stop: stop}
}

// Listen binds address (host:port; port 0 takes a free one), so that an address that is taken is an error at the start.
// Nothing is served before Run.
func Listen(address string, probe Health, metrics prometheus.Gatherer, log *slog.Logger) (*Server, error) {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listening on %s: %w", address, err)
	}
	return NewServer(listener, &http.Server{
		Handler:        knownName(Handler(probe, metrics, log)),
		ReadTimeout:    readTimeout,
		WriteTimeout:   writeTimeout,
		MaxHeaderBytes: maxHeader,
		ErrorLog:       slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}, maxConns, nil), nil
}

// Addr is the address that is listened on, with the port that was found.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// Run serves until ctx ends, then finishes the answers under way within a second. It returns nil after a stop.
func (s *Server) Run(ctx context.Context) error {
	defer s.cut()
	served := make(chan error, 1)
	go func() { served <- s.http.Serve(s.listener) }()
	select {
	case err := <-served:
		return fmt.Errorf("serving %s: %w", s.Addr(), err)
	case <-ctx.Done():
	}
	s.cut()
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	if s.http.Shutdown(stop) != nil {
		_ = s.http.Close() // cuts off whoever still reads; there is nothing else to do for it
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving %s: %w", s.Addr(), err)
	}
	return nil
}

// Close frees the address of a Server that never ran.
func (s *Server) Close() error {
	s.cut()
	return s.listener.Close()
}

func (s *Server) cut() {
	if s.stop != nil {
		s.stop()
	}
}

// knownName refuses a request that came to this machine by a name which somebody else may have made up. A web page can let a
// name of its own resolve to 127.0.0.1; what the browser then reads there, it gives to that page. Requests from other
// machines, such as a scraper's, may use any name.
func knownName(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if onLoopback(r) && !localName(r.Host) {
			w.Header().Set("X-Content-Type-Options", "nosniff")
			http.Error(w, "the request was sent to a name that is not one of this machine's: use localhost or the address", http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// onLoopback reports whether the request arrived at an address that only this machine can reach.
func onLoopback(r *http.Request) bool {
	at, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	return ok && at.IP.IsLoopback()
}

// localName reports whether nobody outside can have made the name up: it is an address, or a name that the public DNS does not
// have, such as those of containers and of services in Kubernetes.
func localName(host string) bool {
	name := HostName(host)
	if _, err := netip.ParseAddr(name); err == nil {
		return true
	}
	last := name[strings.LastIndexByte(name, '.')+1:]
	return last == name || slices.Contains([]string{"localhost", "local", "internal", "svc"}, last)
}

// Handler serves /livez, /readyz and /metrics on a listener of somebody else's.
func Handler(probe Health, metrics prometheus.Gatherer, log *slog.Logger) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { livez(w, probe) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { readyz(w, probe) })
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{
		ErrorLog:            slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		ErrorHandling:       promhttp.ContinueOnError,
		MaxRequestsInFlight: maxScrapes,
		Timeout:             writeTimeout - headerTimeout,
		EnableOpenMetrics:   true,
	}))
	return mux
}

// liveness is the body of /livez.
type liveness struct {
	Live   bool   `json:"live"`
	Reason string `json:"reason,omitempty"`
}

func livez(w http.ResponseWriter, probe Health) {
	if err := probe.Live(); err != nil {
		answer(w, http.StatusServiceUnavailable, liveness{Reason: err.Error()})
		return
	}
	answer(w, http.StatusOK, liveness{Live: true})
}

// readiness is the body of /readyz.
type readiness struct {
	Ready   bool     `json:"ready"`
	Role    string   `json:"role"`
	Reasons []string `json:"reasons"`
	// Health is how the watcher does, by its owner; it decides nothing here: a backlog is no reason to restart a process.
	Health *health.Report `json:"health,omitempty"`
}

func readyz(w http.ResponseWriter, probe Health) {
	ok, role, reasons := probe.Ready()
	if reasons == nil {
		reasons = []string{} // an empty list, not null
	}
	status := http.StatusOK
	if !ok {
		status = http.StatusServiceUnavailable
	}
	answer(w, status, readiness{ok, role, reasons, probe.Report()})
}

func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // a client that went away is not our concern
}

// HostName returns the name in a Host header, without the port.
func HostName(host string) string {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = host
	}
	return strings.ToLower(strings.TrimSuffix(strings.Trim(name, "[]"), "."))
}
