// Package mongodb holds the MongoDB statements that do not depend on envelopes: the clock of the
// cluster, majority reads, transactions that commit only while their author owns the watcher, indexes,
// and the kinds of errors.
//
// Each function does its own I/O, keeps no state and starts no goroutine. It blocks until its context
// ends. It compares times of the server only, never times of two processes. Reads that lead to a
// publish are majority reads on the primary (N21), even if the client is configured differently.
//
// If MongoDB rejects a statement because of a missing privilege, the error is a [*PrivilegeError], which
// names the privilege to grant.
package mongodb
