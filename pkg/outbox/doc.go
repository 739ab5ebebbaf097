// Package outbox writes events into a service's outbox collection, in the transaction of its business write, from where
// the relay brings them to Kafka.
//
//	err := outbox.Transaction(ctx, client, func(ctx context.Context) error {
//		if _, err := orders.InsertOne(ctx, order); err != nil {
//			return err
//		}
//		return box.Append(ctx, event.New("order", order.ID, "OrderPlaced", payload))
//	})
//
// What is promised: an event is in the collection exactly when the transaction commits, and events of one ordering key
// that are appended one after the other (the second transaction begins after the first has committed, or both are in one)
// are delivered in that order. What is not: an order between transactions that run at the same time, and anything at all
// for an event whose commit did not return success; the driver retries a commit whose outcome is unknown, so that is rare.
//
// Append costs one insert command for all its events and no read. It does not wait for Kafka. A Box starts no goroutine
// and needs no closing; it is safe for concurrent use, but a transaction, like its session, belongs to one goroutine.
//
// The driver carries a session inside the context. A call with another context, for example the one from outside the
// callback, is silently outside of the transaction; Append refuses such a context with ErrNoTransaction instead.
package outbox
