package changes

import (
	"errors"
	"fmt"

	"github.com/outrelay/outrelay/resume"
)

// ErrTimeout is in the logged reason of an interruption if the server did not respond in time.
var ErrTimeout = errors.New("the server did not respond in time")

// Reasons of a gap. They are few, because they are values of a metric label.
const (
	GapHistoryLost   = "history_lost"   // the oplog no longer contains the position
	GapTokenRejected = "token_rejected" // the server cannot read the token, or its event is not in this stream
	GapStalled       = "stalled"        // the token does not move, although the cluster time does (N26)
	GapOversize      = "oversize"       // an event that no pipeline can reduce to the limit
	GapUnexplained   = "unexplained"    // an error without a class, repeatedly at the same position
)

// GapError ends Run if the stream cannot continue from its position. The caller must find the events
// after the position in some other way. A start at the position's time may still succeed without any
// loss.
type GapError struct {
	Code     int             // the server's code, or 0 if the error is not from the server
	Reason   string          // one of the Gap constants
	Position resume.Position // every event up to this position was sent to the caller

	// Ahead reports that the position is in the future of the cluster. So it belongs to another
	// history, and no event may be dropped because of it.
	Ahead bool
	Err   error // the server's error
}

func (e *GapError) Error() string {
	why := map[string]string{
		GapHistoryLost:   "the oplog no longer contains the position",
		GapTokenRejected: "the server rejects the resume token",
		GapStalled:       "the resume token does not move, although the cluster time does",
		GapOversize:      "an event is too large even without its document",
		GapUnexplained:   "the server rejects the position for an unknown reason",
	}[e.Reason]

	at, _ := e.Position.Time()
	msg := fmt.Sprintf("change stream: gap after %d.%d: %s", at.T, at.I, why)
	if e.Code != 0 {
		msg += fmt.Sprintf(" (%d)", e.Code)
	}
	return msg
}

func (e *GapError) Unwrap() error { return e.Err }

// InvalidateError ends Run of a collection stream whose collection was dropped or renamed, or whose
// database was dropped. The event of the drop or rename was sent to the caller before. A start at
// Position continues after it, with a new collection of the same name.
type InvalidateError struct {
	Position resume.Position // of the invalidate event. No batch carries it.
	Op       Op              // Drop, Rename or DropDatabase, or Other if the event was not read
	NS       string
}

func (e *InvalidateError) Error() string {
	change := "invalidated"
	switch e.Op {
	case Drop:
		change = "dropped"
	case Rename:
		change = "renamed, or replaced by a rename"
	case DropDatabase:
		change = "dropped with its database"
	case Other, Insert, Invalidate:
	}
	return fmt.Sprintf("change stream: %s was %s; its stream has ended", e.NS, change)
}
