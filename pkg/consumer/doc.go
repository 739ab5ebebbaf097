// Package consumer takes the records of Kafka topics to handlers, so that each message has its effect once for each handler,
// in the order of its key, through rebalances, crashes, and a database that goes away.
//
//	c, err := consumer.New("billing", db, consumer.Brokers("kafka:9092"), consumer.Topics("outbox.event.order"))
//	…
//	err = c.Handle("OrderPlaced", consumer.HandlerFunc(func(ctx context.Context, m *consumer.Message) error {
//		if _, err := invoices.InsertOne(ctx, invoice(m)); err != nil {
//			return err
//		}
//		return box.Append(ctx, event.New("invoice", id, "InvoiceSent", payload))
//	}))
//	…
//	err = c.Run(ctx)
//
// # Effect
//
// By default a handler runs in a transaction together with the mark in the inbox that the message was handled: what it
// writes with its context and appends to the outbox is committed once, however often Kafka delivers the record, and also
// if the producer sent it twice. The other modes are those of package inbox. With inbox.None the handler runs for every
// delivery, at least once; Kafka alone then decides, as when offsets are committed after the work.
//
// # Order and parallelism
//
// A partition has inbox.Lanes lanes, by the key. A handler gets the messages of a lane one after another in their order,
// different lanes at the same time, up to Concurrency over all partitions. What waits in a lane shares a transaction, up to
// Batch messages and what is expected to take five seconds; if one of them fails, they are tried again one by one, so that
// only that one meets its policy. While one is retried, its lane waits, for this handler alone. Several handlers of a
// message know nothing of each other.
//
// # Offsets
//
// An offset is committed when it and all that were fetched before it are finished for all their handlers: handled, known,
// dropped, or safely with the dead letters, a retry topic or the outbox. Commit modes only say how soon. Records of
// aborted transactions are never seen; markers and what compaction removed leave holes that offsets pass.
//
// No message stands in the way for ever. If what its policy decides can never be done, it becomes a dead letter; if that
// cannot be written, a letter without key, body and headers; and last of all it passes with a *LostError. Each step is
// reported to OnError. A message whose handler ran when MongoDB aborted its transaction twice meets its policy, with a
// *LifetimeError. A batch of Kafka that is damaged, or from before Kafka 0.11, is one dead letter without a body, which names its
// offsets; a damaged one is fetched five times first. Only servers that are away, and a topic of dead letters that is missing where no collection has them, are
// waited for.
//
// A partition that lost records, as by an unclean election of a leader, is read on from where it differs, even if it has grown
// again before the next fetch: its leader epochs show that. They are known since the member has had the partition; records
// that are lost and replaced while no member has it are found out only if the log is shorter than the group's offset.
//
// # Identity
//
// The inbox knows a message by its namespace and id: those of the relay, or the source and id of a CloudEvent. A record
// without an id is known by its place and timestamp. An id or namespace above 1,024 bytes makes a record unreadable.
//
// # Trouble
//
// A database that is away costs no attempts: lanes wait with backoff, nothing more is fetched, nothing is committed, and
// what is held stays within Buffer and one fetch for each partition. Pause drops what is held. A stop and a rebalance let
// what runs finish for the time of Drain and then abandon it; what it commits after all is refused to the next owner of
// the partition by the inbox's watermark. Every error comes to OnError once. Panics of handlers, of decoders and of
// inbox and transactions are errors of the message; one at the end of a trace is reported. An Observer must not panic. A
// handler that does not heed its context can be abandoned but not ended.
//
// # Cost
//
// Beside the handler's own writes a batch costs two reads, one insert and one update in its transaction, and the commit. One
// goroutine and one connection read each partition; a lane has a goroutine while it has messages. Nothing is started before
// Run, and what Run started has ended when it returns, but for handlers that were abandoned.
package consumer
