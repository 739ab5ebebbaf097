// Package gap sends the envelopes of the outbox collections whose change stream is lost.
//
// A [Recovery] belongs to one term. It decides how the stream continues, and saves, sweeps and closes
// gaps, in the order that recovery.go describes.
// Package sweep reads the collections.
//
// Times in ids come from the clocks of the writers. If the pump reads an envelope without a stamp whose id is more
// than 24 hours from the commit of its event, it marks the collection in the registry before the resolved position
// passes the event. Sweeps of that collection then ignore the times in ids.
//
// Renames: if a collection is renamed during its sweep, the term ends, and the next term finds it under its new
// name. A copy, by $out or by a rename into another database, is a new collection: its envelopes are delivered
// although those of the original were. A slot that lags by several renames of one collection may sweep it
// from its beginning. Repeated events are flagged.
package gap
