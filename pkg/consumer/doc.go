// Package consumer handles the records of Kafka topics. Each message takes effect once for each handler, in the order of its
// key, through crashes, rebalances and outages of the database.
//
//	c, err := consumer.New("shipping", db, consumer.WithBrokers("kafka:9092"), consumer.WithTopics("outbox.event.order"))
//	…
//	err = c.Handle("pack-parcels", consumer.For(OrderPlaced, pack))
//	…
//	err = c.Run(ctx) // until ctx ends
//
// # Zero, negative and nil
//
// In each option, argument and field of this package, its subpackages and package saga, zero, nil and an empty text or list mean the
// default. A negative number or time means none: no limit, no wait, no copy. If there must be some, the error of New or Handle names
// the option. A nil option has no effect. What has no default is required: a nil function of WithMiddleware or WithRetryFor is an
// error.
//
// # Effect
//
// A handler runs in a MongoDB transaction with the mark that its message was handled. The writes that it makes with its
// context, and the events that it appends to the outbox, are committed once, however often Kafka delivers the record. Effects
// outside of the database can repeat: see Mode.
//
// # Names
//
// The group and the name of a handler identify it in the inbox. If you rename a handler, or the group, a new handler begins
// with the messages that follow the group's offset, or that Kafka still holds. Messages that were set aside stay with the old
// name.
//
// The inbox identifies a message by its namespace and id: those of the relay, or the source and id of a CloudEvent. A record
// without an id is identified by its place and time. Without a namespace and a source, the topic takes their place. So an id must be
// unique in its outbox collection, or else in its topic, for the time of WithRetention: a second message with it has no effect.
//
// # Order
//
// Messages of one key are handled one after another. Different keys run at the same time, up to WithConcurrency. Several
// handlers of a message do not wait for each other.
//
// # Failures
//
// A message fails when its handler returns an error, panics or exceeds WithTimeout. Its writes are rolled back. Then, by
// default (see Retry):
//
//   - The message is tried again in place after 100 ms and 400 ms.
//   - Then it is set aside in MongoDB, together with later messages of its key, and tried again after 5 s, 10 s, 20 s and so on
//     up to 5 min. Its offset passes, so that other keys go on.
//   - If messages of 20 different keys fail in a row, the handler is suspended. It tries one of its messages after 5 s up to
//     5 min, until one succeeds. All other messages stay in Kafka. If other handlers of the topic have finished a message, it is
//     set aside untried. A member that starts while so many keys have failed begins with one message.
//   - After 24 hours the message becomes a dead letter.
//
// So an outage of a service that handlers need causes lag, and no dead letters. A handler can decide itself, by the errors of
// RetryIn, Suspend, Reject and Discard. Messages that are malformed or expired become dead letters at once. An outage of the
// database spends no attempts: the consumer waits, fetches nothing and commits nothing.
//
// No message blocks its partition permanently. If a message is larger than a dead letter can be, the letter has its place and
// the failure alone. A Kafka batch that is damaged becomes one dead letter after five fetches. If a partition lost records, for example after an unclean leader election, the
// consumer continues from the first offset where the log differs.
//
// # Unknown messages
//
// A message whose type no handler takes becomes a dead letter of class unknown. It is counted, and each type is
// reported at once, then at most once a minute.
// WithSkip names the types that the group does not need: their messages pass.
//
// # Dead letters
//
// Package deadletter lists them and hands them back to their handlers. WithDeadLetters has their options.
//
// # Offsets
//
// An offset is committed when its message and all earlier ones of the partition are finished for all handlers: handled,
// recognized as a duplicate, skipped, set aside, in a retry topic, or stored as a dead letter. Options of commits only define
// how soon the commit follows.
//
// # Stop and cost
//
// At a stop and at a rebalance, running handlers may finish within WithDrain, and are then abandoned. If an abandoned handler
// still commits, the inbox rejects its messages for the next owner of the partition. Nothing starts before Run. When Run
// returns, everything that it started has ended, except abandoned handlers.
//
// A transaction costs one read, one insert, one update and the commit in addition to the handler's own writes. WithSharedTransaction
// shares it among messages. After an event that was sent twice, transactions read the marks for ten seconds too. Each partition has one goroutine and one connection that read it.
package consumer
