// Package memory is a service's surroundings without any server, for unit tests: a database with real transactions, an
// outbox, topics with consumer groups, and a relay between them.
//
//	db := memory.NewDB()
//	box, err := memory.NewOutbox(db)
//	broker := memory.NewBroker()
//	relay, err := memory.NewRelay(box, broker)
//	…
//	err = db.Transaction(ctx, func(ctx context.Context) error { return service.PlaceOrder(ctx, order) })
//	err = relay.Flush(ctx) // or relay.Run(ctx) beside the test
//	broker.Messages("outbox.event.order")
//
// What is promised: the same contract as with servers, which the exported suites (outboxtest, inboxtest, consumertest,
// sagatest) check on both. A transaction sees one snapshot and its own writes; what it wrote is there after the commit
// and is not there at all after an error; two that write the same thing conflict, and the later one starts afresh. What
// is stored is encoded, so nobody can change it from outside. Events of one key reach their topic in commit order; a
// group's member gets each record at least once, again unless it was committed.
//
// What differs: there is no session of the driver, so a service that writes its own collections through the driver keeps
// them behind an interface, and its tests have a Table instead. Nothing outlives the process.
//
// Waiting is by signals: no method polls, and none of them sleeps unless it was given a Clock that does. Everything is
// safe for concurrent use, but a transaction belongs to one goroutine. The cost is that of maps under one lock.
package memory
