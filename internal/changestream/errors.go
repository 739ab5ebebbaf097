package changestream

import (
	"errors"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/resume"
)

// ErrNoStart refuses to open a stream without being told where: a stream that silently starts at the present loses what
// lies before.
var ErrNoStart = errors.New("change stream: no start position: a position, a time, or an explicit start at the present is needed")

// Gap reasons: few, for a metric's label.
const (
	GapHistoryLost  = "history_lost"  // the oplog no longer holds the position
	GapTokenRefused = "token_refused" // the server cannot read the token, or its event is not in this stream
	GapStalled      = "stalled"       // the token does not move while the cluster goes on (N26)
	GapOversize     = "oversize"      // an event that no pipeline can make fit
	GapUnexplained  = "unexplained"   // an error without a class, again and again at the same position
)

// GapError ends Run when the stream cannot go on from its position: what lies behind it must be found some other way. A
// start by the position's time may still succeed, without any loss.
type GapError struct {
	Code     int             // the server's code, 0 if the server said nothing
	Reason   string          // one of the Gap constants
	Position resume.Position // everything up to here was handed on
	Ahead    bool            // the position lies in the cluster's future: it is of another history, nothing may be dropped by it
	Err      error           // what the server said
}

func (e *GapError) Error() string {
	why := map[string]string{
		GapHistoryLost:  "the oplog no longer reaches back to the position",
		GapTokenRefused: "the server does not accept the resume token",
		GapStalled:      "the resume token does not move although the cluster does",
		GapOversize:     "an event is too large even without its document",
		GapUnexplained:  "the server refuses the position for a reason unknown here",
	}[e.Reason]
	at, _ := e.Position.Time()
	msg := fmt.Sprintf("change stream: gap behind %d.%d: %s", at.T, at.I, why)
	if e.Code != 0 {
		msg += fmt.Sprintf(" (%d)", e.Code)
	}
	return msg
}

func (e *GapError) Unwrap() error { return e.Err }

// InvalidateError ends Run of a collection stream whose collection was dropped or renamed, or whose database was dropped,
// after that event was handed on. Starting from Position goes on behind it, with a collection that is made anew under the
// name.
type InvalidateError struct {
	Position resume.Position // of the invalidate event; no batch ever carries it
	Op       Op              // Drop, Rename, DropDatabase; Other if it was not seen
	NS       string
}

func (e *InvalidateError) Error() string {
	what := "invalidated"
	switch e.Op {
	case Drop:
		what = "dropped"
	case Rename:
		what = "renamed, or replaced by a rename"
	case DropDatabase:
		what = "dropped with its database"
	case Other, Insert, Invalidate:
	}
	return fmt.Sprintf("change stream: %s was %s; its stream has ended", e.NS, what)
}

// class is what the supervisor does about an error.
type class uint8

const (
	classUnknown  class = iota // like resume, but a gap when it does not end
	classResume                // reopen from the token, with backoff
	classGap                   // the position is of no use
	classConfig                // someone must grant or change something: not ready, slow retry
	classOversize              // N24
	classFatal                 // the client was disconnected: a bug or the end of the program
)

// codes has every code with a class of its own. Taking a lost position for a passing fault means looping on it for ever;
// taking a passing fault for a lost position costs one attempt to open by time. So what is unsure is a gap, or unknown.
var codes = map[int]class{
	6: classResume, 7: classResume, 89: classResume, // host unreachable, not found, network time-out
	43: classResume, 237: classResume, // cursor not found, killed
	50: classResume, 262: classResume, 202: classResume, // time limits
	91: classResume, 189: classResume, 10107: classResume, // shutting down, stepped down, not primary
	11600: classResume, 11601: classResume, 11602: classResume, // interrupted
	13435: classResume, 13436: classResume, 9001: classResume, // not primary, recovering, socket
	133: classResume, 134: classResume, 234: classResume, // no such member, no majority snapshot yet, retry change stream
	63: classResume, 150: classResume, 13388: classResume, 175: classResume, // routing, plan killed

	286: classGap, 136: classGap, // history lost, fell off the capped oplog
	280: classGap, 260: classGap, // event not found, invalid resume token
	9: classGap, 15: classGap, 40647: classGap, 40649: classGap, 50796: classGap, 50811: classGap, 40576: classGap, // token garbage

	13: classConfig, 18: classConfig, 11: classConfig, 8000: classConfig, // may not, wrong password, no such user
	40573: classConfig, 76: classConfig, // not a replica set
	40415: classConfig, 40324: classConfig, 59: classConfig, // unknown option, stage, command: too old a server
	26: classConfig, // a mongos refuses a database that does not exist

	10334: classOversize,
}

const (
	labelResumable    = "ResumableChangeStreamError"
	labelNotResumable = "NonResumableChangeStreamError"
	labelNetwork      = "NetworkError"
)

// classify judges by code and label, never by text, and names the reason for the restart metric.
func classify(err error) (c class, code int, reason string) {
	if errors.Is(err, mongo.ErrClientDisconnected) {
		return classFatal, 0, "client"
	}
	var server mongo.ServerError
	if !errors.As(err, &server) {
		return classResume, 0, "network" // server selection, pool, connection
	}
	if all := server.ErrorCodes(); len(all) > 0 {
		code = all[0]
	}
	c, known := codes[code]
	switch {
	case known:
	case server.HasErrorLabel(labelNotResumable):
		c = classGap
	case server.HasErrorLabel(labelResumable), server.HasErrorLabel(labelNetwork), code == 0:
		c = classResume
	}
	if code == 0 {
		return c, code, "network"
	}
	return c, code, [...]string{"unknown", "server", "gap", "config", "oversize", "client"}[c]
}

// gapReason chooses the word for a gap by the server's code.
func gapReason(code int) string {
	if slices.Contains([]int{286, 136}, code) {
		return GapHistoryLost
	}
	return GapTokenRefused
}

// advice says to an operator what a configuration error means and what to do about it.
func advice(code int, s *Scope) string {
	switch code {
	case 13:
		return fmt.Sprintf("the MongoDB user may not watch %s (13): grant the actions find and changeStream on %s", s, s.resource())
	case 18, 11, 8000:
		return fmt.Sprintf("MongoDB refused the user or the password (%d): check the credentials and authSource in the URI", code)
	case 40573, 76:
		return fmt.Sprintf("MongoDB is not a replica set (%d), and only replica sets have change streams: start mongod with --replSet and run rs.initiate()", code)
	case 26:
		return fmt.Sprintf("the database of %s does not exist (26): create it", s)
	default:
		return fmt.Sprintf("the server does not know what the stream asks for (%d): MongoDB 6.0 or later is needed", code)
	}
}

// resource is the privilege document to grant on.
func (s *Scope) resource() string {
	switch s.kind {
	case Collection:
		return fmt.Sprintf(`{db: %q, collection: %q}`, s.db, s.coll)
	case Database:
		return fmt.Sprintf(`{db: %q, collection: ""}`, s.db)
	default:
		return `{db: "", collection: ""}`
	}
}
