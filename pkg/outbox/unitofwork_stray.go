package outbox

import (
	"bytes"
	"context"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"

	"go.mongodb.org/mongo-driver/v2/bson"
	mongoevent "go.mongodb.org/mongo-driver/v2/event"
)

// Stray is a write that the callback of a transaction sent outside of the transaction. The usual
// mistake is a context other than the one that the callback gets. The write stays when the
// transaction rolls back.
type Stray struct {
	// Command is insert, update, delete, findAndModify, bulkWrite or aggregate.
	Command string

	// Database and Collection are the target of the write.
	Database, Collection string
}

// StrayMonitor returns a command monitor that calls report for each write that a callback of
// Transaction sends outside of its transaction. report is called before the write is sent. The
// monitor is for tests and development machines, where report fails the test or panics:
//
//	options.Client().SetMonitor(outbox.StrayMonitor(func(_ context.Context, s outbox.Stray) { t.Errorf("%+v", s) }, nil))
//
// The monitor sees only writes of the goroutine that runs the callback, not of goroutines that the
// callback starts. Writes with a context of Outside are intended and not reported. If next is not
// nil, all commands are passed on to it.
//
// Once a process has created a monitor, each transaction and each write costs about one microsecond
// more. Without a monitor there is no cost.
func StrayMonitor(report func(ctx context.Context, s Stray), next *mongoevent.CommandMonitor) *mongoevent.CommandMonitor {
	callbackGoroutines.on.Store(true)
	m := &mongoevent.CommandMonitor{}
	if next != nil {
		*m = *next
	}

	started := m.Started
	m.Started = func(ctx context.Context, e *mongoevent.CommandStartedEvent) {
		if s, ok := detectStray(ctx, e); ok {
			report(ctx, s)
		}
		if started != nil {
			started(ctx, e)
		}
	}

	return m
}

// callbackGoroutines holds the goroutines that are inside of a callback. The context cannot show
// this, because the mistake to detect is the wrong context.
var callbackGoroutines struct {
	on      atomic.Bool
	running sync.Map // goroutine id to nesting depth
}

// trackCallback records that this goroutine is inside of a callback until leave is called.
func trackCallback() (leave func()) {
	if !callbackGoroutines.on.Load() {
		return func() {}
	}

	g := goroutineID()

	// Callbacks can be nested, so the goroutine is tracked until the outermost one ends.
	depth, _ := callbackGoroutines.running.LoadOrStore(g, 0)
	n, _ := depth.(int)
	callbackGoroutines.running.Store(g, n+1)

	return func() {
		if n == 0 {
			callbackGoroutines.running.Delete(g)
			return
		}
		callbackGoroutines.running.Store(g, n)
	}
}

// detectStray reports whether the command that this goroutine is about to send is a stray write.
func detectStray(ctx context.Context, e *mongoevent.CommandStartedEvent) (Stray, bool) {
	switch e.CommandName {
	case "insert", "update", "delete", "findAndModify", "bulkWrite":
	case "aggregate":
		if !pipelineWrites(e.Command) {
			return Stray{}, false
		}
	default:
		return Stray{}, false
	}

	// Writes with a context of Outside, or inside of a transaction, are no strays.
	if intended, _ := ctx.Value(outsideKey{}).(bool); intended {
		return Stray{}, false
	}
	if auto, err := e.Command.LookupErr("autocommit"); err == nil && !auto.Boolean() {
		return Stray{}, false
	}

	if _, ok := callbackGoroutines.running.Load(goroutineID()); !ok {
		return Stray{}, false
	}

	coll, _ := e.Command.Lookup(e.CommandName).StringValueOK()
	return Stray{Command: e.CommandName, Database: e.DatabaseName, Collection: coll}, true
}

// pipelineWrites reports whether the last stage of the aggregation cmd writes.
func pipelineWrites(cmd bson.Raw) bool {
	pipeline, ok := cmd.Lookup("pipeline").ArrayOK()
	if !ok {
		return false
	}

	stages, err := pipeline.Values()
	if err != nil || len(stages) == 0 {
		return false
	}

	last, ok := stages[len(stages)-1].DocumentOK()
	if !ok {
		return false
	}

	for _, name := range []string{"$out", "$merge"} {
		if _, err := last.LookupErr(name); err == nil {
			return true
		}
	}

	return false
}

// goroutineID returns the id of the calling goroutine. It is read from a stack trace, because the
// runtime offers no other way.
func goroutineID() uint64 {
	var buf [64]byte
	text := bytes.TrimPrefix(buf[:runtime.Stack(buf[:], false)], []byte("goroutine "))
	digits, _, _ := bytes.Cut(text, []byte(" "))

	n, err := strconv.ParseUint(string(digits), 10, 64)
	if err != nil {
		return 0 // equal only to the id of goroutines that cannot be identified either
	}
	return n
}
