// Package connect makes the clients of the configured servers, and looks up the configured
// collections and topics on them. The relay uses it, and so do the commands.
//
// Blocking: functions without a context do no I/O, except a DNS lookup for a mongodb+srv address. The others block
// until the server responds or their context ends.
package connect

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"golang.org/x/crypto/ocsp"

	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/pool"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// Clients contains the clients for MongoDB. There are two, so that a stalled stream cannot delay
// the lease.
//
// A client does not determine concerns, preference and encoding: see [mongodb.Database].
type Clients struct {
	Stream *mongo.Client // the change stream and reads of the outbox; without a timeout
	State  *mongo.Client // lease, waiting envelopes, nodes, audit log

	// StreamPreference selects the member for the change stream.
	StreamPreference *readpref.ReadPref

	ofHost bool // both are the client of the host, which disconnects it
}

// MongoHost has the connection to MongoDB that an embedding program supplies: nothing, or one of the fields.
type MongoHost struct {
	Options *options.ClientOptions // replaces mongodb.uri and mongodb.tls
	Client  *mongo.Client          // is used for everything
}

// NewClients returns the clients, which connect in the background by the settings of host, or without it by cfg.URI
// and cfg.TLS. metricSet counts renewed certificates. It may be nil.
func NewClients(
	cfg config.MongoDB, host MongoHost, node string, slots int, log *slog.Logger, metricSet *metrics.Set,
) (*Clients, error) {
	mode, err := readpref.ModeFromString(cfg.ReadPreference)
	if err != nil {
		return nil, fmt.Errorf("mongodb.read_preference: %w", err)
	}
	clients := &Clients{}
	if clients.StreamPreference, err = readpref.New(mode); err != nil {
		return nil, fmt.Errorf("mongodb.read_preference: %w", err)
	}

	// With the client of the service, both have the same connections.
	if host.Client != nil {
		clients.Stream, clients.State, clients.ofHost = host.Client, host.Client, true
		return clients, nil
	}

	from := host.Options
	if from == nil {
		from = options.Client().ApplyURI(cfg.URI.Reveal())
	}
	// The stream has its own client, so that its long reads never delay the lease.
	stream := changes.Tune(connectionOptions(from)).SetAppName("outrelay stream " + node)
	state := lease.Tune(connectionOptions(from)).SetAppName("outrelay state " + node)
	// Each slot has calls of its own.
	if slots > 1 {
		state.SetMaxPoolSize(uint64(8 + 4*(slots-1)))
	}

	if metricSet != nil {
		stream.SetPoolMonitor(monitorPool(stream.PoolMonitor, &metricSet.Pool, "stream"))
		state.SetPoolMonitor(monitorPool(state.PoolMonitor, &metricSet.Pool, "state"))
	}
	for _, opts := range []*options.ClientOptions{stream, state} {
		opts.SetMonitor(pauseRetries(opts.Monitor))
		err := SecureMongo(opts, cfg.TLS, log, func(ok bool) { metricSet.Reloaded(metrics.Certificates, ok) })
		if err != nil {
			return nil, fmt.Errorf("mongodb.tls: %w", err)
		}
		// Neither client is connected if the other one cannot be.
		if err := opts.Validate(); err != nil {
			return nil, fmt.Errorf("mongodb.uri: %w", err)
		}
	}

	// The driver connects in the background, so these errors are errors of the options.
	if clients.Stream, err = connectWithLogins(stream, log); err != nil {
		return nil, fmt.Errorf("mongodb.uri: %w", err)
	}
	if clients.State, err = connectWithLogins(state, log); err != nil {
		return nil, fmt.Errorf("mongodb.uri: %w", err)
	}
	return clients, nil
}

// monitorPool returns a monitor that sets the metrics of a client. next is the monitor of the host, or nil.
func monitorPool(next *event.PoolMonitor, set *metrics.Pool, client string) *event.PoolMonitor {
	open, inUse := set.Connections.WithLabelValues(client, "open"), set.Connections.WithLabelValues(client, "in_use")
	waiting := set.Connections.WithLabelValues(client, "waiting")
	checkouts, took := set.Checkouts.WithLabelValues(client), set.CheckoutSeconds.WithLabelValues(client)

	return pool.Monitor(next, func(figures pool.Figures, ended *pool.Checkout) {
		open.Set(float64(figures.Open))
		inUse.Set(float64(figures.InUse))
		waiting.Set(float64(figures.Waiting))
		switch {
		case ended == nil:
		case ended.Failed != "":
			set.CheckoutsFailed.WithLabelValues(client, ended.Failed).Inc()
		default:
			checkouts.Inc()
			took.Add(ended.Took.Seconds())
		}
	})
}

