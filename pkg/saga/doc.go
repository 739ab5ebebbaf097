// Package saga runs processes that need more than one message. Each saga has a stored state. Messages move it from step to
// step until it is complete.
//
//	var payments = saga.Define[Payment]("payments")
//
//	func init() {
//		saga.Start(payments, shop.OrderPlaced, begin)
//		saga.On(payments, shop.CardCharged, charged)
//		payments.Timeout("unanswered", unanswered)
//	}
//	…
//	h, err := payments.Handler(box)
//	err = c.Handle(payments.Name(), h) // c is a consumer.Consumer
//
// # Guarantees
//
// One transaction commits the state, the events that a step emits, its timeouts, and the mark of the consumer that the
// message was handled. If one of them fails, none is stored.
//
// If several steps of one saga run at the same time, in any process, one of them commits. The others run again on the new
// state, because the version of the document guards every change, including the completion. If a start finds that the saga
// exists, its message is handled as one for an existing saga.
//
// A message that is delivered twice has its effect once. This is the work of the inbox, in the same transaction, or of
// Sequenced. A repeated start never starts a second saga as long as the saga or its tombstone exists.
//
// A step costs one read, one guarded write, and one insert for all its events together.
//
// # Order
//
// The messages of one saga are handled in the order of their arrival. A consumer delivers messages with the same key in
// order. If messages arrive with different keys or by different topics and have a number, Sequenced stores early messages in
// the document of the saga until it is their turn.
//
// # Transactions and retries
//
// A step joins the transaction of its context, which a consumer provides. Without one, the step runs in a transaction of its
// own. After a write conflict in MongoDB, the transaction starts again automatically. If the step still fails with
// ErrConflict, the consumer's Retry handles the message again.
//
// So a step may run more than once for a message. It must not have effects other than writes with its context. It belongs to
// one goroutine, as the transaction does.
//
// # Names
//
// The name of a saga is its collection, in the database of the outbox. The consumer stores in the collection saga_types
// which program a saga belongs to and the kind of its ids, and rejects another saga with the same name.
package saga
