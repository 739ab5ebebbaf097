// Package operators serves the operators' page and API of one deployment.
//
// Blocking: New does no I/O except binding the address, and Run blocks until its context ends. Cost: a separate
// connection to MongoDB, which requests use. No request can delay a lease or a stream.
package operators

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net/http"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/httpapi"
	"github.com/outrelay/outrelay/internal/operate/opspage"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/offline"
	"github.com/outrelay/outrelay/internal/relay/probes"
	"github.com/outrelay/outrelay/internal/relay/process"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/service/inventory"
)

// Server serves the operators' page and API of one deployment. It has its own connection, so that
// no request delays the lease or the stream. It works in a process with or without a relay.
type Server struct {
	server     *probes.Server
	operator   admin.Operator
	disconnect func()
	tokens     atomic.Pointer[httpapi.Tokens]
}

// New binds http.admin.listen. cfg.HTTP.Admin must be set. It does not connect to MongoDB yet, and
// serves nothing before Run. The caller must call Run or Close. metricSet counts rejected logins and renewed
// certificates. It may be nil.
func New(cfg config.Config, version string, log *slog.Logger, metricSet *metrics.Set) (*Server, error) {
	state, disconnect, err := connect.StateDatabase(cfg, connect.MongoHost{})
	if err != nil {
		return nil, err
	}
	operator, err := NewOperator(cfg, process.Host{}, version, state)
	if err != nil {
		disconnect()
		return nil, err
	}
	operator.Log = log

	admin := cfg.HTTP.Admin
	server := &Server{disconnect: disconnect, operator: operator}
	server.tokens.Store(tokensOf(admin))
	access := AccessOf(admin)
	access.Tokens = func() httpapi.Tokens { return *server.tokens.Load() }
	opts := httpapi.AdminOptions{
		Listen:   admin.Listen,
		Prefix:   admin.Prefix,
		Access:   access,
		Operator: server.operator,
		Log:      log,
		Page:     newPage(operator, admin.Prefix),

		LoginForm: opspage.LoginForm(admin.Prefix),
	}
	// The series of rejected logins exist from the start, with the value 0.
	if metricSet != nil {
		for _, reason := range httpapi.Rejections {
			metricSet.LoginsRejected.WithLabelValues(reason)
		}
		opts.Rejected = func(reason string) { metricSet.LoginsRejected.WithLabelValues(reason).Inc() }
	}
	if admin.TLS != nil {
		opts.TLS = func() (*tls.Config, error) { return admin.TLS.ServerConfig() }
		opts.Reloaded = func(ok bool) { metricSet.Reloaded(metrics.Certificates, ok) }
	}
	// The address is bound here, so that a wrong one is an error of the start.
	if server.server, err = httpapi.ListenAdmin(opts); err != nil {
		disconnect()
		return nil, err
	}
	return server, nil
}

// NewOperator returns the operator of the configured watcher for the page, the API, the command line and services. So
// all of them hide the same values. host has the values of the program in which the relay is embedded.
func NewOperator(cfg config.Config, host process.Host, version string, state state.Database) (admin.Operator, error) {
	router, err := connect.Router(cfg, host.Route)
	if err != nil {
		return admin.Operator{}, err
	}
	var redact admin.Redaction
	if access := cfg.HTTP.Admin; access != nil {
		if redact, err = admin.NewRedaction(access.Redact.Headers, access.Redact.Paths); err != nil {
			return admin.Operator{}, fmt.Errorf("http.admin.redact: %w", err)
		}
	}

	cluster := connect.NewCluster(cfg, host.Kafka)
	return admin.New(admin.Operator{
		State:   state,
		Watcher: cfg.Watcher,
		Slots:   cfg.Slots,
		Node:    cfg.Node,
		Version: version,
		Router:  router,
		Mapping: cfg.DocumentMapping(),
		Redact:  redact,

		HandlerLetters:    cfg.DeadLetters.Handlers,
		ConsumerDatabases: inventory.ConfiguredDatabases(cfg.Consumers.Databases, cfg.Watch),
		LetterExpiry:      cfg.DeadLetters.Expire,
		LetterArchive:     cfg.DeadLetters.Archive,

		Outboxes: connect.Outboxes(cfg, state.Client()),
		Inspect:  connect.Inspect(cfg, state.Client()),

		NextInsert:   offline.NextInsert(cfg, state.Client()),
		Compacted:    cluster.CompactedTopics,
		KafkaGroups:  cluster.ReadGroups,
		NewTopic:     cluster.CreateTopic,
		TopicCommand: cluster.FormatCommand,
		CheckKafka:   cluster.Check,

		Oplog: connect.Oplog(state.Client()),
	}), nil
}

