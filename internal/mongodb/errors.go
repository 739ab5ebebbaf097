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

// environment lists the codes of errors that are no fault of the documents of a write: the same write succeeds when the
// server, its members or its users are in order again. With 371 a server rejects all writes of users, because an operator or a migration has
// blocked them, or because the disk is nearly full. With 8000 the proxy of Atlas rejects a request for its user, its command, a
// quota or a rate, before the server sees a document.
var environment = []int{
	6, 7, 13, 18, 24, 43, 46, 50, 64, 89, 91, 100, 112, 133, 134, 150, 175, 189, 202, 211, 225, 237, 244, 246, 251, 256, 261, 262, 267,
	279, 290, 317, 323, 358, 371, 384, 391, 402, 462, 8000, 9001, 10058, 10107, 11600, 11601, 11602, 13388, 13435, 13436, 14031,
}

// IsRejection reports whether MongoDB, or its driver, rejects a write for the contents of its documents, for example for their
// size or because of a validator or an index. If the write is repeated, it fails again. The other documents of the write are not
// at fault. A transaction that is too large for the server's cache is rejected as well: its halves fit.
func IsRejection(err error) bool {
	var labeled mongo.LabeledError
	if errors.As(err, &labeled) &&
		(labeled.HasErrorLabel("TransientTransactionError") || labeled.HasErrorLabel("UnknownTransactionCommitResult") ||
			labeled.HasErrorLabel("NetworkError") || labeled.HasErrorLabel("RetryableError")) {
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
