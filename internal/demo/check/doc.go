// Package check finds out whether what was committed to an outbox is what a consumer saw. A writer tells a [Checker] what
// it begins and how it ended, a consumer tells it each record; the Checker counts loss, duplicates, broken order per key,
// phantoms and altered values. [Latency] measures how long events took, apart from the outages that somebody caused.
//
//	c := check.New(check.Options{})
//	c.Begin(check.Event{ID: id, Key: key})          // before the transaction, in commit order per key
//	c.Committed(now, id)                                // or Aborted, or Unknown
//	c.Delivered(check.Delivery{ID: id, Topic: …})   // each record, also before Committed was called
//	r := c.Report()
//
// The order in which events of a key are begun must be the order in which they commit: a key belongs to one writer, which
// begins an event after the transaction before it has ended. Nothing here does I/O or waits; every call takes one lock and
// constant time, but Report, which looks at each event that is still on its way. All methods may be called from any
// goroutine.
package check
