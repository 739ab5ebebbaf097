// Package demo implements `outrelay dev`. It starts a replica set and a broker on this machine, two
// relays as separate processes, a sample order service that appends events in transactions, and a
// consumer. The consumer checks every promise while the demo runs, also when the user kills a
// relay.
//
// When Run returns, for any reason, the relays and the servers have ended. If the process
// itself is killed, they end too. The figures of a Result come from a consumer that shares no code
// with the relay. Run blocks until all events of the Options are delivered, the context ends, or
// the user quits.
//
// A scenario ([RunScenario]) shows one fault and one promise. It ends within a minute or two, and
// reports in figures whether the promise held. Its faults are real: it kills processes, stops
// servers, or rolls the oplog over.
package demo
