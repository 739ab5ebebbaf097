package consumer

import (
	"errors"
	"reflect"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/pkg/inbox"
)

// Matcher says whether a rule is for an error. It must be a pure function: it is called from many goroutines.
type Matcher func(err error) bool

// Is matches errors for which errors.Is is true for one of the targets.
func Is(targets ...error) Matcher {
	return func(err error) bool {
		return slices.ContainsFunc(targets, func(t error) bool { return errors.Is(err, t) })
	}
}

// As matches errors that are or wrap an E.
func As[E error]() Matcher {
	return func(err error) bool {
		_, ok := errors.AsType[E](err)
		return ok
	}
}

// AsFunc matches errors that are or wrap an E for which f is true.
func AsFunc[E error](f func(E) bool) Matcher {
	return func(err error) bool {
		e, ok := errors.AsType[E](err)
		return ok && f(e)
	}
}

// Not matches what m does not.
func Not(m Matcher) Matcher { return func(err error) bool { return !m(err) } }

// All matches what each of ms does.
func All(ms ...Matcher) Matcher {
	return func(err error) bool {
		return !slices.ContainsFunc(ms, func(m Matcher) bool { return !m(err) })
	}
}

// isDuplicate reports whether err says that the message was handled before.
func isDuplicate(err error) bool { return errors.Is(err, inbox.ErrDuplicate) }

// Codes by which a MongoDB server says that it cannot serve now, though the statement was fine.
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

// Labels by which the driver says so.
var transientLabels = []string{
	"TransientTransactionError", "UnknownTransactionCommitResult", "RetryableWriteError",
	"NetworkError", "NetworkTimeoutError", "ExceededTimeLimitError",
}

// Transient matches errors of MongoDB that say nothing about the message: no server is to be had, a new primary was
// elected, or others wrote the same documents at the same time. What a handler's own time-out caused is not among them.
func Transient() Matcher { return isTransient }

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

// isAbortedTransaction matches errors by which a server says that it has aborted the transaction.
func isAbortedTransaction(err error) bool {
	se, ok := errors.AsType[mongo.ServerError](err)
	return ok && (se.HasErrorCode(251) || se.HasErrorCode(290))
}

// isDriverTimeout reports whether the database took too long. For mongo.IsTimeout every time-out is the database's, also that of a
// handler's call to somebody else, so it is asked about the driver's own errors alone. Some of their types, as that of a
// server selection that found none, are in packages that promise nothing, so their names are not used.
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
	// WithTransaction says of whatever its callback returned too late that it timed out: the cause decides.
	late := t.Name() == "timeoutError" && slices.ContainsFunc(causes, func(c error) bool { return c != nil })
	if strings.HasPrefix(t.PkgPath(), "go.mongodb.org/mongo-driver/") && !late && mongo.IsTimeout(err) {
		return true
	}
	return slices.ContainsFunc(causes, isDriverTimeout)
}
