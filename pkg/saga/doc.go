// Package saga runs processes that need more than one message. Each saga has a stored state.
// Messages move it from step to step until it is complete.
//
//	reg, err := saga.NewRegistry(store, saga.WithOutbox(box))
//	orders, err := saga.New[Order, uuid.UUID](reg, "order_sagas", saga.WithTombstone(24*time.Hour))
//	orders.Start("OrderPlaced", saga.ByJSON(func(p Placed) uuid.UUID { return p.OrderID }),
//		saga.JSON(func(ctx context.Context, o *saga.Instance[Order, uuid.UUID], p Placed) error {
//			o.State.Amount = p.Amount
//			o.Emit(TakePayment.New(p.OrderID.String(), Payment{Amount: p.Amount}))
//			return o.Timeout("unpaid", 15*time.Minute, event.Payload{})
//		}))
//	orders.Handle("PaymentTaken", saga.ByHeader[uuid.UUID](), …)
//	orders.Timeout("unpaid", …)
//	err = orders.Register(consumer)
//
// # Guarantees
//
// One transaction commits the state, the events that a step emits, its timeouts, and the mark of
// the consumer that the message was handled. If one of them fails, none is stored.
//
// If several steps of one saga run at the same time, in any process, one of them commits. The
// others run again on the new state, because the version of the document guards every change,
// including the completion. If a start finds that the saga exists, its message is handled as one
// for an existing saga.
//
// A message that is delivered twice has its effect once. This is the work of the inbox, in the same
// transaction, or of InSequence. A repeated start never starts a second saga as long as the saga or
// its tombstone exists.
//
// A step costs one read, one guarded write, and one insert for all its events together.
//
// # Order
//
// The messages of one saga are handled in the order of their arrival. A consumer delivers messages
// with the same key in order. If messages arrive with different keys or by different topics and
// have a number, InSequence stores early messages in the document of the saga until it is their
// turn.
//
// # Transactions and retries
//
// A step that a consumer runs joins the transaction of its context. After a write conflict in
// MongoDB, the transaction starts again automatically. A *ConflictError is returned, and the policy
// of the consumer handles the message again: by default after 50, 100 and 250 ms.
//
// If the context has no transaction, the step starts one and does these retries itself. With
// WithoutTransaction it runs without a transaction. Then only the state is consistent, and the
// events of the step are written after the state.
//
// So a callback may run more than once for a message. It must not have effects other than writes
// with its context. It belongs to one goroutine, as the transaction does.
//
// # Names
//
// The name of a saga is its collection. New rejects a second saga of the same name in a process.
// Registry.Prepare rejects it between processes: it stores in the collection DefaultTypes which
// program a saga belongs to and the kind of its ids.
package saga
