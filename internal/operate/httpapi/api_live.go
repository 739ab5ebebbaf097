package httpapi

import (
	"context"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/sse"

	"github.com/outrelay/outrelay/internal/base/logging"
	"github.com/outrelay/outrelay/internal/operate/admin"
)

const (
	livePath      = "/api/v1/live"
	maxLive       = 32 // concurrent clients who are operators, and as many others
	liveEvery     = time.Second
	liveFor       = 30 * time.Minute // then the client reconnects and is authenticated again
	liveReadTime  = 10 * time.Second // bounds one read of the overview
	liveReconnect = 5 * time.Second  // wait of a client that has lost the stream
)

// who describes the caller.
type who struct {
	Name     string `json:"name"`
	Source   string `json:"source" doc:"How the caller logged in: api/token, api/certificate, api/proxy or api/anonymous."`
	Role     string `json:"role" enum:"viewer,operator"`
	Payloads bool   `json:"payloads" doc:"May see payloads on request."`
	Watcher  string `json:"watcher" doc:"The configured watcher of this process."`
	Version  string `json:"version" doc:"Of this process."`
}

// LiveProblem is sent if the figures could not be read.
type LiveProblem struct {
	Detail string `json:"detail"`
}

// live bounds the clients of the stream, and shares one overview among them.
type live struct {
	// Operators have their own seats, so that others cannot keep them out.
	operators, others chan struct{}

	mu        sync.Mutex
	byWatcher map[string]*snapshot
}

// snapshot is the last overview of one watcher.
type snapshot struct {
	mu       sync.Mutex
	readAt   time.Time
	overview admin.Overview
	err      error
}

func newLive() *live {
	return &live{operators: make(chan struct{}, maxLive), others: make(chan struct{}, maxLive), byWatcher: map[string]*snapshot{}}
}

// overview returns an overview that is at most as old as the interval. If several clients need a new
// one, only one of them reads it.
func (l *live) overview(ctx context.Context, op admin.Operator) (admin.Overview, error) {
	l.mu.Lock()
	cached := l.byWatcher[op.Watcher]
	if cached == nil {
		// There are never more clients than that, so some of the names have no client any more.
		if len(l.byWatcher) >= 2*maxLive {
			clear(l.byWatcher)
		}
		cached = &snapshot{}
		l.byWatcher[op.Watcher] = cached
	}
	l.mu.Unlock()

	// The lock of one watcher serializes its readers, and does not block clients of other watchers.
	cached.mu.Lock()
	defer cached.mu.Unlock()
	// A tick that comes a little early would otherwise read twice in one interval.
	if time.Since(cached.readAt) < liveEvery*9/10 {
		return cached.overview, cached.err
	}

	// The read must not end with this client, because other clients wait for the result.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), liveReadTime)
	defer cancel()
	cached.overview, cached.err = op.Overview(ctx)
	cached.readAt = time.Now()
	return cached.overview, cached.err
}

func (a *api) addFigures() {
	addList(a, "/problems", "list-problems", "List everything that is wrong, with cause, consequence and fix, failures first", "problems",
		func(ctx context.Context, op admin.Operator, _ *Empty) ([]admin.Problem, error) {
			overview, err := op.Overview(ctx)
			return overview.Problems, err
		})

	addAction(a, "/problems/acknowledge", "acknowledge-problem", "Acknowledge lost history or discarded events, so that it is no problem any more",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Body struct {
				ID string `json:"id" pattern:"^[0-9a-f]{24}$" doc:"The field acknowledge of the problem."`
			}
		},
		) (done, error) {
			return done{true, "acknowledged; the entry is in the audit log"}, op.Acknowledge(ctx, input.Body.ID)
		})

	addQuery(a, "/ping", "ping", "Check whether MongoDB and Kafka respond, and read MongoDB's clock",
		func(ctx context.Context, op admin.Operator, _ *Empty) (admin.Pong, error) {
			return op.Ping(ctx)
		})

	addQuery(a, "/whoami", "who-am-i", "Show the identity and role of the caller",
		func(ctx context.Context, _ admin.Operator, _ *Empty) (who, error) {
			caller, _ := admin.CallerOf(ctx)
			return who{
				Name:     caller.Actor.Name,
				Source:   caller.Actor.Source,
				Role:     caller.Role,
				Payloads: caller.Payloads,
				Watcher:  a.operator.Watcher,
				Version:  a.operator.Version,
			}, nil
		})

	sse.Register(a.API, huma.Operation{
		Method:      http.MethodGet,
		Path:        livePath,
		OperationID: "live",
		Summary:     "Stream the overview once per second, as server-sent events",
		Description: "The number of clients is limited. Further clients get the status 503.",
		Errors:      []int{401, 403, 421, 422, 429, 503},
		Middlewares: huma.Middlewares{a.checkRole, a.limitLive},
		Extensions:  map[string]any{roleExtension: admin.RoleViewer},
	}, map[string]any{"overview": admin.Overview{}, "problem": LiveProblem{}}, a.streamOverview)
}

// limitLive rejects clients above the limit. The others occupy a seat until their stream ends.
func (a *api) limitLive(ctx huma.Context, next func(huma.Context)) {
	seats := a.live.others
	if caller, _ := admin.CallerOf(ctx.Context()); caller.Operator() {
		seats = a.live.operators
	}
	select {
	case seats <- struct{}{}:
		defer func() { <-seats }()
		next(ctx)
	default:
		ctx.SetHeader("Retry-After", strconv.Itoa(int(liveReconnect.Seconds())))

		// The error of writing is ignored: the client is gone.
		_ = huma.WriteErr(a.API, ctx, http.StatusServiceUnavailable, "too many clients stream the figures")
	}
}

// streamOverview sends an overview every second until the client disconnects or liveFor has passed.
// The stream ends after a while, so that a changed role or a revoked login takes effect.
func (a *api) streamOverview(ctx context.Context, input *Empty, send sse.Sender) {
	ctx, cancel := context.WithTimeout(ctx, liveFor)
	defer cancel()
	op := a.operatorFor(ctx, input.Watcher)
	tick := time.NewTicker(liveEvery)
	defer tick.Stop()

	for n := 1; ; n++ {
		overview, err := a.live.overview(ctx, op)
		msg := sse.Message{ID: n, Data: overview, Retry: int(liveReconnect.Milliseconds())}
		// The stream goes on after an error: the page shows the problem until an overview succeeds.
		if err != nil {
			msg.Data = LiveProblem{logging.Clean(err.Error())}
		}
		if ctx.Err() != nil || send(msg) != nil {
			return
		}

		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
