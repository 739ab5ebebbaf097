package changes

import (
	"errors"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Skip is an insert that the stream does not read.
type Skip struct {
	DB, Coll string
	ID       bson.RawValue
	Until    bson.Timestamp // a later insert with this id is read
}

// ErrNoEvent is returned if there is no event after a position, or the server cannot return it.
var ErrNoEvent = errors.New("the event at which the stream stands is unknown")
