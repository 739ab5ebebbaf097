// Package entity stores the documents of a service, one Go value per document, in the transaction
// of the context. Entities are loaded, inserted, updated, stored and deleted without hand-written
// statements.
//
// A Recorded collection also appends an event for each change, in the same transaction. A Projector
// copies these changes to a collection for reading, in any database.
//
//	orders, err := entity.NewRecorded(db.Collection("orders"), box, "order", func(o *Order) *uuid.UUID { return &o.ID })
//	...
//	err = box.Transaction(ctx, func(ctx context.Context) error {
//		o, err := orders.Load(ctx, id) // ErrMissing if it does not exist
//		if err != nil {
//			return err
//		}
//		o.Paid = true
//		_, err = orders.Update(ctx, o)
//		return err
//	})
//
// Guarantees: a change is in the collection if and only if its event is in the outbox. The version
// of an entity grows by one with each recorded change, including deletion and re-creation, and its
// events reach Kafka in that order. A Projector never replaces a version by an older one, even if
// messages are repeated or late. It rejects messages that it does not understand instead of
// ignoring them.
//
// Nothing is guaranteed for writes that bypass these types, for example with the driver or a shell.
// They change no version and record no event.
//
// Cost: a call of a Collection needs one command, or two to store an entity with versions. A call
// of a Recorded needs three to five commands for each 500 entities.
//
// Concurrency: the types are safe for concurrent use and start no goroutines. A transaction belongs
// to one goroutine. Its callback may run again, so load inside of the callback the entities that it
// changes.
package entity
