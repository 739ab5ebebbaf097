package model

import (
	"slices"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
)

// checkAppend checks the promises for a record that Kafka is about to append.
func (w *world) checkAppend(l *log, record *sent, r *request) {
	s := w.specs[record.number]
	topic := l.tp.Topic
	switch {
	case r.epoch < l.claimed:
		w.fail("a zombie of epoch %d writes %s to %v after the owner of epoch %d has read it back (N4)", r.epoch, s, l.tp, l.claimed)
	case s.isCancelled:
		w.fail("%s was cancelled, and is sent to %s (N19)", s, topic)
	case slices.Contains(s.appendedTo, topic) && !record.redelivered:
		w.fail("%s is repeated in %s, and not flagged (I4)", s, topic)
	// A request of an earlier owner, or one that was given back, may arrive after the event has died.
	case r.sink.term == w.owner && r.part.inFlight == r && w.isDeadFor(s, topic):
		w.fail("%s is sent to %s although it is dead (N15)", s, topic)
	}

	// No request for it may be on its way to a partition that was read back.
	if slices.Contains(s.expiredIn, topic) {
		w.fail("%s is sent to %s although it has expired there (N17)", s, topic)
	}

	// Scheduled envelopes have no place in the order of their keys.
	for _, later := range w.stream[s.number+1:] {
		if s.due == 0 && later.due == 0 && later.ns == s.ns && later.key == s.key && slices.Contains(later.appendedTo, topic) && !record.redelivered {
			w.fail("%s overtakes %s in %s (I3)", later, s, topic)
		}
	}
	s.appendedTo = append(s.appendedTo, topic)
}

// checkExpired checks an event that dies because it has expired: it is in none of the topics that are left.
func (w *world) checkExpired(outcome *ledger.Outcome, s *spec, pending []string) {
	if outcome.Rejection.Class != record.Expired {
		return
	}
	if pending == nil {
		pending = s.topics
	}
	for _, topic := range pending {
		if slices.Contains(s.appendedTo, topic) {
			w.fail("%s has expired for %s, which has its record (N17)", s, topic)
		}
	}
	s.expiredIn = append(s.expiredIn, pending...)
}

// isDeadFor reports whether a dead letter accounts for the event in a topic.
func (w *world) isDeadFor(s *spec, topic string) bool {
	for _, dead := range w.letters {
		if dead.number == s.number && (dead.mark.Topic == "" || dead.mark.Topic == topic) {
			return true
		}
	}
	return false
}

// checkEnd checks that each committed event was delivered, is dead or was cancelled. Nothing is on its way any more.
func (w *world) checkEnd() {
	for _, s := range w.stream {
		for _, topic := range s.topics {
			if !s.isCancelled && !slices.Contains(s.appendedTo, topic) && !w.isDeadFor(s, topic) {
				w.fail("%s is lost for %s (I1)", s, topic)
			}
		}
	}
}
