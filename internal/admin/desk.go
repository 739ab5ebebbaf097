package admin

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/internal/store"
)

// Actor is who acts, and by which way; both are written to the events log with each action.
type Actor struct {
	Name   string
	Source string // cli, api or page
}

// Deployment is what all operators of a process share: the connection, the rules of the configuration, and figures that
// are too dear to be counted for each of them. State and Watcher are needed; the use-cases that need a function which is
// nil say so. Its fields must not change once it is used.
type Deployment struct {
	State         *mongo.Database
	Watcher       string // of the configuration
	Node, Version string // of this process, for the ledger of migrations

	Router    *routing.Router                                                 // of the configuration, for replays
	Compacted func(ctx context.Context, topics []string) ([]string, error)    // for replays
	Outboxes  func(ctx context.Context) ([]store.Outbox, error)               // that are watched, for indexes
	Oplog     func(ctx context.Context) (oldest, newest time.Time, err error) // the times of the oplog's ends
	Redact    Redaction
	Log       *slog.Logger // nil logs nothing

	figures figureSet
	replays replayRunner
}

// ErrUnavailable says that this process was not told what the use-case needs.
var ErrUnavailable = errors.New("this process was started without what is needed for it")

// For is the desk of an actor at the configured watcher. It costs nothing.
func (d *Deployment) For(a Actor) Desk {
	return Desk{Operator: Operator{State: d.State, Watcher: d.Watcher, Actor: a.Name, Source: a.Source, Outboxes: d.Outboxes}, d: d}
}

// Desk is everything that an operator can see and do. Its methods are safe for concurrent use.
//
// Lists have at most [MaxPage] entries, [DefaultPage] unless a limit is given, with the cursor of the next page; a cursor
// stays good whatever happens meanwhile. Actions are written to the events log with their actor; those that destroy refuse a
// filter without a condition unless it says All, and count first where they are asked to (DryRun).
type Desk struct {
	Operator
	d *Deployment
}

// Of is the same desk at another watcher of the same state database.
func (k Desk) Of(watcher string) Desk {
	if watcher != "" && watcher != k.Watcher {
		k.Watcher, k.Outboxes = watcher, nil // the configuration is that of another
	}
	return k
}

// At is the same desk, whose actions on the lease are for that slot of the watcher alone, such as 0of2; "" is all slots (N28).
func (k Desk) At(slot string) Desk {
	k.Slot = slot
	return k
}

// Bounds of lists.
const (
	DefaultPage = 100
	MaxPage     = 1000
)

// pageSize is the limit of a list.
func pageSize(limit int) int {
	if limit <= 0 {
		return DefaultPage
	}
	return min(limit, MaxPage)
}

// Run keeps the figures of the overview fresh, evaluates the health rules and carries out the replays that were started at
// a desk, until ctx ends. Without it figures are counted when they are asked for, and replays are only ordered.
//
// It costs one count of what waits every ten seconds, and every two while somebody looks; never more than a tenth of the
// time.
func (d *Deployment) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { d.replays.run(ctx, d) })
	d.figures.run(ctx, d)
	return nil
}

func (d *Deployment) logger() *slog.Logger {
	if d.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return d.Log
}

// Caller is who sends a request to the page, as the listener found out.
type Caller struct {
	Actor    Actor
	Role     string // viewer or operator
	Payloads bool   // may see payloads where it asks for them
}

// The roles.
const (
	RoleViewer   = "viewer"
	RoleOperator = "operator"
)

// Operator reports whether the caller may change something.
func (c Caller) Operator() bool { return c.Role == RoleOperator }

type callerKey struct{}

// WithCaller is ctx that knows who calls.
func WithCaller(ctx context.Context, c Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// CallerOf is who calls, if the listener has put it there.
func CallerOf(ctx context.Context) (Caller, bool) {
	c, ok := ctx.Value(callerKey{}).(Caller)
	return c, ok
}
