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
	"github.com/outrelay/outrelay/internal/store"
)

// clients are the connections to MongoDB: a stalled stream must not hold up the lease, so each has its own.
type clients struct {
	stream *mongo.Client // the change stream and reads of the outbox; no time-out of the client's own
	state  *mongo.Client // lease, exceptions, nodes, events
}

// newClients makes the clients. It does no I/O: the driver connects when it is used. m, which may be
// nil, counts renewed certificates.
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
	if slots > 1 { // each standby of a slot waits on a connection
		state.SetMaxPoolSize(uint64(8 + 4*(slots-1)))
	}
	for _, opts := range []*options.ClientOptions{stream, state} {
		if err := SecureMongo(opts, cfg.TLS, log, func(ok bool) { m.Reloaded(metrics.Certificates, ok) }); err != nil {
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

func (c *clients) disconnect(ctx context.Context) {
	for _, cl := range []*mongo.Client{c.stream, c.state} {
		if cl != nil {
			_ = cl.Disconnect(ctx) // the process ends or starts anew; there is nobody to tell
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

// serverClock follows the server's clock: what is due or expired is judged by it, never by this machine's own.
type serverClock struct{ skew atomic.Int64 }

func (c *serverClock) now() time.Time { return time.Now().Add(time.Duration(c.skew.Load())) }

// sync asks the server for its time; half of the round trip is taken as the way back.
func (c *serverClock) sync(ctx context.Context, client *mongo.Client) error {
	sent := time.Now()
	now, err := store.ServerTime(ctx, client)
	if err != nil {
		return err
	}
	c.skew.Store(int64(now.Sub(sent.Add(time.Since(sent) / 2))))
	return nil
}

// StateDatabase connects to the state database alone, for commands that read it; the function ends the connection.
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
