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

// Stray is a write that the callback of a transaction sent outside of the transaction, most often because it used another
// context than the one that it got. It stays when the transaction rolls back.
type Stray struct {
	Command              string // insert, update, delete, findAndModify, bulkWrite or aggregate
	Database, Collection string
}

// StrayMonitor is a command monitor that tells report of each write that a callback of Transaction sends outside of its
// transaction, before it is sent. It is for tests and development machines, where report fails the test or panics:
//
//	options.Client().SetMonitor(outbox.StrayMonitor(func(_ context.Context, s outbox.Stray) { t.Errorf("%+v", s) }, nil))
//
// It sees what the goroutine of the callback does, and not what that starts. Once a process has made a monitor, each
// transaction and each write costs about a microsecond more; without one nothing. Commands go on to next, if that is not
// nil. Writes with a context of Outside are meant.
func StrayMonitor(report func(ctx context.Context, s Stray), next *mongoevent.CommandMonitor) *mongoevent.CommandMonitor {
	strays.on.Store(true)
	m := &mongoevent.CommandMonitor{}
	if next != nil {
		*m = *next
	}
	started := m.Started
	m.Started = func(ctx context.Context, e *mongoevent.CommandStartedEvent) {
		if s, ok := stray(ctx, e); ok {
			report(ctx, s)
		}
		if started != nil {
			started(ctx, e)
		}
	}
	return m
}

// strays knows the goroutines that are in a callback now. A context cannot tell: the mistake is the wrong context.
var strays struct {
	on      atomic.Bool
	running sync.Map // goroutine: depth
}

// watchStrays notes that this goroutine is in a callback until leave.
func watchStrays() (leave func()) {
	if !strays.on.Load() {
		return func() {}
	}
	g := goroutine()
	depth, _ := strays.running.LoadOrStore(g, 0)
	n, _ := depth.(int)
	strays.running.Store(g, n+1)
	return func() {
		if n == 0 {
			strays.running.Delete(g)
			return
		}
		strays.running.Store(g, n)
	}
}

// stray judges a command that is about to be sent by this goroutine.
func stray(ctx context.Context, e *mongoevent.CommandStartedEvent) (Stray, bool) {
	switch e.CommandName {
	case "insert", "update", "delete", "findAndModify", "bulkWrite":
	case "aggregate":
		if !writes(e.Command) {
			return Stray{}, false
		}
	default:
		return Stray{}, false
	}
	if meant, _ := ctx.Value(outsideKey{}).(bool); meant {
		return Stray{}, false
	}
	if auto, err := e.Command.LookupErr("autocommit"); err == nil && !auto.Boolean() {
		return Stray{}, false // in a transaction
	}
	if _, ok := strays.running.Load(goroutine()); !ok {
		return Stray{}, false
	}
	coll, _ := e.Command.Lookup(e.CommandName).StringValueOK()
	return Stray{Command: e.CommandName, Database: e.DatabaseName, Collection: coll}, true
}

// writes reports whether the last stage of an aggregation is one that writes.
func writes(cmd bson.Raw) bool {
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

// goroutine is the number of the calling goroutine, as a stack trace shows it: the runtime has no other word for it.
func goroutine() uint64 {
	var buf [64]byte
	text := bytes.TrimPrefix(buf[:runtime.Stack(buf[:], false)], []byte("goroutine "))
	digits, _, _ := bytes.Cut(text, []byte(" "))
	n, err := strconv.ParseUint(string(digits), 10, 64)
	if err != nil {
		return 0 // matches only others that cannot be told either
	}
	return n
}
