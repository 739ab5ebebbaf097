// Package state describes the state database, in which the relay stores everything that it knows: leases,
// positions, waiting events, dead letters, nodes, the audit log.
//
// All its collections begin with a prefix, so that the state database may be a database of the application, which
// the relay watches. Scopes never match a name with the prefix (N27).
package state
