package model

// undo is a switch that removes one rule, or one fix, from the model.
type undo int

const (
	nothing undo = iota

	waitInOutbox       // N16: a waiting envelope is only in its outbox, where services delete it
	lettersByID        // a letter is identified by the id of its envelope, which a service may use again
	letterOfOneTopic   // N16: the letter of an envelope that cannot be stored names one of the topics for which it waits
	foldedKeys         // N15: the store compares keys by a collation that ignores case
	repeatRejected     // N16: a write that MongoDB rejects for one document is repeated, with all others of its list
	positionless       // N7: an identity does not contain the position of an event that was sent out of the store
	equalNamespaces    // N7: an identity does not contain the collection
	passBeforeStored   // N3, W: the position passes an envelope before it is stored
	unfencedWrites     // N1, N3: a write of an earlier owner passes
	readBeforeMarker   // N4: the read-back does not wait for the marker
	skipReadBack       // N7: the read-back finds nothing
	offsetsOfAcks      // N8: the stored offset follows the last ack
	skipFinishSent     // N8: waiting envelopes that an earlier owner sent are not finished
	endRereadEarly     // N7: the read-back is dropped before the stream has passed it
	settleEarly        // N8, N19: the offsets of a claim are released before the claim is removed
	adoptedUnsaved     // N9: the end of a new partition is not stored before its first record
	sendDespiteDoubt   // N11: a partition takes records again although a batch may be in its log
	openGates          // N15: a takeover does not close the gates of the keys that wait
	forgetWaiting      // N15: the stream repeats waiting envelopes
	forgetLetters      // N15: the stream repeats dead envelopes
	keepBehindRejected // N15: later records of the key of a rejected record stay in the queue
	copiedClaims       // N19: the claim and the removal from the outbox are two transactions
	unsavedClaims      // N19: the claim is in the memory of the owner only
	claimsUnread       // N19: the next owner does not look for the records of a claim
	sendOwed           // N22: a waiting envelope is sent while the sweep owes it to another topic
	waitedForAll       // N22: a swept envelope that waited for one topic, and was sent since, counts as sent to all; with sendOwed
	expireUnread       // N17: an event expires although a partition that may have its record was not read back
	undoCount
)

// undone has the name of each switch, and a part of the violation that the schedules must find.
var undone = map[undo]struct{ name, finds string }{
	waitInOutbox:       {"waiting envelopes stay in the outbox", "lost"},
	lettersByID:        {"letters are identified by the id alone", "lost"},
	letterOfOneTopic:   {"a letter names one of several topics", "lost"},
	foldedKeys:         {"a collation orders the store", "overtakes"},
	repeatRejected:     {"a rejected write is repeated for ever", "stuck"},
	positionless:       {"an identity has no position", "lost"},
	equalNamespaces:    {"an identity has no collection", "lost"},
	passBeforeStored:   {"the position passes before the write", "lost"},
	unfencedWrites:     {"writes are not fenced", ""},
	readBeforeMarker:   {"the read-back does not wait for the marker", ""},
	skipReadBack:       {"nothing is read back", "repeated"},
	offsetsOfAcks:      {"stored offsets follow the acks", "repeated"},
	skipFinishSent:     {"waiting envelopes that were sent are not finished", "repeated"},
	endRereadEarly:     {"the read-back is dropped early", "repeated"},
	settleEarly:        {"the offsets of claims are released early", "repeated"},
	adoptedUnsaved:     {"new partitions are not stored", "repeated"},
	sendDespiteDoubt:   {"a batch in doubt is ignored", "repeated"},
	openGates:          {"gates are open after a takeover", "overtakes"},
	forgetWaiting:      {"the stream repeats what waits", ""},
	forgetLetters:      {"the stream repeats what is dead", ""},
	keepBehindRejected: {"records after a rejected one are sent", "overtakes"},
	copiedClaims:       {"a claim copies the envelopes", "cancelled"},
	unsavedClaims:      {"claims are not stored", "lost"},
	sendOwed:           {"owed envelopes are sent", "lost"},
	waitedForAll:       {"an envelope that waited for a topic is left out", "lost"},
	claimsUnread:       {"records of claims are not looked for", "repeated"},
	expireUnread:       {"events of unread partitions expire", "expired"},
}
