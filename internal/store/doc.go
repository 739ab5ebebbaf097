// Package store holds the statements on the outbox collections and on the relay's own small collections: indexes, the
// registry of who reads which collection, the nodes that are alive, and the log of what happened.
//
// Every function does its own I/O, keeps no state and starts no goroutine; each blocks for as long as its context lets
// it. Times that are compared are the server's, never those of two processes. Reads that lead to a publish are majority
// reads on the primary (N21), whatever the client was set to. Each of the healthy path's events costs nothing here: a
// heartbeat is one write for each node and interval.
//
// A refusal for want of a privilege is a [*PrivilegeError], which says what to grant.
package store
