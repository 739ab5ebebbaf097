// Package saga runs processes that live longer than one message: each has a state, which messages move from step to step
// until it is complete.
//
//	reg, err := saga.NewRegistry(store, saga.WithOutbox(box))
//	orders, err := saga.New[Order, uuid.UUID](reg, "order_sagas", saga.WithTombstone(24*time.Hour))
//	orders.Start("OrderPlaced", saga.ByJSON(func(p Placed) uuid.UUID { return p.OrderID }),
//		saga.JSON(func(ctx context.Context, o *saga.Instance[Order, uuid.UUID], p Placed) error {
//			o.State.Amount = p.Amount
//			o.Emit(event.New("payment", p.OrderID.String(), "TakePayment", payload))
//			return o.Timeout("unpaid", 15*time.Minute, nil)
//		}))
//	orders.Handle("PaymentTaken", saga.ByHeader[uuid.UUID](), …)
//	orders.Timeout("unpaid", …)
//	err = orders.Register(consumer)
//
// # What is promised
//
// The state, the events that a step emits, its timeouts and the consumer's mark that the message was handled are committed
// in one transaction, or none of them is. Of steps of one saga that run at the same time one is committed and the others
// run again on what it left, wherever they run: the document's version guards each change, completion included. A start
// that another has preceded finds the saga there and goes on as a message for an existing one.
//
// That a message which comes twice counts once is the inbox's part, in the same transaction, or InSequence's. A start that
// comes twice starts once in any case, as long as the saga or its tombstone is there.
//
// A step costs one read, one guarded write, and one insert for all events of it together.
//
// # Order
//
// Messages of one saga are handled in the order in which they come, which is that of their key when they come from a
// consumer. Where they come by several keys or topics and carry a number, InSequence holds those that are early in the
// saga's document until their turn.
//
// # Transactions and retries
//
// A step that a consumer runs joins the transaction of its context. What MongoDB calls a write conflict starts that
// transaction afresh by itself; a *ConflictError is returned, and the consumer's policy runs the message again: by
// default after 50, 100 and 250 ms. Without a transaction in the context the step runs in one of its own and does these
// retries itself. With WithoutTransaction it runs in none: then the state alone is consistent, and the events of a step
// follow it in a write of their own.
//
// So a callback may run more than once for a message. It must have no effect beyond what it writes with its context, and
// belongs to one goroutine, as the transaction does.
//
// # Names
//
// A saga's name is its collection. Two sagas of one name are refused in a process by New, and between processes by
// Registry.Prepare, which keeps in the collection DefaultTypes whose each one is and of which kind its ids are.
package saga
