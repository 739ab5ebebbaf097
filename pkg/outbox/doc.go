// Package outbox stores events in the outbox collection of a service, in the same transaction as
// the business data. The relay then sends them to Kafka.
//
//	box, err := outbox.New(client.Database("shop")) // the collection shop.outbox, which the relay watches
//	…
//	err = box.Transaction(ctx, func(ctx context.Context) error {
//		if _, err := orders.InsertOne(ctx, order); err != nil {
//			return err
//		}
//		return box.Append(ctx, OrderPlaced.New(order.ID, order))
//	})
//
// Atomicity: an event is in the collection if and only if its transaction commits. If the commit
// does not return success, nothing is promised about the event. This is rare, because the driver
// retries a commit whose outcome is unknown; ErrCommitUnknown reports it.
//
// Order: events with the same key are delivered in the order of their appends, if both appends are
// in one transaction or if the second transaction starts after the first has committed. Concurrent
// transactions may be delivered in either order.
//
// Context: the driver carries the session of the transaction in the context. A call with a different
// context, for example the one from outside the callback, silently runs outside of the transaction.
// Append rejects such a context with ErrNoTransaction. Package guard does the same for the
// collections of the service, and finds other writes that miss their transaction.
//
// Sessions: transactions that were started with the methods of the driver are joined. To use a
// session of your own, pass mongo.NewSessionContext(ctx, session).
//
// Later: Schedule appends an event for delivery at a later time, and Cancel and Reschedule change it
// until the relay claims it. Package cron appends recurring events.
//
// Cost: Append needs one insert command for all its events and no read. It does not wait for Kafka.
// A Box starts no goroutine and need not be closed.
//
// Concurrency: a Box is safe for concurrent use. A transaction belongs to one goroutine, as its
// session does.
package outbox
