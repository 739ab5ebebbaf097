package lease

import (
	"context"
	"log/slog"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/mongodb/concern"
)

// Config configures a [Lease]. Collection, ID, Node and TTL are required. internal/contract/config has the limits of the
// times and the defaults of the command line.
type Config struct {
	// Collection holds the watcher documents: `watchers` of the state database. Use its client for
	// nothing else but short writes (see Tune). If other work exhausts the connection pool,
	// the lease cannot be renewed.
	Collection *mongo.Collection
	// ID is `<watcher>/<i>of<N>`, such as "orders/0of1" (N28).
	ID string
	// Node names this process. No two processes may share a name.
	Node string
	// Address and Version are stored in the document, so that operators can find the owner.
	Address, Version string
	// TTL is how long the lease lasts after the last renewal.
	TTL time.Duration
	// Renew is the longest time between two renewals, less than TTL. Defaults to TTL/5.
	Renew time.Duration
	// CheckpointEvery is how often a changed position is saved. Each such write also renews the lease.
	// Defaults to Renew/4; at most Renew.
	CheckpointEvery time.Duration
	// CallTimeout bounds each call to the server. Defaults to 40 % of TTL, within 1 s to 2 s.
	CallTimeout time.Duration
	// ReplicaSetID identifies the deployment (N5). If it is empty, Acquire reads it from the server,
	// which requires the action replSetGetConfig on the cluster (role clusterMonitor). Without this
	// privilege Acquire logs a warning and skips the check.
	ReplicaSetID string
	// NodeAlive reports whether the named node sent a heartbeat recently. With NodeAlive, a pin to a
	// dead node never takes the lease from its owner. Without it, such a pin lapses 10 × TTL after the
	// lease expired.
	NodeAlive func(ctx context.Context, node string) bool
	// MayCreate is called before an attempt creates a missing document. Its error ends Acquire, so it
	// should return nil for temporary problems. If MayCreate is nil, the document is always created.
	MayCreate func(ctx context.Context) error
	// Trouble, if it is not nil, is called with the error of a transaction that has failed again and again since began, and with
	// nil once none does. It must not block.
	Trouble func(err error, began time.Time)
	// OnStandby, if it is not nil, is called again and again while this process waits for the lease. It must not block.
	OnStandby func()
	// MayAttempt is called before each attempt at a lease that seems free. pinned reports whether the lease
	// is pinned to this node. If MayAttempt returns nil, there is no attempt now. Otherwise the attempt starts and
	// done receives its result. If MayAttempt is nil, every attempt starts.
	MayAttempt func(pinned bool) (done func(won bool))
	// AcquirePaused makes Acquire take a watcher that is paused, and ignore the controls of operators.
	// Commands that change the documents of a stopped watcher use it.
	AcquirePaused bool
	// Log defaults to a logger that discards everything, Metrics to a set that is not served.
	Log     *slog.Logger
	Metrics *metrics.Set
}

func (c Config) withDefaults() Config {
	if c.Renew == 0 {
		c.Renew = c.TTL / 5
	}
	if c.CheckpointEvery == 0 {
		c.CheckpointEvery = c.Renew / 4
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

// Tune sets the options of a client for leases. Servers report an election at once, and the client notices a dead server within seconds. No
// wait for a server outlasts a lease. The driver's retries are off: the lease repeats its writes
// itself, by seq, and a retryable findAndModify would store a second copy of the document for each
// write.
func Tune(clientOptions *options.ClientOptions) *options.ClientOptions {
	return clientOptions.SetHeartbeatInterval(2 * time.Second).
		SetConnectTimeout(2 * time.Second).
		SetServerSelectionTimeout(3 * time.Second).
		SetRetryWrites(false).
		SetWriteConcern(concern.Majority()).
		SetMaxPoolSize(8)
}
