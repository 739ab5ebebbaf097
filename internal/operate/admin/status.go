// Package admin contains the use-cases of the command line, the HTTP API and the page. Its
// functions read and write MongoDB and return plain values. They print nothing.
//
// Lists return pages. Actions are written to the audit log with their actor. Actions that change
// many documents work in bounded statements, call an optional function with their progress, and may
// be repeated after an error.
//
// Order: pages have a fixed order and a cursor, so that a page follows the one before even if entries are added.
// Blocking: functions with a context block until MongoDB responds, and end with their context. Only [Operator.Run]
// works in the background. Cost: the doc comment of each use-case states it if it reads more than an index of the
// selected documents.
package admin

import (
	"context"

	"github.com/outrelay/outrelay/internal/relay/problems"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// The types of the stored status of watchers are those of package problems, because the relay reads it as well.
type (
	// Status is every slot of every watcher.
	Status = problems.Status
	// SlotStatus is the stored state of one slot.
	SlotStatus = problems.SlotStatus
	// UnwritableTopic is a topic that cannot be written.
	UnwritableTopic = problems.UnwritableTopic
	// SlotProblem is a step that an owner repeats without success.
	SlotProblem = problems.SlotProblem
	// Problem is an entry of the list of everything that is wrong.
	Problem = problems.Problem
)

// ReadStatus returns every slot of every watcher of the state database, sorted by id. Ages are
// measured by the server's clock.
func ReadStatus(ctx context.Context, state state.Database) (Status, error) {
	return problems.ReadStatus(ctx, state)
}
