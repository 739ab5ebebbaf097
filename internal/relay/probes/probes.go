// Package probes serves /livez, /readyz and /metrics on one listener, without a login. The responses contain no payload,
// no key and no secret.
//
// Every response comes from memory. If a server is unreachable, /readyz reports it and does not block. Timeouts and header
// limits bound the cost of a slow or hostile client. Such a client costs one goroutine.
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
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/outrelay/outrelay/internal/relay/problems"
)

// Health reports the state of the process. Its methods must not block, and may be called at any time. Their results are
// served unchanged to any client, so they must not contain secrets.
type Health interface {
	// Live returns nil while the process can continue. An error requests a restart.
	Live() error
	// Ready reports whether the process works as an owner or as a standby, and phase is which of the two. reasons describe
	// the current problems. While a problem is short, ok is still true.
	Ready() (ok bool, phase string, reasons []string)
	// Problems returns the list of problems that this process knows.
	Problems() []problems.Problem
}

const (
	headerTimeout = 5 * time.Second // long enough for a client on a busy machine
	readTimeout   = 10 * time.Second
	writeTimeout  = 15 * time.Second
	idleTimeout   = time.Minute
	maxHeader     = 16 << 10
	stopTimeout   = time.Second // for responses in progress at the stop
	maxScrapes    = 4
	maxConns      = 256
)

// Server is a bound listener. Create it with [Listen] or [NewServer].
type Server struct {
	listener net.Listener
	http     *http.Server
	stop     context.CancelFunc // ends endless responses such as event streams
}

// NewServer returns a Server for a listener that is already bound. It bounds the times for headers and idle connections.
// If there are more than maxConns connections, it closes the one that has been idle longest, or else one of a caller with
// the lowest rank, see [SetRank]. When the Server stops, it calls stop, which may be nil.
func NewServer(listener net.Listener, server *http.Server, maxConns int, stop context.CancelFunc) *Server {
	if stop == nil {
		stop = func() {}
	}
	open := newConnections(maxConns)
	server.ConnState, server.ConnContext = open.trackState, open.connContext
	server.ReadHeaderTimeout = headerTimeout
	server.IdleTimeout = idleTimeout
	return &Server{listener: listener, http: server, stop: stop}
}

// Bind listens on address, the value of key in the configuration. The error has the fix.
func Bind(key, address string) (net.Listener, error) {
	listener, err := net.Listen("tcp", address)
	if err == nil {
		return listener, nil
	}

	fix := "correct " + key
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		fix = "stop the process that uses the address, or choose another port in " + key
	case errors.Is(err, syscall.EACCES):
		fix = "choose a port of 1024 or more in " + key
	}
	return nil, fmt.Errorf("%s: %w; %s", key, err, fix)
}

// Listen binds http.listen to address (host:port; port 0 takes a free port). So an address that is in use is an error at the start. It
// serves nothing before Run.
func Listen(address string, probe Health, metrics prometheus.Gatherer, log *slog.Logger) (*Server, error) {
	listener, err := Bind("http.listen", address)
	if err != nil {
		return nil, err
	}
	return NewServer(listener, &http.Server{
		Handler:        rejectForeignNames(Handler(probe, metrics, log)),
		ReadTimeout:    readTimeout,
		WriteTimeout:   writeTimeout,
		MaxHeaderBytes: maxHeader,
		ErrorLog:       slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}, maxConns, nil), nil
}

// Addr returns the address of the listener, with its actual port.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// Run serves until ctx ends. Then it completes the responses in progress, for at most a second, and returns nil.
func (s *Server) Run(ctx context.Context) error {
	defer s.stop()
	served := make(chan error, 1)
	go func() { served <- s.http.Serve(s.listener) }()

	select {
	case err := <-served:
		return fmt.Errorf("serving %s: %w", s.Addr(), err)
	case <-ctx.Done():
	}
	// Shutdown waits for all responses, so the endless ones have to end first.
	s.stop()
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	if s.http.Shutdown(stop) != nil {
		// Some clients still read. Close ends their connections.
		_ = s.http.Close()
	}

	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving %s: %w", s.Addr(), err)
	}
	return nil
}

// Close releases the address of a Server that never ran.
func (s *Server) Close() error {
	s.stop()
	return s.listener.Close()
}

// rejectForeignNames rejects a request from this machine that uses a name which an attacker may have chosen. The owner of a
// web page can let a name resolve to 127.0.0.1, and the page can then read the responses in the browser (DNS rebinding).
// Requests from other machines, such as those of a scraper, may use any name.
func rejectForeignNames(next http.Handler) http.Handler {
	return http.HandlerFunc(func(response http.ResponseWriter, request *http.Request) {
		if isOnLoopback(request) && !isLocalName(request.Host) {
			response.Header().Set("X-Content-Type-Options", "nosniff")
			http.Error(response, "the request was sent to a name that is not one of this machine's: use localhost or the address", http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(response, request)
	})
}

// isOnLoopback reports whether the request arrived at an address that only this machine can reach.
func isOnLoopback(request *http.Request) bool {
	at, ok := request.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	return ok && at.IP.IsLoopback()
}

// isLocalName reports whether no attacker can have chosen the name: it is an address, or a name that the public DNS does not
// have, such as the name of a container or of a service in Kubernetes.
func isLocalName(host string) bool {
	name := HostName(host)
	if _, err := netip.ParseAddr(name); err == nil {
		return true
	}
	last := name[strings.LastIndexByte(name, '.')+1:]
	return last == name || slices.Contains([]string{"localhost", "local", "internal", "svc"}, last)
}

// Handler serves /livez, /readyz and /metrics, for a listener of the caller.
func Handler(probe Health, metrics prometheus.Gatherer, log *slog.Logger) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(response http.ResponseWriter, _ *http.Request) { serveLivez(response, probe) })
	mux.HandleFunc("GET /readyz", func(response http.ResponseWriter, _ *http.Request) { serveReadyz(response, probe) })
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

func serveLivez(response http.ResponseWriter, probe Health) {
	if err := probe.Live(); err != nil {
		writeJSON(response, http.StatusServiceUnavailable, liveness{Reason: err.Error()})
		return
	}
	writeJSON(response, http.StatusOK, liveness{Live: true})
}

// readiness is the body of /readyz.
type readiness struct {
	Ready   bool     `json:"ready"`
	Phase   string   `json:"phase"`
	Reasons []string `json:"reasons"`
	// Problems are all problems of the watcher that this process knows. Most have no effect on the status code: a backlog is no reason
	// to restart a process.
	Problems []problems.Problem `json:"problems"`
}

func serveReadyz(response http.ResponseWriter, probe Health) {
	ok, phase, reasons := probe.Ready()
	if reasons == nil {
		// In JSON, nil would be null instead of an empty list.
		reasons = []string{}
	}

	status := http.StatusOK
	if !ok {
		status = http.StatusServiceUnavailable
	}
	writeJSON(response, status, readiness{ok, phase, reasons, probe.Problems()})
}

func writeJSON(response http.ResponseWriter, status int, body any) {
	response.Header().Set("Content-Type", "application/json")
	response.Header().Set("Cache-Control", "no-store")
	response.Header().Set("X-Content-Type-Options", "nosniff")
	response.WriteHeader(status)

	// It fails only if the client has closed the connection.
	_ = json.NewEncoder(response).Encode(body)
}

// HostName returns the name in a Host header, without the port.
func HostName(host string) string {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = host
	}
	return strings.ToLower(strings.TrimSuffix(strings.Trim(name, "[]"), "."))
}
