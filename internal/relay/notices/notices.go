// Package notices has the occurrences that a relay reports to the program in which it is embedded.
package notices

import "time"

// GivenUp is an event for which the relay has stored a dead letter.
type GivenUp struct {
	Letter     string // id of the letter
	Collection string // the outbox, as database.collection
	ID         string // of the event
	Delivery   int    // 0 is the first delivery; each requeue adds one
	Topic      string // the topic that rejected it; "" if no topic did
	Class      string // the kind of failure, see docs/waiting.md
	Reason     string // for people; it contains no payload
}

// LostHistory is a range of the change stream that MongoDB could not deliver any more. The relay has sent the events of that time
// from the outboxes.
type LostHistory struct {
	Slot    string // the slot of the watcher, such as 0of1
	Reason  string
	From    time.Time // start of the range; zero if it is unknown
	To      time.Time
	Swept   int64 // events that were sent from the outboxes
	Repeats int64 // of them, the events that may have been sent before
}

// Hooks are called for occurrences. Nil fields are not called. A call must not block.
type Hooks struct {
	GivenUp     func(GivenUp)
	LostHistory func(LostHistory)
}
