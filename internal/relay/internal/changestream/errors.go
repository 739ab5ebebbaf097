package changestream

import (
	"errors"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/relay/changes"
)

// errNoStart rejects a Run without a start position. A stream that silently starts at the present
// would lose all earlier events.
var errNoStart = errors.New(
	"change stream: no start position: a position or a time is needed")

// errorClass decides how Run reacts to an error.
type errorClass uint8

const (
	classUnknown  errorClass = iota // as classResume, but a gap if the error persists
	classResume                     // reopen from the token, with backoff
	classGap                        // the position is unusable
	classConfig                     // an operator must change something: not ready, slow retry
	classOversize                   // N24
	classFatal                      // the client was disconnected: a bug, or the end of the program
)

// classByCode contains every code that has a class. If a lost position were classified as a
// temporary fault, Run would retry forever. If a temporary fault is classified as a lost position,
// the cost is one attempt to open by time. So a doubtful code is a gap, or unknown.
var classByCode = map[int]errorClass{
	6: classResume, 7: classResume, 89: classResume, // host unreachable, not found, network timeout
	43: classResume, 237: classResume, // cursor not found, killed
	50: classResume, 262: classResume, 202: classResume, // time limits
	91: classResume, 189: classResume, 10107: classResume, // shutting down, stepped down, not primary
	11600: classResume, 11601: classResume, 11602: classResume, // interrupted
	13435: classResume, 13436: classResume, 9001: classResume, // not primary, recovering, socket
	// No such member, no majority snapshot yet, retry change stream.
	133: classResume, 134: classResume, 234: classResume,
	63: classResume, 150: classResume, 13388: classResume, 175: classResume, // routing, plan killed

	286: classGap, 136: classGap, // history lost, fell off the capped oplog
	280: classGap, 260: classGap, // event not found, invalid resume token
	9: classGap, 15: classGap, 40647: classGap, 40649: classGap, // token garbage
	50796: classGap, 50811: classGap, 40576: classGap, // token garbage

	13: classConfig, 18: classConfig, 11: classConfig, 8000: classConfig, // not authorized, wrong password, no such user
	40573: classConfig, 76: classConfig, // not a replica set
	40415: classConfig, 40324: classConfig, 59: classConfig, // unknown option, stage, command: the server is too old
	26: classConfig, // a mongos rejects a database that does not exist

	10334: classOversize,
	// A string above 16 MiB, such as a token with a large _id in hexadecimal, and a buffer above 64 MiB.
	16493: classOversize, 13548: classOversize,
}

const (
	labelResumable    = "ResumableChangeStreamError"
	labelNotResumable = "NonResumableChangeStreamError"
	labelNetwork      = "NetworkError"
)

// classifyError returns the class and the server's code of an error, and the reason for the restart
// metric. It uses codes and labels, never texts.
func classifyError(err error) (class errorClass, code int, reason string) {
	if errors.Is(err, mongo.ErrClientDisconnected) {
		return classFatal, 0, "client"
	}

	var server mongo.ServerError
	if !errors.As(err, &server) {
		// Server selection, the pool or the connection failed.
		return classResume, 0, "network"
	}
	if all := server.ErrorCodes(); len(all) > 0 {
		code = all[0]
	}

	class, known := classByCode[code]
	switch {
	case known:
	case server.HasErrorLabel(labelNotResumable):
		class = classGap
	case server.HasErrorLabel(labelResumable), server.HasErrorLabel(labelNetwork), code == 0:
		class = classResume
	}

	if code == 0 {
		return class, code, "network"
	}
	return class, code, [...]string{"unknown", "server", "gap", "config", "oversize", "client"}[class]
}

// gapReason returns the reason of a gap with the given server code.
func gapReason(code int) string {
	if slices.Contains([]int{286, 136}, code) {
		return changes.GapHistoryLost
	}
	return changes.GapTokenRejected
}

// describeMisconfiguration describes a configuration error and its fix to an operator.
func describeMisconfiguration(code int, scope *changes.Scope) string {
	switch code {
	case 13:
		return fmt.Sprintf("the MongoDB user is not authorized to watch %s (13): "+
			"grant the actions find and changeStream on %s", scope, scope.PrivilegeResource())
	case 18, 11, 8000:
		return fmt.Sprintf("MongoDB rejects the user or the password (%d): "+
			"check the credentials and authSource in the URI", code)
	case 40573, 76:
		return fmt.Sprintf("MongoDB is not a replica set (%d), and only replica sets support change streams: "+
			"start mongod with --replSet and run rs.initiate()", code)
	case 26:
		return fmt.Sprintf("the database of %s does not exist (26): create it", scope)
	default:
		return fmt.Sprintf("the server does not support an option of the change stream (%d): use MongoDB 6.0 or later", code)
	}
}
