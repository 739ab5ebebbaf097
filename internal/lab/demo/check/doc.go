// Package check compares the events that were committed to an outbox with the records that a
// consumer received. A writer reports to a [Checker] which events it begins and how their
// transactions ended, and a consumer reports each record. The Checker counts lost events,
// duplicates, broken order per key, phantoms and altered values. [Latency] measures how long events
// took, without the outages that were caused on purpose.
//
//	c := check.New(check.Options{})
//	c.Begin(check.Event{ID: id, Key: key})          // before the transaction, in commit order per key
//	c.Committed(now, id)                            // or Aborted, or Unknown
//	c.Delivered(check.Delivery{ID: id, Topic: …})   // each record, also before Committed was called
//	r := c.Report()
//
// The events of a key must be begun in the order in which they commit. So a key belongs to one
// writer, and the writer begins an event after the previous transaction has ended.
//
// The package does no I/O and does not block. Every call takes one lock and constant time, except
// Report, which reads each event that is not delivered yet. All methods may be called from any
// goroutine.
package check
