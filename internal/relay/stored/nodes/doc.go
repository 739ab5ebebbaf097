// Package nodes is the registry of the processes of a deployment. It keeps the collection `nodes` of the
// state database, with one document per process, and writes the entries about nodes into the audit log.
//
// A [Member] is this process in the registry. Its first heartbeat lists it. If another process removes
// the entry, the next heartbeat lists it again. [Member.Leave] removes it. Only the clock of the server
// decides whether a node is alive, so a wrong clock of a process has no effect. If a node has sent no
// heartbeat for [StaleAfter], another node writes one entry into the audit log. Leases do not depend on
// this: they expire independently. Nodes communicate only through MongoDB, and need no connection to
// each other.
//
// A heartbeat is one small write. Every call blocks until its statement returns or its context ends. The
// package starts no goroutines, and its failures do not affect delivery.
package nodes
