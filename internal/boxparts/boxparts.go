// Package boxparts gives other packages of this module the parts of an outbox.Box that are not exported.
package boxparts

import (
	"log/slog"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

// Parts are the parts of a Box.
type Parts struct {
	Collection *mongo.Collection // with majority concerns on the primary
	Log        *slog.Logger
}

// Of returns the parts of box, which must be an *outbox.Box. Package outbox sets the function: an import in the
// other direction would be a cycle.
var Of func(box any) Parts
