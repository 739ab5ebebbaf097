// Package scheduled sends envelopes with a due time when they are due by the clock of the server: never
// earlier, and once, also across a takeover, as far as the read-back reaches. There is no order among
// them. NoteScheduled, which the reader of the stream calls, takes a lock for a
// moment and does not block. Cost: for each 2,000 envelopes that are due together, one transaction that takes them from their outboxes
// into one document, the claim, and one that removes the claim. Each outbox with scheduled envelopes is looked at twice a second and
// after each claim: one read of the first entry of its index.
package scheduled
