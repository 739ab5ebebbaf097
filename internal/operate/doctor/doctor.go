// Package doctor checks everything outside of outrelay that it depends on: the replica set, the
// privileges, the oplog, the brokers, the topics and the ACLs. It connects like the relay. Each
// finding has a fix.
//
// Every report contains all checks in the same order. A check that cannot run, because another one
// failed or the time was up, is a warning with that reason. Nothing is changed and a running relay is
// not disturbed: documents are only read, the creation of a topic is only validated, and the doctor
// has its own transactional id. A report takes at most [Limit]. It contains no payloads and no
// secrets.
package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/base/logging"
	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/connect"
)

// Limit bounds the time of a report.
const Limit = 15 * time.Second

// Status is the outcome of a check.
type Status string

// The outcomes.
const (
	OK   Status = "ok"
	Warn Status = "warn" // works, but not as well or as safely as it should, or could not be checked
	Fail Status = "fail" // does not work, or loses events
)

// Check is one line of a report.
type Check struct {
	ID     string `json:"id"`     // stable; begins with mongodb, outbox, watcher, config, kafka or topics
	Status Status `json:"status"` // ok, warn, fail
	Detail string `json:"detail"` // the finding
	Fix    string `json:"fix"`    // one statement or step per line; "" if nothing has to be fixed
	Why    string `json:"-"`      // why the check matters, for people

	root string // the failed check because of which this one did not run
}

// isBlocked reports whether another check prevented this check. A check that could not be done may prevent others itself.
func (c Check) isBlocked() bool { return c.root != "" && c.root != c.ID }

// Report is the output of `outrelay doctor --json`.
type Report struct {
	Checks []Check `json:"checks"`
}

// Count returns the number of checks with this outcome.
func (r Report) Count(status Status) int {
	n := 0
	for _, c := range r.Checks {
		if c.Status == status {
			n++
		}
	}
	return n
}

// Failed reports whether any check failed.
func (r Report) Failed() bool { return r.Count(Fail) > 0 }

// MarshalJSON writes an empty list instead of null.
func (r Report) MarshalJSON() ([]byte, error) {
	type plain Report
	if r.Checks == nil {
		r.Checks = []Check{}
	}
	return json.Marshal(plain(r))
}

// finding is the result of a step.
type finding struct {
	status      Status
	detail, fix string
	root        string // the failed check because of which this step and the dependent steps could not run
	lasting     bool   // of a failure: the same attempt fails again
}

func passed(format string, args ...any) finding {
	return finding{status: OK, detail: fmt.Sprintf(format, args...)}
}

func warned(fix, format string, args ...any) finding {
	return finding{status: Warn, detail: fmt.Sprintf(format, args...), fix: fix}
}

func failed(fix, format string, args ...any) finding {
	return finding{status: Fail, detail: fmt.Sprintf(format, args...), fix: fix}
}

// unchecked is the finding of a check that could not run.
func unchecked(fix, format string, args ...any) finding {
	return finding{status: Warn, detail: "not checked because " + fmt.Sprintf(format, args...), fix: fix}
}

// blockedBy is the finding of a check that could not run because the check root failed.
func blockedBy(root string) finding {
	finding := unchecked("", "of %s", root)
	finding.root = root
	return finding
}

// examination is the shared state of the steps of one report. The checks of each subject have a type that
// embeds it.
type examination struct {
	cfg     config.Config
	limit   time.Duration
	scope   *changes.Scope
	router  *routing.Router
	brokers *kafkawire.Client

	mongo   mongoFacts
	topics  topicFacts
	sampled chan struct{} // closed when the search for topics has ended

	mu    sync.Mutex
	found map[string]finding
}

// Run checks the deployment that cfg describes. It returns an error only if the configuration is
// invalid or ctx has ended. All other problems are in the report.
func Run(ctx context.Context, cfg config.Config) (Report, error) { return runChecks(ctx, cfg, Limit) }

func runChecks(ctx context.Context, cfg config.Config, limit time.Duration) (Report, error) {
	examination := &examination{cfg: cfg, limit: limit, sampled: make(chan struct{}), found: map[string]finding{}}
	var err error
	if examination.scope, err = changes.ParseScope(cfg.Watch, cfg.State.Pattern()); err != nil {
		return Report{}, fmt.Errorf("watch: %w", err)
	}
	if examination.router, err = routing.New(cfg.Routing()); err != nil {
		return Report{}, fmt.Errorf("topics: %w", err)
	}
	// The client connects lazily, so this reports only a configuration that cannot work.
	if examination.brokers, err = connect.NewKafka(cfg, connect.KafkaHost{}, slog.New(slog.DiscardHandler), nil); err != nil {
		return Report{}, err
	}
	defer examination.brokers.Close()
	defer examination.mongo.disconnect()

	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	// MongoDB and Kafka are checked at the same time, so a server that does not respond delays only its own findings.
	var tracks sync.WaitGroup
	tracks.Go(func() {
		defer close(examination.sampled)
		examination.runSteps(limited, mongoSteps(examination))
	})
	tracks.Go(func() { examination.runSteps(limited, kafkaSteps(examination)) })
	tracks.Wait()

	// The end of the limit is a finding, and the end of the caller's context is not.
	if ctx.Err() != nil {
		return Report{}, context.Cause(ctx)
	}
	return examination.buildReport(), nil
}

// runSteps runs the steps one after another, until the time limit.
func (x *examination) runSteps(ctx context.Context, steps []step) {
	for _, s := range steps {
		// A step after the limit would lack the facts of the step that the limit has interrupted, such as the layout of the topics.
		var finding finding
		if ctx.Err() == nil {
			finding = x.runStep(ctx, s)
		}
		if ctx.Err() != nil && finding.status != OK {
			finding = unchecked("run doctor again, closer to the servers", "the time limit of %v is exceeded", x.limit)
		}
		x.mu.Lock()
		x.found[s.id] = finding
		x.mu.Unlock()
	}
}

func (x *examination) runStep(ctx context.Context, step step) finding {
	if step.needs != "" {
		needed := x.findingOf(step.needs)
		root := needed.root
		if needed.status == Fail {
			root = step.needs
		}
		if root != "" {
			return blockedBy(root)
		}
	}
	return step.run(ctx)
}

// findingOf returns the finding of a check that ran before.
func (x *examination) findingOf(id string) finding {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.found[id]
}

func (x *examination) buildReport() Report {
	var report Report
	for _, s := range slices.Concat(mongoSteps(x), kafkaSteps(x)) {
		finding := x.found[s.id]
		report.Checks = append(report.Checks,
			Check{ID: s.id, Status: finding.status, Detail: logging.Clean(finding.detail), Fix: logging.Clean(finding.fix), Why: s.why, root: finding.root})
	}
	return report
}
