// Package memory replaces MongoDB, Kafka and the relay in unit tests: it contains a database with
// real transactions, an outbox, topics with consumer groups, and a relay between them.
//
//	db := memory.NewDB()
//	box, err := memory.NewOutbox(db)
//	broker := memory.NewBroker(0)
//	relay, err := memory.NewRelay(box, broker, routing.Config{}, "")
//	…
//	err = box.Transaction(ctx, func(ctx context.Context) error { return service.PlaceOrder(ctx, order) })
//	err = relay.Flush(ctx) // or relay.Run(ctx) in a goroutine
//	broker.Records("outbox.event.order")
//
// Package outboxtest is its public part. The faults of a Broker and the methods that change logs and groups are for the tests
// of this module.
//
// Guarantees: apart from the differences, the contract is the same as with servers. Test suites check both. A transaction sees
// one snapshot and its own writes. Its writes are visible after the commit, and do not exist after an error. If two
// transactions write the same row, they conflict, and the later one starts again. Stored values are
// encoded, so they cannot be changed from outside. Events with the same key reach their topic in
// commit order. A member of a group gets each record at least once, and again if it does not commit
// it.
//
// Differences: the documentation of package outboxtest lists them.
//
// Waiting: methods wait for signals and timers, and none polls. So tests can use testing/synctest as a fake clock.
//
// Concurrency and cost: everything is safe for concurrent use, but a transaction belongs to one
// goroutine. The data is stored in maps that one lock protects.
package memory
