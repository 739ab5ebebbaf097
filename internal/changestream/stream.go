package changestream

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/resume"
)

// Config says what to watch, with what, and who wants to know.
type Config struct {
	// Client is used for the stream alone. It must have no client-wide Timeout, which would end the stream while it idles; Tune
	// sets the other options that make a fault show in seconds.
	Client *mongo.Client
	Scope  *Scope

	// MaxAwait bounds how long the server waits before it answers that there is nothing. It has no effect on latency, only on the idle
	// checkpoint. Defaults to 500 ms.
	MaxAwait time.Duration
	// BatchSize bounds the documents of a batch. Defaults to 2,000; a batch near 4 MiB has fewer.
	BatchSize int
	// Patience is how long beyond MaxAwait a reply may take before the stream is reopened. After a time-out without
	// progress it doubles, up to an hour: a server that searches a backlog of foreign entries answers only at its end.
	// Defaults to 3 s.
	Patience time.Duration
	// Watchdog is how long an idle stream's token may stand still while the cluster goes on (N26); then the stream is
	// reopened, and after the same time again it is a gap. Defaults to 10 s.
	Watchdog time.Duration
	// ConfigRetry is the wait between attempts while a privilege or the like is missing. Defaults to 30 s.
	ConfigRetry time.Duration
	// Unexplained is how long errors that are not known to pass are waited out without progress before they are a gap, after
	// five attempts at the least. Defaults to 60 s.
	Unexplained time.Duration
	// Backoff is the wait between attempts after a passing fault. Defaults to retry.Reopen.
	Backoff retry.Policy

	Log     *slog.Logger // defaults to slog.Default
	Metrics Metrics
	// OnState hears of every change of state, from the goroutine of Run; it must not block.
	OnState func(State)
}

// Start says where the stream begins. Exactly one of Position, At and Now is needed; Position and At together start at a
// time and drop what the position is known to have behind it (N23).
type Start struct {
	// Position is the checkpoint: the stream delivers what comes after its token, or from its cluster time on if it has none.
	Position resume.Position
	// PipelineHash and Collections are the checkpoint's. If the scope's hash is another, or the collection of a collection
	// stream has another UUID today, the token is not trusted: the stream starts at the position's time and drops what is
	// at or before the token (N23). Empty means not known, which changes nothing.
	PipelineHash string
	Collections  []resume.Collection
	// At starts at a time of the cluster, inclusive.
	At *bson.Timestamp
	// Now starts at the present. What is in the outbox already is never delivered.
	Now bool
}

// Stream is one watcher's change stream.
type Stream struct {
	cfg Config

	mu    sync.Mutex
	state State
}

// New checks the configuration and fills in its defaults. It does no I/O.
func New(cfg Config) (*Stream, error) {
	if cfg.Client == nil || cfg.Scope == nil {
		return nil, errors.New("change stream: a client and a scope are needed")
	}
	if cfg.MaxAwait < 0 || cfg.BatchSize < 0 || cfg.Patience < 0 || cfg.Watchdog < 0 || cfg.ConfigRetry < 0 || cfg.Unexplained < 0 {
		return nil, errors.New("change stream: a duration or size is negative")
	}
	defaults(&cfg.MaxAwait, 500*time.Millisecond)
	defaults(&cfg.BatchSize, maxDocuments)
	defaults(&cfg.Patience, 3*time.Second)
	defaults(&cfg.Watchdog, 10*time.Second)
	defaults(&cfg.ConfigRetry, 30*time.Second)
	defaults(&cfg.Unexplained, time.Minute)
	if cfg.Backoff == (retry.Policy{}) {
		cfg.Backoff = retry.Reopen
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	cfg.Log = cfg.Log.With("stream", cfg.Scope.String())
	return &Stream{cfg: cfg, state: State{Phase: Opening, Since: time.Now()}}, nil
}

func defaults[T time.Duration | int](v *T, to T) {
	if *v == 0 {
		*v = to
	}
}

// Run reads from start on and hands batches on until ctx ends, whose cause it returns, or until a *GapError or an
// *InvalidateError. Every other fault it waits out. It does not close out. One Run at a time.
func (s *Stream) Run(ctx context.Context, start Start, out chan<- *Batch) error {
	defer s.enter(Stopped, 0, "")
	r, err := s.begin(ctx, start, out)
	for err == nil {
		err = r.term(ctx)
		if ctx.Err() != nil {
			break
		}
		err = r.decide(ctx, err)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}
