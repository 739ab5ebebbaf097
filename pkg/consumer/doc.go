// Package consumer delivers the records of Kafka topics to handlers. Each message has its effect once for each handler, in
// the order of its key. This holds through rebalances, crashes, and outages of the database.
//
//	c, err := consumer.New("billing", db, consumer.WithBrokers("kafka:9092"), consumer.WithTopics("outbox.event.order"))
//	…
//	err = c.Handle("send-invoices", consumer.Func(func(ctx context.Context, m *consumer.Message) error {
//		if _, err := invoices.InsertOne(ctx, invoice(m)); err != nil {
//			return err
//		}
//		return box.Append(ctx, InvoiceSent.New(id, invoice))
//	}, "OrderPlaced"))
//	…
//	err = c.Run(ctx)
//
// # Effect
//
// By default a handler runs in a transaction that also writes the mark of the message to the inbox. The handler's writes and
// the events that it appends to the outbox, made with its context, are committed once. This holds however often Kafka
// delivers the record, and also if the producer sent the message twice. WithMode selects another Mode. With
// AtLeastOnce the handler runs at least once, for every delivery. Deliveries then depend only on Kafka's offsets, as in a
// consumer that commits offsets after its work.
//
// # Order and parallelism
//
// A partition has inbox.Lanes lanes, split by key. A handler gets the messages of a lane one after another, in their order.
// Lanes run in parallel, up to Concurrency over all partitions. Messages that wait in a lane share a transaction: up to Batch
// messages, and as many as are expected to take five seconds. If one of them fails, they are tried again one by one, so that
// Retry decides only about the message that failed. While a message is retried in place, its lane waits, but only for
// this handler. Several handlers of a message are independent of each other.
//
// # Failures
//
// A message fails when its handler returns an error, panics, or exceeds its Timeout. All that it wrote is rolled back. By
// default (see Retry) the following happens:
//
//   - The message is tried again in place after 100 ms and 400 ms.
//   - Then it is set aside in MongoDB, together with later messages of its key. It is tried again after 5 s, 10 s, 20 s and
//     so on up to 5 min. Its offset passes, so that other keys go on.
//   - If messages of 20 different keys fail in a row, the handler is suspended. It tries one of its messages after 5 s up to
//     5 min, until one succeeds. All other messages stay in Kafka. If other handlers of the topic have finished a message,
//     it is set aside untried.
//   - After 24 hours the message becomes a dead letter.
//
// So an outage of a service that handlers need causes lag, and no dead letters. WithRetry and WithRetryFor change the
// values. A handler can also decide itself, with the errors of RetryIn, Suspend, Reject and Discard. Expired and invalid
// messages become dead letters at once. WithRetryTopics lets messages wait in Kafka instead of MongoDB.
//
// # Offsets
//
// An offset is committed when its message and all messages that were fetched before it are finished for all their handlers.
// A message is finished when it is handled, recognized as a duplicate, dropped, set aside, or safely stored as a dead letter,
// or in a retry topic. Commit modes only define how soon the commit follows. Records of aborted transactions are never
// delivered. Transaction markers and compaction leave holes in the offsets, and the committed offset passes them.
//
// No message blocks its partition permanently. If what follows a failure can never be carried out, the message becomes a
// dead letter. If the letter cannot be written, a letter without key, body and headers is written. If that fails too, the
// message passes with a *lostError. Each step is reported to WithErrorHook. If MongoDB aborts the transaction of one message twice
// while its handler runs, Retry decides about the message with a *lifetimeError. A Kafka batch that is damaged, or older
// than Kafka 0.11, becomes one dead letter without a body, which names its offsets. A damaged batch is fetched five times
// first. The consumer waits only for servers that are unavailable, and for a missing dead letter topic if the letters are not
// also stored in a collection.
//
// If a partition lost records, for example after an unclean leader election, the consumer continues from the first offset
// where the log differs. It detects this by the leader epochs, even if the partition has grown again before the next fetch.
// A member knows the epochs only since it got the partition. Records that were lost and replaced while no member had the
// partition are detected only if the log is shorter than the group's offset.
//
// # Identity
//
// The inbox identifies a message by its namespace and id: those of the relay, or the source and id of a CloudEvent. A record
// without an id is identified by its place and timestamp. A record with an id or namespace above 1,024 bytes counts as
// undecodable.
//
// # Trouble
//
// An outage of the database uses no attempts. Lanes wait with backoff, nothing more is fetched, and nothing is committed. The
// messages in memory stay within Buffer and one fetch for each partition. Pause drops the messages in memory.
//
// At a stop and at a rebalance, running handlers may finish within the time of Drain, and are then abandoned. If an abandoned
// handler still commits, the watermark of the inbox rejects its messages for the next owner of the partition. A handler that
// ignores its context can be abandoned but not stopped.
//
// WithErrorHook gets every error once. Panics of handlers, decoders, the inbox and transactions count as errors of the message. A
// panic at the end of a trace is reported. An Observer must not panic.
//
// # Cost
//
// In addition to the handler's own writes, a batch costs two reads, one insert and one update in its transaction, and the
// commit. Package internal/setaside describes the costs of failures. Each partition has one goroutine and one connection that
// read it. Each handler has one that retries messages. A lane has a goroutine while it has messages.
// Nothing starts before Run. When Run returns, everything that it started has ended, except abandoned handlers.
package consumer
