// Package outboxtest tests services without servers. It has a database with real transactions, an outbox, an inbox, topics
// with consumer groups and a relay, all in memory:
//
//	env := outboxtest.New(t)
//	box := env.Box()
//	shop := NewShop(box, outboxtest.NewTable[string, Order](env, "orders"))
//	…
//	placed := outboxtest.RequireAppended(t, box, OrderPlaced)
//
// Box, Inbox and Consumer return the types of their packages, with the options of their packages. So a service needs no
// interfaces for outrelay. The collections of a service itself need a server: put them behind an interface, and use a Table
// in unit tests. CheckTransaction and the other functions of package outbox see the transactions in memory. For a test with
// real servers, see package servertest.
//
// # Guarantees
//
// Apart from the differences below, the contract is the same as with servers, and the test suites of this module check both.
// A transaction sees one snapshot and its own writes. If two transactions write the same row, the later one starts again.
// Events with the same key are handled in commit order. Failed messages are set aside, retried and given up as on MongoDB.
//
// # Differences
//
//   - There is no session of the driver, so the collections of a service need an interface: see above.
//   - All data is lost when the process ends.
//   - Nothing bounds the size of a document or the life of a transaction (16 MiB and a minute on servers).
//   - The outcome of a commit is always known: nothing returns outbox.ErrCommitUnknown.
//   - No open transaction survives its process, so no member has to end transactions of a lost owner of a partition.
//   - A group gives back all partitions at each rebalance, as without cooperative rebalances.
//   - Every topic exists. On servers, events wait until someone creates their topic.
//   - Services cannot delete topics, and no retention removes records.
//
// # Time
//
// Settle blocks until everything is handled that is due. Advance lets time pass. In a bubble of testing/synctest, time is a
// fake clock, so a test of a retry after an hour takes no time:
//
//	synctest.Test(t, func(t *testing.T) {
//		env := outboxtest.New(t)
//		…
//		env.Advance(time.Hour)
//	})
//
// Outside of a bubble, Advance really waits. In a bubble, time passes only while all goroutines wait for each other. So an
// HTTP server of the test must not run in the bubble.
package outboxtest
