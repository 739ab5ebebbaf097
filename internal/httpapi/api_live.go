package httpapi

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/sse"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/logging"
)

const (
	livePath    = "/api/v1/live"
	maxLive     = 32 // clients at a time
	liveEvery   = time.Second
	liveFor     = 30 * time.Minute // then a client comes again, and is asked who it is
	liveCall    = 10 * time.Second // one look at the servers
	liveStopped = 5 * time.Second  // a client that has lost the stream waits so long
)

// who says what the caller is taken for.
type who struct {
	Name     string `json:"name"`
	Source   string `json:"source" doc:"The way and the proof: api/token, api/certificate, api/proxy or api/anonymous."`
	Role     string `json:"role" enum:"viewer,operator"`
	Payloads bool   `json:"payloads" doc:"May see payloads where it asks for them."`
	Watcher  string `json:"watcher" doc:"Of this process's configuration."`
	Version  string `json:"version" doc:"Of this process."`
}

// checks is the answer of health.
type checks struct {
	Checks []admin.Check `json:"checks"`
}

// LiveProblem says that the figures could not be read.
type LiveProblem struct {
	Detail string `json:"detail"`
}

// live bounds the clients of the stream and lets them share what is read.
type live struct {
	room chan struct{}

	mu     sync.Mutex
	shared map[string]*snapshot
}

type snapshot struct {
	mu   sync.Mutex
	at   time.Time
	last admin.Overview
	err  error
}

func newLive() *live {
	return &live{room: make(chan struct{}, maxLive), shared: map[string]*snapshot{}}
}

// overview is one that is at most as old as the interval; of several clients one reads.
func (l *live) overview(ctx context.Context, op admin.Operator) (admin.Overview, error) {
	l.mu.Lock()
	s := l.shared[op.Watcher]
	if s == nil {
		if len(l.shared) >= maxLive { // names that nobody looks at any more
			clear(l.shared)
		}
		s = &snapshot{}
		l.shared[op.Watcher] = s
	}
	l.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.at) < liveEvery*9/10 {
		return s.last, s.err
	}
	// Not the client's context: others wait for the same.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), liveCall)
	defer cancel()
	s.last, s.err = op.Overview(ctx)
	s.at = time.Now()
	return s.last, s.err
}

func (a *api) figures() {
	look(a, "/health", "health", "The named checks", func(ctx context.Context, op admin.Operator, _ *Empty) (checks, error) {
		o, err := op.Overview(ctx)
		return checks{o.Checks}, err
	})
	look(a, "/ping", "ping", "Whether MongoDB answers, and its clock", func(ctx context.Context, op admin.Operator, _ *Empty) (admin.Pong, error) {
		return op.Ping(ctx)
	})
	look(a, "/whoami", "who-am-i", "What the caller is taken for", func(ctx context.Context, _ admin.Operator, _ *Empty) (who, error) {
		c, _ := admin.CallerOf(ctx)
		return who{Name: c.Actor.Name, Source: c.Actor.Source, Role: c.Role, Payloads: c.Payloads, Watcher: a.operator.Watcher, Version: a.operator.Version}, nil
	})
	sse.Register(a.API, huma.Operation{
		Method: http.MethodGet, Path: livePath, OperationID: "live", Summary: "The overview once a second, as server-sent events",
		Description: "A bounded number of clients; more are told to come again.", Errors: []int{401, 403, 421, 422, 429, 503},
		Middlewares: huma.Middlewares{a.admit, a.seat}, Extensions: map[string]any{role: admin.RoleViewer},
	}, map[string]any{"overview": admin.Overview{}, "problem": LiveProblem{}}, a.stream)
}

// seat takes one of the places for the time of the stream.
func (a *api) seat(ctx huma.Context, next func(huma.Context)) {
	select {
	case a.live.room <- struct{}{}:
		defer func() { <-a.live.room }()
		next(ctx)
	default:
		ctx.SetHeader("Retry-After", itoa(int(liveStopped.Seconds())))
		_ = huma.WriteErr(a.API, ctx, http.StatusServiceUnavailable, "too many clients follow the figures") // a client that went away is not our concern
	}
}

// stream sends an overview every second until the client goes away or the time is up.
func (a *api) stream(ctx context.Context, in *Empty, send sse.Sender) {
	ctx, cancel := context.WithTimeout(ctx, liveFor)
	defer cancel()
	op := a.desk(ctx, in.Watcher)
	tick := time.NewTicker(liveEvery)
	defer tick.Stop()
	for n := 1; ; n++ {
		o, err := a.live.overview(ctx, op)
		msg := sse.Message{ID: n, Data: o, Retry: int(liveStopped.Milliseconds())}
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
