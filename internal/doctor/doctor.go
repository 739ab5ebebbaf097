// Package doctor checks everything outside of outrelay that it depends on: the replica set, the privileges, the oplog, the
// brokers, the topics, the ACLs. It connects as the relay would, and each finding comes with what mends it.
//
// Every check of the list appears in every report, in one order. One that cannot run, because another failed or the time
// was up, says so and is a warning: the cause is a failure of its own. Nothing is changed: documents are only read, the
// creation of a topic is only validated, and the one transactional id that is asked for is the doctor's own, so a relay
// that runs meanwhile is not disturbed. A report takes at most [Limit]. Neither payloads nor secrets are in it.
package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/app"
	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/logging"
	"github.com/outrelay/outrelay/internal/routing"
)

// Limit bounds a report as a whole.
const Limit = 15 * time.Second

// Status is the outcome of a check.
type Status string

// The outcomes.
const (
	OK   Status = "ok"
	Warn Status = "warn" // works, but not as well or as safely as it should; or could not be checked
	Fail Status = "fail" // does not work, or loses events
)

// Check is one line of a report.
type Check struct {
	ID     string `json:"id"`     // stable; the part before the first dot is mongodb, outbox, watcher, config, kafka or topics
	Status Status `json:"status"` // ok, warn, fail
	Detail string `json:"detail"` // what was found
	Fix    string `json:"fix"`    // what mends it, one statement or step a line; "" if nothing has to be
	Why    string `json:"-"`      // why it matters; for people
}

// Report is the answer of `outrelay doctor --json`.
type Report struct {
	Checks []Check `json:"checks"`
}

// Count is the number of checks with that outcome.
func (r Report) Count(s Status) int {
	n := 0
	for _, c := range r.Checks {
		if c.Status == s {
			n++
		}
	}
	return n
}

// Failed reports whether any check failed.
func (r Report) Failed() bool { return r.Count(Fail) > 0 }

// MarshalJSON never writes null for the list.
func (r Report) MarshalJSON() ([]byte, error) {
	type plain Report
	if r.Checks == nil {
		r.Checks = []Check{}
	}
	return json.Marshal(plain(r))
}

// finding is what a step found.
type finding struct {
	status      Status
	detail, fix string
	root        string // the check without which neither this one could run nor those that need it
}

func fine(format string, args ...any) finding {
	return finding{status: OK, detail: fmt.Sprintf(format, args...)}
}

func warned(fix, format string, args ...any) finding {
	return finding{status: Warn, detail: fmt.Sprintf(format, args...), fix: fix}
}

func failed(fix, format string, args ...any) finding {
	return finding{status: Fail, detail: fmt.Sprintf(format, args...), fix: fix}
}

// unchecked is a check that could not run.
func unchecked(fix, format string, args ...any) finding {
	return finding{status: Warn, detail: "not checked because " + fmt.Sprintf(format, args...), fix: fix}
}

// because is a check that could not run for want of another.
func because(root string) finding {
	f := unchecked("", "of %s", root)
	f.root = root
	return f
}

// step is one check: it runs unless the one that it needs failed or could not run either.
type step struct {
	id, needs, why string
	run            func(ctx context.Context, x *examination) finding
}

// examination is what the steps of one report share.
type examination struct {
	cfg     config.Config
	limit   time.Duration
	scope   *changestream.Scope
	router  *routing.Router
	brokers *kafkawire.Client

	mongo   mongoFacts
	topics  topicFacts
	sampled chan struct{} // closed when the topics are known, as far as they will be

	mu    sync.Mutex
	found map[string]finding
}

// Run examines what cfg names. The error is one of the configuration itself, or the end of ctx; everything else is in the
// report.
func Run(ctx context.Context, cfg config.Config) (Report, error) { return run(ctx, cfg, Limit) }

func run(ctx context.Context, cfg config.Config, limit time.Duration) (Report, error) {
	asked := ctx
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	x := &examination{cfg: cfg, limit: limit, sampled: make(chan struct{}), found: map[string]finding{}}
	var err error
	if x.scope, err = changestream.ParseScope(cfg.Watch, cfg.MongoDB.State+".*"); err != nil {
		return Report{}, fmt.Errorf("watch: %w", err)
	}
	if x.router, err = routing.New(cfg.Routing()); err != nil {
		return Report{}, fmt.Errorf("topics: %w", err)
	}
	if x.brokers, err = app.NewKafka(cfg, slog.New(slog.DiscardHandler), nil); err != nil {
		return Report{}, err
	}
	defer x.brokers.Close()
	defer x.disconnect()
	var tracks sync.WaitGroup
	tracks.Go(func() {
		defer close(x.sampled)
		x.track(ctx, mongoSteps)
	})
	tracks.Go(func() { x.track(ctx, kafkaSteps) })
	tracks.Wait()
	if asked.Err() != nil {
		return Report{}, context.Cause(asked)
	}
	return x.report(), nil
}

// track runs steps one after another.
func (x *examination) track(ctx context.Context, steps []step) {
	for _, s := range steps {
		f := x.take(ctx, s)
		if ctx.Err() != nil && f.status != OK {
			f = unchecked("run it again, nearer to the servers", "the time was up (%v)", x.limit)
		}
		x.mu.Lock()
		x.found[s.id] = f
		x.mu.Unlock()
	}
}

func (x *examination) take(ctx context.Context, s step) finding {
	if s.needs != "" {
		needed := x.earlier(s.needs)
		root := needed.root
		if needed.status == Fail {
			root = s.needs
		}
		if root != "" {
			return because(root)
		}
	}
	return s.run(ctx, x)
}

// earlier is what a check found that ran before.
func (x *examination) earlier(id string) finding {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.found[id]
}

func (x *examination) report() Report {
	var r Report
	for _, s := range slices.Concat(mongoSteps, kafkaSteps) {
		f := x.found[s.id]
		r.Checks = append(r.Checks, Check{ID: s.id, Status: f.status, Detail: logging.Clean(f.detail), Fix: logging.Clean(f.fix), Why: s.why})
	}
	return r
}
