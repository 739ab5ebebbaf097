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

	// At, if it is set, is the time of the insert, and Size the bytes of its id, which take the place of ID: with a large id, the
	// pipeline would be too large. They are also those of another insert of the same transaction with an id of the same size.
	At   bson.Timestamp
	Size int
}

// MaxSkippedID bounds the id of a Skip without At, in bytes. An envelope with a longer id is malformed.
const MaxSkippedID = 1024

// ErrNoEvent is returned if there is no event after a position, or the server cannot return it.
var ErrNoEvent = errors.New("the event at which the stream stands is unknown")
