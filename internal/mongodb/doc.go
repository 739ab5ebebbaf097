// Package mongodb holds the statements on MongoDB that know nothing of envelopes: the clock of the
// cluster, majority reads, transactions that commit only while their author owns the watcher, indexes,
// and the kinds of errors.
//
// Each function does its own I/O, keeps no state and starts no goroutine. It blocks until its context
// ends. Times that are compared are the server's, never those of two processes. Reads that lead to a
// publish are majority reads on the primary (N21), whatever the client is configured to.
//
// If MongoDB rejects a statement because of a missing privilege, the error is a [*PrivilegeError], which
// names the privilege to grant.
package mongodb
