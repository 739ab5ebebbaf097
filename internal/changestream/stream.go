package changestream

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/resume"
)

// Config configures a Stream.
type Config struct {
	// Client must have no client-wide Timeout, which would end the stream while it is idle. Tune sets
	// the other options, so that the client detects a fault within seconds.
	Client *mongo.Client
	Scope  *Scope

	// ReadPreference selects the member that the stream reads from. Defaults to that of the client.
	ReadPreference *readpref.ReadPref

	// MaxAwait limits how long the server waits before it sends an empty reply. It does not affect
	// latency, only the idle checkpoint. Defaults to 500 ms.
	MaxAwait time.Duration

	// BatchSize limits the documents of a batch. Defaults to 2,000. A batch near 4 MiB has fewer.
	BatchSize int

	// Patience is how long a reply may take in addition to MaxAwait. After that the stream is
	// reopened. After a time-out without progress it doubles, up to an hour, because a server that
	// searches a backlog of foreign entries replies only at the end. Defaults to 3 s.
	Patience time.Duration

	// Watchdog is how long an idle stream's token may stand still while the cluster time moves (N26).
	// After that the stream is reopened. After the same time again, it is a gap. Defaults to 10 s.
	Watchdog time.Duration

	// ConfigRetry is the wait between attempts after a configuration error, such as a missing
	// privilege. Defaults to 30 s.
	ConfigRetry time.Duration

	// Unexplained is how long Run retries errors without a class before they are a gap, if there is
	// no progress. It makes at least five attempts. Defaults to 60 s.
	Unexplained time.Duration

	// Backoff is the wait between attempts after a temporary fault. Defaults to retry.Reopen.
	Backoff retry.Policy

	Log     *slog.Logger // defaults to slog.Default
	Metrics Metrics

	// OnState is called after each change of state, from the goroutine of Run. It must not block.
	OnState func(State)
}

// Start is the place where the stream begins. Exactly one of Position, At and Now is needed.
// Position and At together start at the time and drop the events at or before the position (N23).
type Start struct {
	// Position is the checkpoint. The stream delivers the events after its token, or from its cluster
	// time on if it has no token.
	Position resume.Position

	// PipelineHash and Collections are stored in the checkpoint. The token is not used if the scope
	// has another hash, or if the collection of a collection stream now has another UUID. The stream
	// then starts at the position's time and drops the events at or before the token (N23). Empty
	// values are not checked.
	PipelineHash string
	Collections  []resume.Collection

	// At starts at a cluster time, inclusive.
	At *bson.Timestamp

	// Now starts at the present. Events that are already in the outbox are never delivered.
	Now bool
}

// Stream is one watcher's change stream.
type Stream struct {
	cfg Config

	mu    sync.Mutex
	state State
}

// New validates the configuration and sets its defaults. It does no I/O.
func New(cfg Config) (*Stream, error) {
	if cfg.Client == nil || cfg.Scope == nil {
		return nil, errors.New("change stream: a client and a scope are needed")
	}
	if cfg.MaxAwait < 0 || cfg.BatchSize < 0 || cfg.Patience < 0 ||
		cfg.Watchdog < 0 || cfg.ConfigRetry < 0 || cfg.Unexplained < 0 {
		return nil, errors.New("change stream: a duration or size is negative")
	}

	setDefault(&cfg.MaxAwait, 500*time.Millisecond)
	setDefault(&cfg.BatchSize, MaxDocuments)
	setDefault(&cfg.Patience, 3*time.Second)
	setDefault(&cfg.Watchdog, 10*time.Second)
	setDefault(&cfg.ConfigRetry, 30*time.Second)
	setDefault(&cfg.Unexplained, time.Minute)
	if cfg.Backoff == (retry.Policy{}) {
		cfg.Backoff = retry.Reopen
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	cfg.Log = cfg.Log.With("stream", cfg.Scope.String())

	return &Stream{cfg: cfg, state: State{Phase: Opening, Since: time.Now()}}, nil
}

func setDefault[T time.Duration | int](v *T, to T) {
	if *v == 0 {
		*v = to
	}
}

// Run reads from start on and sends batches to out. It returns the cause of ctx when ctx ends, or a
// *GapError, an *InvalidateError, or the error of a disconnected client. It retries after every other
// fault. It does not close out. Only one Run may be active at a time.
func (s *Stream) Run(ctx context.Context, start Start, out chan<- *Batch) error {
	defer s.setState(Stopped, 0, "")

	r, err := s.newRun(ctx, start, out)
	for err == nil {
		err = r.readSession(ctx)
		if ctx.Err() != nil {
			break
		}
		err = r.handleError(ctx, err)
	}

	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}
