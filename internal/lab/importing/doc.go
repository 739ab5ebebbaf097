// Package importing converts the pending rows of other outbox libraries into envelopes.
//
// A run reads the rows of a source in batches. It writes the envelopes of a batch and a mark for each row in one transaction, so a run
// that was interrupted continues, and a repeated run imports no row twice, even if the envelope is delivered and purged. The marks are in
// the collection `imports` of the state database. The rows themselves are not changed.
//
// A row without a failed attempt becomes an envelope for the stream, or a scheduled envelope. A row with failed attempts becomes an
// envelope that waits for its next attempt. A row that the library has given up becomes a dead letter.
//
// Order: rows of one collection are imported in the order in which the source would have published them. Blocking:
// Plan and Run block until all rows are read. Cost: one scan of the source. Memory holds one batch.
package importing
