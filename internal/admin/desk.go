package admin

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/routing"
)

// Actor is the person or program that acts. Name and Source are written to the events log with each
// action.
type Actor struct {
	Name   string
	Source string // cli, api or page
}

// Deployment contains what all operators of a process share: the connection, the routing rules, and
// counts that are too expensive to repeat for each operator. State and Watcher are required. If
// another function is nil, the use-cases that need it return [ErrUnavailable]. The fields must not
// change after the first use.
type Deployment struct {
	State         *mongo.Database
	Watcher       string // of the configuration
	Node, Version string // of this process, for the ledger of migrations

	Router    *routing.Router                                                 // of the configuration, for replays
	Compacted func(ctx context.Context, topics []string) ([]string, error)    // returns the compacted topics, for replays
	Outboxes  func(ctx context.Context) ([]outboxes.Outbox, error)            // returns the watched outboxes, for indexes
	Oplog     func(ctx context.Context) (oldest, newest time.Time, err error) // returns the times of the oplog's ends
	Redact    Redaction
	Log       *slog.Logger // nil disables logging

	figures figureSet
	replays replayRunner
}

// ErrUnavailable is returned by a use-case that needs a function which this process does not have.
var ErrUnavailable = errors.New("this process was started without what is needed for it")

// For returns the desk of an actor for the configured watcher. It costs nothing.
func (d *Deployment) For(a Actor) Desk {
	return Desk{
		Operator: Operator{State: d.State, Watcher: d.Watcher, Actor: a.Name, Source: a.Source, Outboxes: d.Outboxes},
		d:        d,
	}
}

// Desk contains everything that an operator can see and do. Its methods are safe for concurrent
// use.
//
// Lists have at most [MaxPage] entries, and [DefaultPage] by default. Each page has the cursor of
// the next one. A cursor remains valid while entries are added and removed. Actions are written to
// the events log with their actor. Destructive actions reject a filter without conditions unless
// All is set. With DryRun they only count.
type Desk struct {
	Operator
	d *Deployment
}

// ForWatcher returns the desk for another watcher of the same state database.
func (k Desk) ForWatcher(watcher string) Desk {
	if watcher != "" && watcher != k.Watcher {
		// Outboxes lists the collections of the configured watcher.
		k.Watcher, k.Outboxes = watcher, nil
	}
	return k
}

// ForSlot returns the desk with actions on the lease restricted to one slot of the watcher, such as
// 0of2. "" means all slots (N28).
func (k Desk) ForSlot(slot string) Desk {
	k.Slot = slot
	return k
}

// Bounds of lists.
const (
	DefaultPage = 100
	MaxPage     = 1000
)

// pageSize returns the number of entries of a page for the requested limit.
func pageSize(limit int) int {
	if limit <= 0 {
		return DefaultPage
	}
	return min(limit, MaxPage)
}

// Run keeps the figures of the overview fresh, evaluates the health rules, and runs the replays
// that were started at a desk. It blocks until ctx ends. If Run is not running, figures are counted
// when they are requested, and replays are ordered but not run.
//
// Run counts the waiting envelopes every ten seconds, and every two seconds while an operator reads
// the figures. For each watcher, counting takes at most a thirtieth of the time.
func (d *Deployment) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { d.replays.runJobs(ctx, d) })

	d.figures.keepFresh(ctx, d)
	return nil
}

func (d *Deployment) logger() *slog.Logger {
	if d.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return d.Log
}

// Caller is the sender of a request to the page, as authenticated by the listener.
type Caller struct {
	Actor    Actor
	Role     string // viewer or operator
	Payloads bool   // may read payloads
}

// The roles.
const (
	RoleViewer   = "viewer"
	RoleOperator = "operator"
)

// Operator reports whether the caller may change something.
func (c Caller) Operator() bool { return c.Role == RoleOperator }

type callerKey struct{}

// WithCaller returns a context that contains the caller.
func WithCaller(ctx context.Context, c Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// CallerOf returns the caller in ctx, and reports whether the listener has set one.
func CallerOf(ctx context.Context) (Caller, bool) {
	c, ok := ctx.Value(callerKey{}).(Caller)
	return c, ok
}
