package lease

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/internal/metrics"
)

// Config says which watcher document to own and how. Collection, ID and Node are required.
type Config struct {
	// Collection holds the watcher documents, `watchers` of the state database. Its client should be used for nothing
	// else but short writes (see ClientOptions): a pool that hangs elsewhere would cost the lease.
	Collection *mongo.Collection
	// ID is `<watcher>/<i>of<N>`, such as "orders/0of1" (N28).
	ID string
	// Node names this process among its peers; no two processes may share it.
	Node string
	// Address and Version are stored for whoever asks who the owner is.
	Address, Version string
	// TTL is how long an owner that stopped renewing keeps the lease. Defaults to 5 s; at least 100 ms.
	TTL time.Duration
	// Renew is the longest time between two renewals. Defaults to TTL/5; at most TTL/3.
	Renew time.Duration
	// CheckpointEvery is how often a position that moved is written; each such write renews. Defaults to 250 ms, at
	// most Renew.
	CheckpointEvery time.Duration
	// Guard is the least time before the expiry at which work is suspended. It is raised to 20 % of TTL and to twice the
	// 99th percentile of the renewals' round trips, and never above half of TTL.
	Guard time.Duration
	// CallTimeout bounds each call to the server. Defaults to 40 % of TTL within 1 s … 2 s.
	CallTimeout time.Duration
	// ReplicaSetID identifies the deployment (N5). Empty asks the server, which needs the action replSetGetConfig on the
	// cluster (role clusterMonitor); without it the check is left out, with a warning.
	ReplicaSetID string
	// NodeAlive tells whether the node of that name gave a sign of life of late. With it a pin to a dead node never
	// takes the lease from its owner; without it such a pin lapses 10 × TTL after the lease expired.
	NodeAlive func(ctx context.Context, node string) bool
	// Absent is asked before a document that is not there is made by an attempt; its error ends Acquire. It should be nil for what
	// passes by itself. nil makes it always.
	Absent func(ctx context.Context) error
	// Admit is asked before each attempt at a lease that seems free; pinned says that it is pinned to this node. It returns
	// how long to wait before it is asked again, or 0 and what to call with the outcome of the attempt. nil admits always.
	Admit func(pinned bool) (wait time.Duration, done func(won bool))
	// Paused acquires a watcher that is paused, and does not yield to what operators ask: for who changes the documents of a
	// watcher that was stopped for it.
	Paused bool
	// Log defaults to silence, Metrics to a set that nobody scrapes.
	Log     *slog.Logger
	Metrics *metrics.Set
}

var idPattern = regexp.MustCompile(`^[^/\s]+/(\d{1,4})of(\d{1,4})$`)

// Validate reports every problem of the configuration at once.
func (c Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf("lease: "+format, args...)) }
	if c.Collection == nil {
		bad("a collection for the watcher documents is required")
	}
	if m := idPattern.FindStringSubmatch(c.ID); m == nil {
		bad("id %q is not of the form <watcher>/<i>of<N>, such as orders/0of1", c.ID)
	} else if i, _ := strconv.Atoi(m[1]); true {
		if n, _ := strconv.Atoi(m[2]); i >= n {
			bad("id %q: slot %d is not one of %d", c.ID, i, n)
		}
	}
	if c.Node == "" {
		bad("a node name is required")
	}
	d := c.withDefaults()
	if d.TTL < 100*time.Millisecond {
		bad("ttl %v is below 100ms", d.TTL)
	}
	if d.Renew <= 0 || d.Renew > d.TTL/3 {
		bad("renew %v must be above 0 and at most a third of ttl (%v)", d.Renew, d.TTL)
	}
	if d.CheckpointEvery <= 0 || d.CheckpointEvery > d.Renew {
		bad("checkpoint interval %v must be above 0 and at most renew (%v)", d.CheckpointEvery, d.Renew)
	}
	if d.Guard < 0 || d.Guard > d.TTL/2 {
		bad("guard %v must be at most half of ttl (%v)", d.Guard, d.TTL)
	}
	return errors.Join(errs...)
}

func (c Config) withDefaults() Config {
	if c.TTL == 0 {
		c.TTL = 5 * time.Second
	}
	if c.Renew == 0 {
		c.Renew = c.TTL / 5
	}
	if c.CheckpointEvery == 0 {
		c.CheckpointEvery = min(250*time.Millisecond, c.Renew)
	}
	if c.CallTimeout == 0 {
		c.CallTimeout = min(max(c.TTL*2/5, time.Second), 2*time.Second)
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	c.Metrics = metrics.OrNew(c.Metrics)
	return c
}

// ClientOptions are the settings of a client for leases: it learns of an election within a second and waits for no server
// longer than a lease can bear. The driver's retries are off, because the lease repeats its writes itself, by seq, and a
// retryable findAndModify would store a second copy of the document each time.
func ClientOptions(uri string) *options.ClientOptions {
	return options.Client().ApplyURI(uri).
		SetHeartbeatInterval(time.Second).
		SetConnectTimeout(2 * time.Second).
		SetServerSelectionTimeout(3 * time.Second).
		SetRetryWrites(false).
		SetWriteConcern(writeconcern.Majority()).
		SetMaxPoolSize(8)
}
