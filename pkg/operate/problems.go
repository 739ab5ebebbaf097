package operate

import (
	"context"
	"time"
)

// Severity is the weight of a problem.
type Severity string

// The severities.
const (
	Warn Severity = "warn" // events flow, and something needs attention
	Fail Severity = "fail" // events do not flow, or will soon be lost
)

// Problem is something that is wrong with the watcher.
type Problem struct {
	// ID is the same as long as the problem lasts.
	ID string
	// Kind is the key of the row in docs/troubleshooting.md, such as topic_unwritable or dead_letters.
	Kind     string
	Severity Severity

	Object string        // the topic, slot, node, outbox or watcher
	Title  string        // one sentence with the object
	Since  time.Time     // zero if it is unknown
	Lasts  time.Duration // since then, by the clock that measured it; 0 if it is unknown
	Count  int64         // of events or letters; 0 if there is nothing to count
	Unit   string        // follows Count, such as "events wait"

	Detail      string // the cause
	Consequence string // without an action
	Fix         string // the next step, often a command of outrelay
	Command     string // of another tool that fixes it, such as kafka-topics.sh, or ""

	// Acknowledge is the argument for [Operator.Acknowledge] of a problem that stays after its cause has ended, or "".
	Acknowledge string
}

// Problems returns everything that is wrong with the watcher and, for the whole deployment, with its nodes: failures first. The
// list is the one that `outrelay status`, the page and the metrics show. It is empty if nothing is wrong.
func (o *Operator) Problems(ctx context.Context) ([]Problem, error) {
	const doing = "list the problems"
	use, err := o.prepare(ctx)
	if err != nil {
		return nil, explain(doing, err)
	}
	view, err := use.Overview(ctx)
	if err != nil {
		return nil, explain(doing, err)
	}

	list := []Problem{}
	for i := range view.Problems {
		stored := &view.Problems[i]
		if stored.Watcher != "" && stored.Watcher != use.Watcher {
			continue
		}
		list = append(list, Problem{
			ID: stored.ID, Kind: string(stored.Kind), Severity: Severity(stored.Severity), Object: stored.Object, Title: stored.Title,
			Since: timeOf(stored.Since), Lasts: seconds(stored.ForS), Count: stored.Count, Unit: stored.Unit,
			Detail: stored.Detail, Consequence: stored.Consequence, Fix: stored.Fix, Command: stored.Command, Acknowledge: stored.Acknowledge,
		})
	}
	return list, nil
}

// Acknowledge ends a problem that stays after its cause has ended, such as lost history or discarded events. id is the field Acknowledge of the
// problem.
func (o *Operator) Acknowledge(ctx context.Context, id string) error {
	use, err := o.prepare(ctx)
	if err == nil {
		err = use.Acknowledge(ctx, id)
	}
	return explain("acknowledge the problem", err)
}