// NewHandler returns the page and the API of an operator below a prefix, for the listener of another program. access decides
// who may use them.
func NewHandler(operator admin.Operator, prefix string, access httpapi.Access) http.Handler {
	access.IgnoreCertificates = true
	return httpapi.NewHandler(httpapi.AdminOptions{
		Prefix: prefix, Access: access, Operator: operator, Log: operator.Log, Page: newPage(operator, prefix), LoginForm: opspage.LoginForm(prefix),
	})
}

// newPage returns the handler of the operator's page.
func newPage(operator admin.Operator, prefix string) http.Handler {
	return opspage.New(opspage.Options{
		Prefix:  prefix,
		Watcher: operator.Watcher,
		Node:    operator.Node,
		Version: operator.Version,
		Log:     operator.Log,
		UseCases: func(actor admin.Actor, watcher, slot string) opspage.UseCases {
			return opspage.Of(operator.For(actor).ForWatcher(watcher).ForSlot(slot))
		},
	})
}

// AccessOf returns the configured rules of who may use the page and the API.
func AccessOf(admin *config.Admin) httpapi.Access {
	out := httpapi.Access{
		Tokens:    func() httpapi.Tokens { return *tokensOf(admin) },
		Session:   admin.Session,
		Operators: admin.Operators,
		Anonymous: admin.Anonymous,
		Payloads:  admin.Payloads,
		Local:     admin.IsLocal(),
		Hosts:     admin.Hosts,
		Rate:      admin.Rate,
		BehindTLS: admin.BehindTLS,
	}

	if admin.Proxy != nil {
		out.ProxyHeader = admin.Proxy.Header
		out.ProxyFrom = admin.Proxy.Networks()
	}

	return out
}

func tokensOf(admin *config.Admin) *httpapi.Tokens {
	return &httpapi.Tokens{Operator: admin.Token.Reveal(), Viewer: admin.ViewerToken.Reveal()}
}

// Reload uses the tokens of a, and returns the keys of those that are new. Sessions of an old token end.
func (o *Server) Reload(admin *config.Admin) (applied []string) {
	next := tokensOf(admin)
	last := o.tokens.Swap(next)
	if last.Operator != next.Operator {
		applied = append(applied, "http.admin.token")
	}
	if last.Viewer != next.Viewer {
		applied = append(applied, "http.admin.viewer_token")
	}
	return applied
}

// Option makes a relay serve the operators' page and API if http.admin is set.
func Option() process.Option {
	build := func(cfg config.Config, version string, log *slog.Logger, metricSet *metrics.Set) (process.Listener, error) {
		return New(cfg, version, log, metricSet)
	}
	return process.WithOperators(build)
}

// Addr returns the address that the server listens on, with the actual port.
func (o *Server) Addr() string { return o.server.Addr() }

// Close closes a server that is never run.
func (o *Server) Close() error {
	o.disconnect()
	return o.server.Close()
}

// Run serves until ctx ends.
func (o *Server) Run(ctx context.Context) error {
	defer o.disconnect()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return o.server.Run(ctx) })
	group.Go(func() error { return o.operator.Run(ctx) })
	return group.Wait()
}
