// Package entity keeps a service's own documents, one Go value per document, in the transaction of the context: load,
// insert, update, store, delete, without a statement written by hand. A Recorded collection also appends an event for each
// change, in the same transaction, and a Projector mirrors these events to a collection for reading, in any database.
//
//	orders, err := entity.NewRecorded(db.Collection("orders"), box, "order", func(o *Order) *uuid.UUID { return &o.ID })
//	...
//	err = outbox.Transaction(ctx, client, func(ctx context.Context) error {
//		o, err := orders.Load(ctx, id) // *NotFoundError if it is not there
//		if err != nil {
//			return err
//		}
//		o.Paid = true
//		_, err = orders.Update(ctx, o)
//		return err
//	})
//
// What is promised: a change is in the collection exactly when its event is in the outbox. Each entity's versions grow by
// one with each recorded change, deletion and re-creation included, and its events reach Kafka in that order. A Projector
// never goes back to an older version, whatever is delivered again or late, and refuses what it does not understand rather
// than pass it over. What is not: anything for writes that go round these types, by the driver or a shell; they change no
// version and record nothing.
//
// Nothing here starts a goroutine or waits, except for the server. A Collection costs one command for each call, two for a
// store with versions; a Recorded three to five for each call or each 500 entities of it. All types are safe for concurrent
// use; a transaction belongs to one goroutine, and its callback may be run again: load inside of it what it changes.
package entity
