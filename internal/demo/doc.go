// Package demo is `outrelay dev`: a replica set and a broker on this machine, two relays as processes of their own, a
// sample order service that appends events in transactions, and a consumer that checks each promise while it runs and
// while somebody kills the relay.
//
// What it promises: whatever ends Run, the relays and the servers end before it returns, and when the process itself is
// killed they end all the same; the figures of a Result come from a consumer that shares no code with the relay. Run
// blocks until the events of Options are through, the context ends or the user quits.
//
// A scenario ([RunScenario]) is the same with one fault and one promise: it ends by itself, within a minute or two, and
// says in figures whether the promise held. What a scenario breaks it breaks for real: it kills processes, stops servers,
// rolls the oplog over.
package demo
