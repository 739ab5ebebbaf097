package consumer

import (
	"errors"
	"slices"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/transaction"
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
	371,   // UserWritesBlocked: by an operator, by a migration, or because the disk is nearly full
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

// isTransient reports whether err is an error of MongoDB that the message did not cause: no server is
// available, a new primary was elected, or another transaction wrote the same documents at the same
// time. The timeout of a handler is not transient.
func isTransient(err error) bool {
	if _, ok := errors.AsType[*timeoutError](err); ok || errors.Is(err, transaction.ErrDiscarded) {
		return false
	}
	if labeled, ok := errors.AsType[mongo.LabeledError](err); ok && slices.ContainsFunc(transientLabels, labeled.HasErrorLabel) {
		return true
	}
	return mongodb.HasCode(err, transientCodes...) || mongodb.IsDriverTimeout(err) || mongodb.IsConnectionLost(err)
}

// isAbortedTransaction reports whether err means that the server has aborted the transaction.
func isAbortedTransaction(err error) bool {
	return mongodb.HasCode(err, 251, 290, 11601)
}

// isConflict reports whether err means that another transaction has written the same documents and has not ended.
func isConflict(err error) bool { return mongodb.HasCode(err, 112) }
