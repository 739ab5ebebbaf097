package consumer

import (
	"errors"
	"reflect"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

// transientCodes are the codes of a MongoDB server that cannot serve now, although the command was valid.
var transientCodes = []int{
	6,     // HostUnreachable
	7,     // HostNotFound
	24,    // LockTimeout
	89,    // NetworkTimeout
	91,    // ShutdownInProgress
	112,   // WriteConflict
	133,   // FailedToSatisfyReadPreference
	134,   // ReadConcernMajorityNotAvailableYet
	189,   // PrimarySteppedDown
	251,   // NoSuchTransaction: it was aborted, for example by a new primary
	262,   // ExceededTimeLimit
	290,   // TransactionExceededLifetimeLimitSeconds
	9001,  // SocketException
	10107, // NotWritablePrimary
	11600, // InterruptedAtShutdown
	11602, // InterruptedDueToReplStateChange
	13388, // StaleConfig
	13435, // NotPrimaryNoSecondaryOk
	13436, // NotPrimaryOrSecondary
}

// transientLabels are the error labels of the driver with the same meaning.
var transientLabels = []string{
	"TransientTransactionError", "UnknownTransactionCommitResult", "RetryableWriteError",
	"NetworkError", "NetworkTimeoutError", "ExceededTimeLimitError",
}

// isTransient reports whether err is an error of MongoDB that the message did not cause: no server is
// available, a new primary was elected, or another transaction wrote the same documents at the same
// time. The time-out of a handler is not transient.
func isTransient(err error) bool {
	if _, ok := errors.AsType[*timeoutError](err); ok {
		return false
	}
	if l, ok := errors.AsType[mongo.LabeledError](err); ok && slices.ContainsFunc(transientLabels, l.HasErrorLabel) {
		return true
	}
	if se, ok := errors.AsType[mongo.ServerError](err); ok && slices.ContainsFunc(transientCodes, se.HasErrorCode) {
		return true
	}
	return isDriverTimeout(err)
}

// isAbortedTransaction reports whether err means that the server has aborted the transaction.
func isAbortedTransaction(err error) bool {
	se, ok := errors.AsType[mongo.ServerError](err)
	return ok && (se.HasErrorCode(251) || se.HasErrorCode(290))
}

// isDriverTimeout reports whether the database took too long. mongo.IsTimeout is true for every
// time-out, also for that of a handler's call to another service. So isDriverTimeout calls it only
// for errors of the driver's packages. It does not compare their types: some types, such as that of
// a failed server selection, are in packages without a compatibility promise.
func isDriverTimeout(err error) bool {
	if err == nil {
		return false
	}

	// An error may wrap several causes, so the whole tree is searched.
	var causes []error
	switch x := err.(type) { //nolint:errorlint // this walks the tree itself
	case interface{ Unwrap() error }:
		causes = []error{x.Unwrap()}
	case interface{ Unwrap() []error }:
		causes = x.Unwrap()
	}

	t := reflect.TypeOf(err)
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}

	// WithTransaction wraps each error that its callback returned too late as a time-out. For
	// these, the cause decides.
	late := t.Name() == "timeoutError" && slices.ContainsFunc(causes, func(c error) bool { return c != nil })
	if strings.HasPrefix(t.PkgPath(), "go.mongodb.org/mongo-driver/") && !late && mongo.IsTimeout(err) {
		return true
	}
	return slices.ContainsFunc(causes, isDriverTimeout)
}
