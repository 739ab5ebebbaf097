package app

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net/http"

	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/httpapi"
	"github.com/outrelay/outrelay/internal/metrics"
	"github.com/outrelay/outrelay/internal/opspage"
)

// Operators serves the operator's page and API of one deployment. It has its own connection, so
// that no request delays the lease or the stream. It works in a process with or without a relay.
type Operators struct {
	server     *httpapi.Server
	deployment *admin.Deployment
	disconnect func()
}

// NewOperators binds http.admin.listen. cfg.HTTP.Admin must be set. It does not connect to MongoDB
// yet, and serves nothing before Run. The caller must call Run or Close.
func NewOperators(cfg config.Config, version string, log *slog.Logger) (*Operators, error) {
	return newOperators(cfg, version, log, nil)
}

// newOperators is like NewOperators. m counts refused logins and renewed certificates. It may be
// nil.
func newOperators(cfg config.Config, version string, log *slog.Logger, m *metrics.Set) (*Operators, error) {
	a := cfg.HTTP.Admin
	redact, err := admin.NewRedaction(a.Redact.Headers, a.Redact.Paths)
	if err != nil {
		return nil, fmt.Errorf("http.admin.redact: %w", err)
	}
	router, err := Router(cfg)
	if err != nil {
		return nil, err
	}
	state, disconnect, err := StateDatabase(cfg)
	if err != nil {
		return nil, err
	}

	o := &Operators{disconnect: disconnect, deployment: &admin.Deployment{
		State:    state,
		Watcher:  cfg.Watcher,
		Node:     cfg.Node,
		Version:  version,
		Router:   router,
		Redact:   redact,
		Log:      log,
		Outboxes: Outboxes(cfg, state.Client()),
		Compacted: func(ctx context.Context, topics []string) ([]string, error) {
			return CompactedTopics(ctx, cfg, topics)
		},
		Oplog: Oplog(state.Client()),
	}}

	opts := httpapi.AdminOptions{
		Listen:     a.Listen,
		Access:     accessConfig(a),
		Deployment: o.deployment,
		Log:        log,
		Page:       o.newPage(cfg, version, log),
	}
	// The series of refused logins exist from the start, with the value 0.
	if m != nil {
		for _, reason := range httpapi.Refusals {
			m.LoginsRefused.WithLabelValues(reason)
		}
		opts.Refused = func(reason string) { m.LoginsRefused.WithLabelValues(reason).Inc() }
	}
	if a.TLS != nil {
		opts.TLS = func() (*tls.Config, error) { return a.TLS.Server() }
		opts.Reloaded = func(ok bool) { m.Reloaded(metrics.Certificates, ok) }
	}
	if o.server, err = httpapi.ListenAdmin(opts); err != nil {
		disconnect()
		return nil, fmt.Errorf("http.admin.listen: %w", err)
	}
	return o, nil
}

// newPage returns the handler of the operator's page.
func (o *Operators) newPage(cfg config.Config, version string, log *slog.Logger) http.Handler {
	return opspage.New(opspage.Options{
		Watcher: cfg.Watcher,
		Node:    cfg.Node,
		Version: version,
		Log:     log,
		Desk: func(a admin.Actor, watcher, slot string) opspage.UseCases {
			return o.deployment.For(a).Of(watcher).At(slot)
		},
	})
}

// accessConfig returns the configured rules of who may use the page and the API.
func accessConfig(a *config.Admin) httpapi.Access {
	out := httpapi.Access{
		Token:       a.Token.Reveal(),
		ViewerToken: a.ViewerToken.Reveal(),
		Operators:   a.Operators,
		Anonymous:   a.Anonymous,
		Payloads:    a.Payloads,
		Local:       a.Local(),
		Hosts:       a.Hosts,
		Rate:        a.Rate,
	}
	if a.Proxy != nil {
		out.ProxyHeader = a.Proxy.Header
		out.ProxyFrom = a.Proxy.Networks()
	}
	return out
}

// Addr returns the address that the server listens on, with the actual port.
func (o *Operators) Addr() string { return o.server.Addr() }

// Close closes Operators that are never run. It does nothing if o is nil.
func (o *Operators) Close() error {
	if o == nil {
		return nil
	}
	o.disconnect()
	return o.server.Close()
}

// Run serves until ctx ends.
func (o *Operators) Run(ctx context.Context) error {
	defer o.disconnect()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return o.server.Run(ctx) })
	g.Go(func() error { return o.deployment.Run(ctx) })
	return g.Wait()
}

// listenOperators binds the listener of the operator's page and API. It returns nil if they are not
// configured.
func (r *Relay) listenOperators() (*Operators, error) {
	if r.cfg.HTTP.Admin == nil || !r.cfg.Is(config.RoleAdmin) {
		return nil, nil
	}
	o, err := newOperators(r.cfg, r.version, r.log, r.metrics)
	if err == nil {
		r.log.Info("the operator's page and API are served", "address", o.Addr())
	}
	return o, err
}
