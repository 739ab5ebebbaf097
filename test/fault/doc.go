// Package fault breaks relays and servers while events flow, and checks the delivered records against the
// promises. Tests that kill relays use the shared servers. Tests that break a server start a dedicated one.
//
// The default run is bounded. `go test ./test/fault -fault.long -timeout 60m` repeats the kills for all pairs
// of crash points, and the faults of the servers many times. docs/faults.md records the results.
package fault
