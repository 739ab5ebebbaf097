package consumer

import (
	"errors"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/transaction"
)

// isTransient reports whether err is an error of MongoDB that the message did not cause. The timeout of a handler is not transient.
func isTransient(err error) bool {
	if _, ok := errors.AsType[*timeoutError](err); ok || errors.Is(err, transaction.ErrDiscarded) {
		return false
	}
	return mongodb.IsTransient(err)
}

// isAbortedTransaction reports whether err means that the server has aborted the transaction.
func isAbortedTransaction(err error) bool {
	return mongodb.HasCode(err, 251, 290, 11601)
}
