// Package scheduled sends envelopes with a due time when they are due by the clock of the server: never
// earlier, and once, also across a takeover, as far as the read-back reaches. There is no order among
// them. NoteScheduled, which the reader of the stream calls, takes a lock for a
// moment and does not block. Cost: for each 1,000 envelopes that are due together, one transaction that
// takes them from their outboxes into the store of waiting envelopes. Each outbox with scheduled envelopes is read twice a second.
package scheduled
