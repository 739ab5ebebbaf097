package consumer

import (
	"errors"
	"reflect"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/inbox"
)

// Matcher reports whether a rule applies to an error. It must be a pure function: it is called from
// many goroutines.
type Matcher func(err error) bool

// Is returns a Matcher of errors for which errors.Is is true for one of the targets.
func Is(targets ...error) Matcher {
	return func(err error) bool {
		return slices.ContainsFunc(targets, func(t error) bool { return errors.Is(err, t) })
	}
}

// As returns a Matcher of errors that are or wrap an E.
func As[E error]() Matcher {
	return func(err error) bool {
		_, ok := errors.AsType[E](err)
		return ok
	}
}

// AsFunc returns a Matcher of errors that are or wrap an E for which f is true.
func AsFunc[E error](f func(E) bool) Matcher {
	return func(err error) bool {
		e, ok := errors.AsType[E](err)
		return ok && f(e)
	}
}

// Not returns a Matcher of the errors that m does not match.
func Not(m Matcher) Matcher { return func(err error) bool { return !m(err) } }

// All returns a Matcher of the errors that all of ms match.
func All(ms ...Matcher) Matcher {
	return func(err error) bool {
		return !slices.ContainsFunc(ms, func(m Matcher) bool { return !m(err) })
	}
}

// isDuplicate reports whether err means that the message was handled before.
func isDuplicate(err error) bool { return errors.Is(err, inbox.ErrDuplicate) }

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

// Transient returns a Matcher of MongoDB errors that the message did not cause: no server is
// available, a new primary was elected, or another transaction wrote the same documents at the same
// time. It does not match the time-out of a handler.
func Transient() Matcher { return isTransient }

// isTransient is the Matcher of Transient.
func isTransient(err error) bool {
	if _, ok := errors.AsType[*TimeoutError](err); ok {
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