// connectionOptions returns a copy of given without the options that change the meaning of reads and
// writes: see [mongodb.Database]. It also removes Timeout, which would end the wait for an event, and the stable API,
// which may be strict and then has no commands of operators.
func connectionOptions(given *options.ClientOptions) *options.ClientOptions {
	options := *given
	options.Timeout, options.ServerAPIOptions = nil, nil
	options.ReadConcern, options.WriteConcern, options.ReadPreference = nil, nil, nil
	options.BSONOptions, options.Registry, options.AutoEncryptionOptions = nil, nil, nil
	return &options
}

// Disconnect closes the clients, within two seconds. Errors are ignored: the process ends, or makes
// new clients. It does not close the client of a host, and leaves out a client that is nil.
func (c *Clients) Disconnect(ctx context.Context) {
	if c.ofHost {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	for _, cl := range []*mongo.Client{c.Stream, c.State} {
		if cl != nil {
			_ = cl.Disconnect(ctx)
		}
	}
}

// StateDatabase connects to the state database, for operators. The returned function closes the
// connection.
func StateDatabase(cfg config.Config, host MongoHost) (state.Database, func(), error) {
	clients, err := NewClients(cfg.MongoDB, host, cfg.Node, 1, slog.New(slog.DiscardHandler), nil)
	if err != nil {
		return state.Database{}, nil, err
	}
	return state.Open(clients.State, cfg.State), func() { clients.Disconnect(context.Background()) }, nil
}

// SecureMongo sets the TLS configuration tlsConfig in opts, in addition to the TLS options of the URI. If tlsConfig
// is nil, only the URI applies. The files are checked for changes at each connection, and reloaded
// is called for each change: see [config.TLS.Source].
//
// The driver takes one configuration for the lifetime of a client, and its certificate authorities
// cannot change. If they come from a file, the handshake is therefore done while dialing, with the
// same rules, and the driver gets a connection that is ready. Then the driver does not send an OCSP
// request to the issuer of the certificate. An OCSP response that the server staples is still
// checked.
//
// The log of the driver stays off, even if its environment variables turn it on: at its finest
// level it prints documents.
func SecureMongo(opts *options.ClientOptions, tlsConfig *config.TLS, log *slog.Logger, reloaded func(ok bool)) error {
	opts.SetLoggerOptions(options.Logger().SetSink(noLog{}))
	next, err := tlsConfig.Source(log, reloaded)
	if next == nil || err != nil {
		return err
	}

	// Without a file of authorities, the configuration reads the client certificate at each
	// handshake.
	if tlsConfig.CA == "" {
		opts.SetTLSConfig(next())
		return nil
	}
	opts.SetTLSConfig(nil)
	opts.SetDialer(tlsDialer(next))
	return nil
}

// noLog discards the log of the driver.
type noLog struct{}

// Info implements the driver's sink.
func (noLog) Info(int, string, ...any) {}

// Error implements the driver's sink.
func (noLog) Error(error, string, ...any) {}

// tlsDialer dials with TLS. It is called for the configuration of each connection.
type tlsDialer func() *tls.Config

// DialContext implements the driver's dialer.
func (d tlsDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	nc, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}

	// Each host has its own name, and its certificate must not be revoked.
	conf := d().Clone()
	if conf.ServerName == "" {
		conf.ServerName = host
	}
	if !conf.InsecureSkipVerify {
		conf.VerifyConnection = verifyNotRevoked
	}

	conn := tls.Client(nc, conf)
	if err := conn.HandshakeContext(ctx); err != nil {
		_ = nc.Close()
		return nil, err
	}
	return conn, nil
}

var errRevoked = errors.New("the server's certificate was revoked by its issuer")

// verifyNotRevoked returns an error if the server staples a response of the issuer's OCSP responder
// to its certificate, and the certificate is revoked according to the response.
func verifyNotRevoked(state tls.ConnectionState) error {
	if len(state.OCSPResponse) == 0 || len(state.VerifiedChains) == 0 || len(state.VerifiedChains[0]) < 2 {
		return nil
	}
	response, err := ocsp.ParseResponseForCert(state.OCSPResponse, state.PeerCertificates[0], state.VerifiedChains[0][1])
	if err == nil && response.Status == ocsp.Revoked {
		return errRevoked
	}
	return nil
}

// DescribeOutage returns the problem that all errors of an outage share, for the log. It returns "" for other errors.
func DescribeOutage(err error) string {
	if mongo.IsNetworkError(err) || mongodb.IsDriverTimeout(err) || mongodb.IsConnectionLost(err) || errors.Is(err, changes.ErrTimeout) {
		return "MongoDB does not respond"
	}
	if errors.Is(err, kafkawire.ErrAway) {
		return "Kafka cannot be used"
	}
	return ""
}
