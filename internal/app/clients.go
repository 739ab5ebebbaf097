package app

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/metrics"
	"github.com/outrelay/outrelay/internal/mongodb"
)

// clients contains the clients for MongoDB. There are two, so that a stalled stream cannot delay
// the lease.
type clients struct {
	stream *mongo.Client // the change stream and reads of the outbox; without a timeout
	state  *mongo.Client // lease, exceptions, nodes, events
}

// newClients returns the clients. It does no I/O: the driver connects at the first use. m counts
// renewed certificates. It may be nil.
func newClients(cfg config.MongoDB, node string, slots int, log *slog.Logger, m *metrics.Set) (*clients, error) {
	pref, err := parseReadPreference(cfg.ReadPreference)
	if err != nil {
		return nil, fmt.Errorf("mongodb.read_preference: %w", err)
	}

	stream := changestream.Tune(options.Client().ApplyURI(cfg.URI.Reveal())).
		SetAppName("outrelay stream " + node).
		SetReadConcern(readconcern.Majority()).
		SetWriteConcern(writeconcern.Majority()).
		SetReadPreference(pref)
	stream.Timeout = nil

	state := lease.ClientOptions(cfg.URI.Reveal()).SetAppName("outrelay state " + node)
	state.Timeout = nil
	// Each standby of a slot waits on a connection.
	if slots > 1 {
		state.SetMaxPoolSize(uint64(8 + 4*(slots-1)))
	}

	for _, opts := range []*options.ClientOptions{stream, state} {
		err := SecureMongo(opts, cfg.TLS, log, func(ok bool) { m.Reloaded(metrics.Certificates, ok) })
		if err != nil {
			return nil, fmt.Errorf("mongodb.tls: %w", err)
		}
	}

	c := &clients{}
	if c.stream, err = mongo.Connect(stream); err != nil {
		return nil, fmt.Errorf("mongodb.uri: %w", err)
	}
	if c.state, err = mongo.Connect(state); err != nil {
		return nil, fmt.Errorf("mongodb.uri: %w", err)
	}
	return c, nil
}

// disconnect closes the clients. Errors are ignored: the process ends, or makes new clients.
func (c *clients) disconnect(ctx context.Context) {
	for _, cl := range []*mongo.Client{c.stream, c.state} {
		if cl != nil {
			_ = cl.Disconnect(ctx)
		}
	}
}

func parseReadPreference(name string) (*readpref.ReadPref, error) {
	mode, err := readpref.ModeFromString(name)
	if err != nil {
		return nil, err
	}
	return readpref.New(mode)
}

// serverClock follows the clock of the server, never the clock of this machine. Due times and
// expiries are compared with it. It is safe for concurrent use.
type serverClock struct{ skew atomic.Int64 }

func (c *serverClock) now() time.Time { return time.Now().Add(time.Duration(c.skew.Load())) }

// sync reads the time of the server. It assumes that the reply took half of the round trip.
func (c *serverClock) sync(ctx context.Context, client *mongo.Client) error {
	sent := time.Now()
	now, err := mongodb.ServerTime(ctx, client)
	if err != nil {
		return err
	}
	c.skew.Store(int64(now.Sub(sent.Add(time.Since(sent) / 2))))
	return nil
}

// StateDatabase connects to the state database, for commands. The returned function closes the
// connection.
func StateDatabase(cfg config.Config) (*mongo.Database, func(), error) {
	c, err := newClients(cfg.MongoDB, cfg.Node, 1, slog.New(slog.DiscardHandler), nil)
	if err != nil {
		return nil, nil, err
	}
	return c.state.Database(cfg.MongoDB.State), func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		c.disconnect(ctx)
	}, nil
}
