// Package letterparts gives other packages of this module the parts of a deadletter.Desk that are not exported. Package
// deadletter sets the functions: an import in the other direction would be a cycle.
package letterparts

import (
	"context"

	"github.com/outrelay/outrelay/internal/setaside"
)

// New returns a *deadletter.Desk over another store than MongoDB. opts must be a []deadletter.Option, and store must have
// the methods of the interface store in package deadletter.
var New func(opts, store any, waiting setaside.Store) (desk any, err error)

// EnsureIndexes creates the indexes of desk, which must be a *deadletter.Desk.
var EnsureIndexes func(ctx context.Context, desk any) error

// Put stores letter, which must be a *deadletter.Letter, unless a letter with its id exists that was not requeued. It redacts the letter first, and
// calls publish if the letter also belongs in a topic. When Put returns a nil err, the letter cannot be lost any more.
// omitted is the reason why parts of it were left out.
var Put func(ctx context.Context, desk, letter any, publish func(ctx context.Context, topic string) error) (omitted, err error)
