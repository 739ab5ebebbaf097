package admin

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// maxClockSkew is how far an entry of a timeline may precede the append because two clocks differ.
const maxClockSkew = 5 * time.Second

// isOf reports whether an event with this stamp is e. Another event may have had the same id. The purge stamps an envelope that had
// no stamp, so what was stored before has none.
func (e *FoundEnvelope) isOf(collection, id string, stamp bson.Timestamp) bool {
	return e.Collection == collection && e.ID == id && (e.stamp == stamp || stamp.IsZero())
}

// setWritten sets the time of the append, or removes it if it is nil.
func (e *FoundEnvelope) setWritten(written *time.Time) {
	e.Timeline = slices.DeleteFunc(e.Timeline, func(entry TimelineEntry) bool { return entry.What == eventAppended })
	e.Written = written
	if written != nil {
		e.Timeline = append(e.Timeline, TimelineEntry{At: *written, What: eventAppended})
	}
}

// dropLateStamp drops the time of a stamp that the purge has set: something happened to the event before.
func (e *FoundEnvelope) dropLateStamp() {
	isBefore := func(entry TimelineEntry) bool {
		return entry.What != eventDue && entry.At.Add(maxClockSkew).Before(*e.Written)
	}
	if e.Written == nil || !slices.ContainsFunc(e.Timeline, isBefore) {
		return
	}
	e.setWritten(readIDTime(e.ID))
	if e.Written == nil {
		e.setWritten(e.committed)
	}
}

// noteHandler notes the place of a record that a handler has stored, and when it was in Kafka at the latest.
func (e *FoundEnvelope) noteHandler(place outboxes.Place, had time.Time, history []record.Attempt) {
	for _, attempt := range history {
		had = earliest(had, attempt.At)
	}
	e.addPlace(place)
	if e.reached == nil {
		e.reached = map[outboxes.Place]time.Time{}
	}
	if known, found := e.reached[place]; found {
		had = earliest(had, known)
	}
	e.reached[place] = had.UTC()
}

func earliest(left, right time.Time) time.Time {
	if right.Before(left) {
		return right
	}
	return left
}

// addReached adds that records were sent of which only handlers store the place: the report of the ack is kept for few events.
func (e *FoundEnvelope) addReached() {
	for _, place := range e.Sent {
		text := formatPlace(place)
		at, found := e.reached[place]
		isSent := func(entry TimelineEntry) bool {
			return entry.What == eventSent && slices.Contains(strings.Split(entry.Text, ", "), text)
		}
		if found && !slices.ContainsFunc(e.Timeline, isSent) {
			// It is the first entry of its time.
			e.Timeline = slices.Insert(e.Timeline, 0, TimelineEntry{At: at, What: eventSent, Text: text + " (at this time or before)"})
		}
	}
}

// addAttempts adds the failed attempts of the relay, or of the handler of a message, to the timeline.
func (e *FoundEnvelope) addAttempts(handler string, history []record.Attempt) {
	for _, attempt := range history {
		parts := slices.DeleteFunc([]string{handler, attempt.Topic, string(attempt.Class), attempt.Reason}, func(part string) bool { return part == "" })
		e.Timeline = append(e.Timeline, TimelineEntry{At: attempt.At.UTC(), What: eventFailed, Text: strings.Join(parts, ": "), Node: attempt.Node})
	}
}

// addHistory adds the events in the life of the envelope to the timeline.
func (e *FoundEnvelope) addHistory(envelope *storedEnvelope) {
	e.setWritten(e.Written)
	if due := cmp.Or(envelope.ScheduledFor, envelope.DueAt); due != nil {
		e.Timeline = append(e.Timeline, TimelineEntry{At: due.UTC(), What: eventDue})
	}
	if envelope.SentAt != nil {
		e.Timeline = append(e.Timeline, TimelineEntry{At: envelope.SentAt.UTC(), What: eventSent, Text: formatPlaces(e.Sent)})
	}
	e.sortTimeline()
}

// addDiscard adds the discard of a letter that is in the archive to the timeline.
func (e *FoundEnvelope) addDiscard(letter *DeadLetter) {
	if letter.Archived == nil {
		return
	}
	text := "by " + letter.Archived.Actor + "; the archive has it until " + letter.Archived.Until.Format(time.RFC3339)
	e.Timeline = append(e.Timeline, TimelineEntry{At: letter.Archived.At.UTC(), What: eventDiscarded, Text: text, Letter: letter.Letter})
}

// sortTimeline sorts the timeline by time. Two clocks differ, and a handler may be faster than the report of the ack. So what a handler did
// follows the entry that the record was sent, if that is at most a second later. The append is always first.
func (e *FoundEnvelope) sortTimeline() {
	sent := slices.DeleteFunc(slices.Clone(e.Timeline), func(entry TimelineEntry) bool { return entry.What != eventSent })
	orderOf := func(entry *TimelineEntry) time.Time {
		if entry.What == eventAppended {
			return time.Time{}
		}
		at := entry.At
		for i := range sent {
			isOf := func(place string) bool { return strings.Contains(entry.Text, "("+place+")") }
			if late := sent[i].At.Sub(at); late > 0 && late <= time.Second && slices.ContainsFunc(strings.Split(sent[i].Text, ", "), isOf) {
				at = sent[i].At
			}
		}
		return at
	}
	// Entries of one time are in the order of their stages, in which they were added.
	slices.SortStableFunc(e.Timeline, func(a, b TimelineEntry) int { return orderOf(&a).Compare(orderOf(&b)) })
}
