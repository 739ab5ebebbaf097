package mongodb

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/x/mongo/driver"

	"github.com/outrelay/outrelay/internal/mongodb/concern"
)

// ErrNotFound means that the collection has no document with the id.
var ErrNotFound = errors.New("not found")

// Fencer runs fn in a transaction that commits only while the caller owns the watcher (N3). The lease is a
// Fencer. fn must use the context that it gets, with the client of mongo.SessionFromContext. It may run
// several times.
type Fencer interface {
	//
	// also is a further update of the watcher document, which takes effect with the transaction; nil is none.
	Fenced(ctx context.Context, also bson.D, fn func(ctx context.Context) error) error
}

// transient lists the codes of a server that cannot serve now, although the command was valid. With 371 a server rejects all writes of
// users, because an operator or a migration has blocked them, or because the disk is nearly full.
var transient = []int{
	6,  // HostUnreachable
	7,  // HostNotFound
	24, // LockTimeout
	89, // NetworkTimeout
	91, // ShutdownInProgress
	codeWriteConflict,
	133,   // FailedToSatisfyReadPreference
	134,   // ReadConcernMajorityNotAvailableYet
	189,   // PrimarySteppedDown
	251,   // NoSuchTransaction: it was aborted, for example by a new primary
	262,   // ExceededTimeLimit
	290,   // TransactionExceededLifetimeLimitSeconds
	371,   // UserWritesBlocked
	462,   // IngressRequestRateLimitExceeded: the server sheds load
	9001,  // SocketException
	10107, // NotWritablePrimary
	11600, // InterruptedAtShutdown
	11601, // Interrupted: an operator, or the next owner of a partition, has ended the session
	11602, // InterruptedDueToReplStateChange
	13388, // StaleConfig
	13435, // NotPrimaryNoSecondaryOk
	13436, // NotPrimaryOrSecondary
	14031, // OutOfDiskSpace
}

// transientLabels are the error labels of the driver with the same meaning.
var transientLabels = []string{
	"TransientTransactionError", "UnknownTransactionCommitResult", "RetryableWriteError",
	"NetworkError", "NetworkTimeoutError", "ExceededTimeLimitError", "SystemOverloadedError", "RetryableError",
}

// IsTransient reports whether err is an error of MongoDB that the documents and the command did not cause: no server is available, a new
// primary was elected, or another transaction wrote the same documents at the same time.
func IsTransient(err error) bool {
	labeled, ok := errors.AsType[mongo.LabeledError](err)
	return ok && slices.ContainsFunc(transientLabels, labeled.HasErrorLabel) ||
		HasCode(err, transient...) || IsDriverTimeout(err) || IsConnectionLost(err)
}

// IsConflict reports whether err means that another transaction has written the same documents and has not ended.
func IsConflict(err error) bool { return HasCode(err, codeWriteConflict) }

// environment lists further codes of errors that are no fault of the documents of a write: the same write succeeds when the server, its
// members or its users are in order again. With 8000 the proxy of Atlas rejects a request for its user, its command, a quota or a rate,
// before the server sees a document.
var environment = []int{
	13, 18, 43, 46, 50, 64, 100, 150, 175, 202, 211, 225, 237, 244, 246, 256, 261, 267, 279, 317, 323, 358, 384, 391, 402, 8000, 10058,
}

// IsRejection reports whether MongoDB, or its driver, rejects a write for the contents of its documents, for example for their
// size or because of a validator or an index. If the write is repeated, it fails again. The other documents of the write are not
// at fault. A transaction that is too large for the server's cache is rejected as well: its halves fit.
func IsRejection(err error) bool {
	if IsTransient(err) {
		return false
	}
	// The driver measures documents before it sends them.
	if errors.Is(err, driver.ErrDocumentTooLarge) {
		return true
	}

	var server mongo.ServerError
	return errors.As(err, &server) && !mongo.IsNetworkError(err) && !mongo.IsTimeout(err) && !HasCode(err, environment...)
}

// IsRetried reports whether the driver may repeat the command that failed with err.
func IsRetried(err error) bool {
	failed, ok := errors.AsType[driver.Error](err)
	return ok && failed.RetryableRead()
}

// PrivilegeError is the error of a command that the user may not run.
type PrivilegeError struct {
	Action string // as roles name it, such as createIndex
	On     string // the namespace, or "cluster"
	Fix    string // an alternative to granting the action; "" if there is none
	Err    error
}

func (e *PrivilegeError) Error() string {
	text := fmt.Sprintf("not allowed: grant the action %s on %s to the relay's user", e.Action, e.On)
	if e.Fix != "" {
		text += ", or " + e.Fix
	}
	return text
}

func (e *PrivilegeError) Unwrap() error { return e.Err }

// The server codes that outrelay distinguishes. They are numbers, because the texts of the server change.
const (
	CodeUnauthorized          = 13
	CodeAuthenticationFailed  = 18
	codeNamespaceNotFound     = 26
	codeIndexOptionsConflict  = 85
	codeIndexKeySpecsConflict = 86

	codeWriteConflict = 112

	CodeSnapshotTooOld      = 239
	CodeSnapshotUnavailable = 246

	codeNoQueryExecutionPlans  = 291
	codeAPIStrict              = 323
	CodeCollectionUUIDMismatch = 361
)

// HasCode reports whether err is an error of the server with one of the codes.
func HasCode(err error, codes ...int) bool {
	var se mongo.ServerError
	if errors.As(err, &se) {
		return slices.ContainsFunc(codes, se.HasErrorCode)
	}
	// A monitor of commands gets the error before the driver converts it.
	raw, ok := errors.AsType[driver.Error](err)
	return ok && slices.Contains(codes, int(raw.Code))
}

// DescribeErrorWithFix wraps err, or returns nil if err is nil. If the server rejected the command because the action
// is not granted, the error is a [*PrivilegeError] with that action.
func DescribeErrorWithFix(err error, doing, action, resource, fix string) error {
	if err == nil {
		return nil
	}
	if HasCode(err, CodeUnauthorized) {
		err = &PrivilegeError{Action: action, On: resource, Fix: fix, Err: err}
	}
	return fmt.Errorf("%s: %w", doing, err)
}

// DescribeError is DescribeErrorWithFix without a fix.
func DescribeError(err error, doing, action, resource string) error {
	return DescribeErrorWithFix(err, doing, action, resource, "")
}

// Majority returns coll with majority concerns on the primary (N21).
func Majority(coll *mongo.Collection) *mongo.Collection {
	return coll.Clone(options.Collection().SetReadConcern(readconcern.Majority()).
		SetWriteConcern(concern.Majority()).SetReadPreference(readpref.Primary()))
}

// Namespace returns the full name of the collection.
func Namespace(coll *mongo.Collection) string { return coll.Database().Name() + "." + coll.Name() }
