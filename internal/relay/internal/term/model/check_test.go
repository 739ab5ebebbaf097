package model

import "slices"

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

	// Scheduled envelopes have no place in the order of their keys.
	for _, later := range w.stream[s.number+1:] {
		if s.due == 0 && later.due == 0 && later.ns == s.ns && later.key == s.key && slices.Contains(later.appendedTo, topic) && !record.redelivered {
			w.fail("%s overtakes %s in %s (I3)", later, s, topic)
		}
	}
	s.appendedTo = append(s.appendedTo, topic)
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
