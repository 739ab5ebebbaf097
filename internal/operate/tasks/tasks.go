// Package tasks carries out actions of operators that go on when their request has ended, so that a purge of a million envelopes needs
// neither an open page nor an open connection. The page and the API show their progress in the same way.
//
// Blocking: nothing blocks, except functions that take a time. Cost: a goroutine for each running task; the latest tasks that were kept
// stay in memory. A task ends early if the process ends; then the finished part remains.
package tasks

import (
	"context"
	"errors"
	"log/slog"
	"runtime/debug"
	"sync/atomic"
	"time"
)

// limit bounds a task. Its finished part remains.
const limit = time.Hour

// Order describes an action.
type Order struct {
	Name  string // of the action
	Actor string
	Back  string // of the page: link to the list from which the person acts
	Once  string // an id of the order, so that the same order, sent twice, runs once; "" is no id
}

// Task is one action. Its functions are safe for concurrent use.
type Task struct {
	Order
	Began time.Time

	total, done atomic.Int64

	ended  chan struct{} // closed at the end; result and err are set before
	result any
	err    error
}

// SetTotal sets the number of entries that the action will process.
func (t *Task) SetTotal(n int64) { t.total.Store(n) }

// SetDone sets the number of processed entries.
func (t *Task) SetDone(n int64) { t.done.Store(n) }

// Total returns the number of entries that the action will process, or 0 if it is unknown.
func (t *Task) Total() int64 { return t.total.Load() }

// Done returns the number of processed entries.
func (t *Task) Done() int64 { return t.done.Load() }

// Await waits until the task has ended, the time has passed, or ctx ends, and reports whether the task has ended.
func (t *Task) Await(ctx context.Context, patience time.Duration) bool {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-t.ended:
	case <-timer.C:
	case <-ctx.Done():
	}
	return t.HasEnded()
}

// HasEnded reports whether the task has ended.
func (t *Task) HasEnded() bool {
	select {
	case <-t.ended:
		return true
	default:
		return false
	}
}

// Result returns the result of a task that has ended.
func (t *Task) Result() (any, error) { return t.result, t.err }

// errPanicked is the error of an action that panicked. The log has the stack.
var errPanicked = errors.New("the action failed unexpectedly; the log of the process has the cause")

// Runner starts tasks, and keeps the long ones, so that their actors can follow them.
type Runner struct {
	log  *slog.Logger
	kept Shelf[*Task]
	once Shelf[*Task] // by actor and Order.Once
}

// NewRunner returns a runner. log gets the stack of an action that panics; nil disables logging.
func NewRunner(log *slog.Logger) *Runner {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Runner{log: log}
}

// Start runs an action for at most an hour, with the values of ctx but not its end. It returns the task of an order that was started before
// with the same Once, by the same actor.
func (r *Runner) Start(ctx context.Context, order Order, run func(ctx context.Context, task *Task) (any, error)) *Task {
	task := &Task{Order: order, Began: time.Now(), ended: make(chan struct{})}
	if order.Once != "" {
		if begun, isNew := r.once.PutOnce(onceKey(order.Once, order.Actor), task); !isNew {
			return begun
		}
	}

	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	go func() {
		defer close(task.ended)
		defer cancel()
		defer func() {
			if cause := recover(); cause != nil {
				r.log.Error("an action of an operator panicked", "action", order.Name, "error", cause, "stack", string(debug.Stack()))
				task.err = errPanicked
			}
		}()
		task.result, task.err = run(ctx, task)
	}()
	return task
}

// FindOnce returns the task that actor has started with this Order.Once, or false if this process has none any more.
func (r *Runner) FindOnce(once, actor string) (*Task, bool) { return r.once.Get(onceKey(once, actor)) }

// onceKey returns the key of an order in Runner.once.
func onceKey(once, actor string) string { return actor + "\x00" + once }

// Keep stores a task, and returns the id with which its actor finds it.
func (r *Runner) Keep(task *Task) (id string) { return r.kept.Put(task) }

// Find returns the task that actor has started, or false if this process has none with this id any more.
func (r *Runner) Find(id, actor string) (*Task, bool) {
	task, known := r.kept.Get(id)
	if !known || task.Actor != actor {
		return nil, false
	}
	return task, true
}
