// Package setaside stores the messages of a consumer whose handler failed, until they are handled or given up. It keeps
// them in the order of their keys, so that the offset of a failed message can pass and other keys go on.
//
// # Document
//
// Each message has one document in the collection "<inbox>_waiting":
//
//	_id      digest of handler, place and identity: a message that is stored twice has one document
//	h t p    handler ("<group>/<name>"), topic, partition
//	q        queue: digest of the record's key, or the _id if the message has no key or needs no order
//	g o      generation of the topic and offset: the order of a queue
//	e ts k v hd   the record: leader epoch, time, key, value, headers
//	rq       time at which an operator has requested an attempt or a discard; missing otherwise
//	dc       an operator has discarded the message: by whom and when; missing otherwise
//	n s hist failed attempts, those of them that do not count, and the last failures
//	since    time of the first failure; missing while the message waits untried after another one
//	due      time of the next attempt; missing while the message waits untried
//
// The index {h, t, p, q, g, o, due, since} serves the retries and the counts. A partial index serves the requests of operators. There is no
// TTL: a message leaves only when it is handled, given up, or removed with its handler (Retire). All times refer to the
// server's clock.
//
// The collection "<inbox>_waiting_counts" has one document for each group, with the last Census: how many messages wait for each
// handler and topic, and which member has counted them. For operators, each member adds the handlers that it has suspended or paused.
//
// # Steps
//
// Set aside (Add): one transaction checks that the message was not handled before, moves the watermark of its lane past it,
// and inserts the document. Then the offset may be committed. The mark of the inbox follows with the effect, so that a
// handler can ask the inbox for its own message, and a message that is given up has no mark.
//
// Retry (First, Take): the worker reads the first message of a due queue. One transaction checks that the message is
// still the first of its queue, deletes the document, writes the mark, and runs the handler. If the handler fails, all of
// that is rolled back, and Postpone writes the attempt and the next due time. Then the next message of the queue follows.
//
// Give up (Remove): the dead letter is stored first, then the document is deleted. After a crash in between, the message is
// tried once more.
//
// Requeue (Add, Requested): one transaction marks the dead letter and inserts the document, untried, at the place of the
// message's first record. So it is before all messages of its key that wait. Members of the group look for requests
// every two seconds. If the lane of the key handles a later message then, the worker waits until the lane has ended its attempt.
//
// Retry now (Desk.Retry): the document is due at once, and has a request, so that the owner of the partition tries its queue
// within two seconds, also if the handler is suspended. The attempt ends the request (Postpone).
//
// Discard (Desk.Discard, Discarded): the document is marked. The owner of the partition stores the dead letter and removes the
// document in one transaction, so that the options of the dead letters apply. It needs no handler.
//
// Later messages of a waiting key are set aside after it, untried. A handler has its waiting queues in memory. It loads
// them (Heads) when it gets partitions, and a message is added there before its transaction begins.
//
// # Who works
//
// The owner of a partition retries the messages of the partition. A rebalance moves them with it, because they are looked
// up by topic and partition. A previous owner that still runs does no harm:
//
//   - Both delete the same document, so only one of the two transactions commits. Take requires that no earlier message
//     of the queue exists in the snapshot of the transaction, so the order of a queue also holds between two owners.
//   - If the previous owner sets a message aside after the next owner has loaded its queues, then the next owner fetches
//     this message too: the offset cannot be committed any more. It finds the message marked or passed in the inbox. After
//     each such duplicate it looks for waiting messages of the key (Waiting), in the same transaction.
//
// A process that is killed in a transaction is treated as any owner of the inbox: the next owner ends its transactions.
//
// # Unread places
//
// Messages may wait for a topic that the group has ceased to read, or for a partition that does not exist any more. No member gets
// such a partition, so the keeper of the group retries them. The keeper is the member that counts the messages of the group
// (Census). It finds these places by the assignments that Kafka has stored. If two members take themselves for the keeper, Take
// lets one of them handle each message.
//
// # Costs
//
// A message that is handled at the first attempt costs nothing here. A failed message costs one transaction with an upsert,
// two statements for each retry, and one update after each failed retry. A message that was delivered before costs one more
// read for its batch. Each member reads the document of Census every CensusInterval. One member of the group counts for all:
// it reads one index entry for each message that waits, and spends at most a twentieth of its time on that. The worker sleeps until the first due time, and wakes when a message is set aside. Only the search for
// requests of operators polls: every two seconds, in an index that is usually empty.
// Loading the queues reads one index entry for each waiting message.
//
// # Limits
//
// The consumer bounds the messages of a handler by Retry.MaxWaiting, which it checks by the last Census. A record above 12 MiB does not fit
// in a document (ErrTooLarge) and waits in its lane.
//
// If messages of Retry.Outage keys fail and none succeeds in between, the consumer suspends the handler. It then takes no
// new messages, so an outage fills no collection. It tries one waiting message after 5 s, 10 s … 5 min. The first success
// ends the suspension. Each running member of the group decides this separately. A member that gets partitions while Outage
// queues of the group have a failed message (Failing) tries one message at a time until one succeeds.
package setaside
