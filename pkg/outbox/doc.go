// Package outbox stores events in the outbox collection of a service, in the same transaction as
// the business data. The relay then sends them to Kafka.
//
//	err := box.Transaction(ctx, func(ctx context.Context) error {
//		if _, err := orders.InsertOne(ctx, order); err != nil {
//			return err
//		}
//		return box.Append(ctx, OrderPlaced.New(order.ID, order))
//	})
//
// Atomicity: an event is in the collection if and only if its transaction commits. If the commit
// does not return success, nothing is promised about the event. This is rare, because the driver
// retries a commit whose outcome is unknown.
//
// Order: events with the same key are delivered in the order of their appends, if both appends are
// in one transaction or if the second transaction starts after the first has committed. Concurrent
// transactions may be delivered in either order.
//
// Cost: Append needs one insert command for all its events and no read. It does not wait for Kafka.
// A Box starts no goroutine and need not be closed.
//
// Concurrency: a Box is safe for concurrent use. A transaction belongs to one goroutine, as its
// session does.
//
// The driver carries the session in the context. A call with a different context, for example the
// one from outside the callback, silently runs outside of the transaction. Append rejects such a
// context with ErrNoTransaction.
package outbox
