package changestream

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/relay/changes"
)

// Config configures a Stream.
type Config struct {
	// Client must have no client-wide Timeout, which would end the stream while it is idle. Tune sets
	// the other options, so that the client detects a fault within seconds.
	Client *mongo.Client
	Scope  *changes.Scope

	// ReadPreference selects the member that the stream reads from. Defaults to that of the client.
	ReadPreference *readpref.ReadPref

	// Skip lists events that the stream does not read, because an operator has ordered it.
	Skip []changes.Skip

	Log     *slog.Logger // defaults to slog.Default
	Metrics Metrics
}

// pace has the times and sizes of a stream. Tests change them before Run.
type pace struct {
	// maxAwait limits how long the server waits before it sends an empty response. It does not affect
	// latency, only the idle checkpoint.
	maxAwait time.Duration

	// batchSize limits the documents of a batch. A batch near 2 MiB has fewer.
	batchSize int

	// patience is how long a response may take in addition to maxAwait. After that the stream is
	// reopened. After a timeout without progress it doubles, up to an hour, because a server that
	// searches a backlog of foreign entries responses only at the end.
	patience time.Duration

	// watchdog is how long an idle stream's token may stand still while the cluster time moves (N26).
	// After that the stream is reopened. After the same time again, it is a gap. It is longer than the 10 s after which a
	// sharded cluster moves the tokens of idle shards, and twice it is shorter than the 30 s after which a term ends whose
	// stages do not move.
	watchdog time.Duration

	// configRetry is the wait between attempts after a configuration error, such as a missing
	// privilege.
	configRetry time.Duration

	// unexplained is how long Run retries errors without a class before they are a gap, if there is
	// no progress. It makes at least five attempts.
	unexplained time.Duration

	// backoff is the wait between attempts after a temporary fault.
	backoff retry.Policy
}

var defaultPace = pace{
	maxAwait:    500 * time.Millisecond,
	batchSize:   changes.MaxDocuments,
	patience:    3 * time.Second,
	watchdog:    13 * time.Second,
	configRetry: 30 * time.Second,
	unexplained: time.Minute,
	backoff:     retry.Reopen,
}

// Stream is one watcher's change stream.
type Stream struct {
	cfg  Config
	pace pace

	// refetchPatience replaces the patience of pace for Refetch after a timeout.
	refetchPatience time.Duration

	mu      sync.Mutex
	state   State
	onState func(State) // nil outside of tests
}

// New returns a stream, or an error if the client or the scope is missing. It does no I/O.
func New(cfg Config) (*Stream, error) {
	if cfg.Client == nil || cfg.Scope == nil {
		return nil, errors.New("change stream: a client and a scope are needed")
	}

	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	cfg.Log = cfg.Log.With("stream", cfg.Scope.String())

	return &Stream{cfg: cfg, pace: defaultPace, state: State{Phase: Opening, Since: time.Now()}}, nil
}

// Run reads from start on and sends batches to out. It returns the cause of ctx when ctx ends, or a
// *GapError, an *InvalidateError, or the error of a disconnected client. It retries after every other
// fault. It does not close out. Only one Run may be active at a time.
func (s *Stream) Run(ctx context.Context, start changes.Start, out chan<- *changes.Batch) error {
	defer s.setState(Stopped, 0, "")
	defer s.noteProgress()

	run, err := s.newRun(start, out)
	for err == nil {
		err = run.readSession(ctx)
		if ctx.Err() != nil {
			break
		}
		err = run.handleError(ctx, err)
	}

	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}
