// Package fault breaks relays and servers while events flow, and holds what comes out against the promises. Kills of
// relays use the servers that all tests share; whatever breaks a server starts servers of its own.
//
// The default run is bounded. `go test ./test/fault -fault.long -timeout 60m` repeats the kills over all pairs of crash
// points and the faults of the servers many times; docs/faults.md records what it showed.
package fault
