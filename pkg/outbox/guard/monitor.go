package guard

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"

	"github.com/outrelay/outrelay/internal/mongodb/transaction"
)

// Stray is a write that the callback of a transaction sent outside of the transaction. The usual
// mistake is a context other than the callback's. The write stays when the transaction rolls
// back.
type Stray struct {
	// Command is insert, update, delete, findAndModify, bulkWrite or aggregate.
	Command string

	// Database and Collection are the target of the write.
	Database, Collection string
}

// Monitor returns a command monitor that calls report for each write that a callback of
// Box.Transaction sends outside of its transaction. report is called before the write is sent. The
// monitor is for tests and development machines, where report fails the test or panics:
//
//	options.Client().SetMonitor(guard.Monitor(func(_ context.Context, stray guard.Stray) { t.Errorf("%+v", stray) }, nil))
//
// The monitor sees only writes of the goroutine that runs the callback, not of goroutines that the
// callback starts. Writes with a context of outbox.Outside are intended and not reported. If next is not
// nil, all commands are passed on to it.
//
// Once a process has created a monitor, each transaction and each write costs about one microsecond
// more. Without a monitor there is no cost.
func Monitor(report func(ctx context.Context, stray Stray), next *event.CommandMonitor) *event.CommandMonitor {
	transaction.TrackCallbacks()
	monitor := &event.CommandMonitor{}
	if next != nil {
		*monitor = *next
	}

	started := monitor.Started
	monitor.Started = func(ctx context.Context, command *event.CommandStartedEvent) {
		if stray, ok := detectStray(ctx, command); ok {
			report(ctx, stray)
		}
		if started != nil {
			started(ctx, command)
		}
	}

	return monitor
}

// detectStray reports whether the command that this goroutine is about to send is a stray write.
func detectStray(ctx context.Context, started *event.CommandStartedEvent) (Stray, bool) {
	// Reads and administration are no strays, however they run.
	switch started.CommandName {
	case "insert", "update", "delete", "findAndModify", "bulkWrite":
	case "aggregate":
		if !pipelineWrites(started.Command) {
			return Stray{}, false
		}
	default:
		return Stray{}, false
	}

	// Writes inside of a transaction, or with a context of outbox.Outside, are no strays.
	if auto, err := started.Command.LookupErr("autocommit"); err == nil && !auto.Boolean() {
		return Stray{}, false
	}

	if !transaction.InCallback(ctx) {
		return Stray{}, false
	}

	coll, _ := started.Command.Lookup(started.CommandName).StringValueOK()
	return Stray{Command: started.CommandName, Database: started.DatabaseName, Collection: coll}, true
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

	// MongoDB allows these stages only at the end of a pipeline.
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
