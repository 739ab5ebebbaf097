package changes

import (
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/resume"
)

// Start is the place where the stream begins. Position or At is needed.
// Position and At together start at the time and drop the events at or before the position (N23).
type Start struct {
	// Position is the checkpoint. The stream delivers the events after its token, or from its cluster
	// time on if it has no token.
	Position resume.Position

	// PipelineHash and Collections are stored in the checkpoint. The token is not used if the scope
	// has another hash, or if the collection of a collection stream now has another UUID. The stream
	// then starts at the position's time and drops the events at or before the token (N23). Empty
	// values are not checked.
	PipelineHash string
	Collections  []KnownCollection

	// At starts at a cluster time, inclusive.
	At *bson.Timestamp
}

// KnownCollection is a watched collection at the time of a position. If its namespace has another UUID now, the collection was dropped and
// created again, and a token for the old one is not valid for the new one.
type KnownCollection struct {
	NS string // "database.collection"

	// UUID is the UUID of the collection, or zero if it is unknown.
	UUID [16]byte
}
