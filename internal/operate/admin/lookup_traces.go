package admin

import (
	"cmp"
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/relay/activity"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/inbox/mongostore"
	"github.com/outrelay/outrelay/internal/service/inventory"
)

// maxMarkedEvents bounds the events whose marks are looked up.
const maxMarkedEvents = 100

// traces are what Kafka's side stores about events: the recent deliveries that owners sampled, and the messages of handlers.
type traces struct {
	recent  []activity.Event
	aside   []HandlerMessage
	letters []DeadLetter
	more    bool
}

// foundMark is a mark of an inbox, with the event that it is of.
type foundMark struct {
	mongostore.FoundMark
	collection string // of the event; "" if unknown
}

// sourceOf returns how messages name the outbox of their event: the header outrelay-ns, in hexadecimal.
func sourceOf(collection string) string {
	digest := routing.NamespaceHash(collection)
	return hex.EncodeToString(digest[:])
}

// readTraces reads what is stored about the event of the query, or about the events of its key.
func readTraces(ctx context.Context, op Operator, query LookupQuery, limit int) (traces, error) {
	var all traces
	recent, err := op.Activity().Recent(ctx, "")
	if err != nil {
		return all, err
	}
	for _, e := range recent.Events {
		if e.ID == query.ID || query.Key != "" && e.Key == query.Key {
			all.recent = append(all.recent, e.Event)
		}
	}

	letters, moreLetters, err := op.Letters().listWithArchive(ctx, DeadFilter{IDs: optionalID(query.ID), Key: query.Key, Source: FromHandler}, limit)
	if err != nil {
		return all, err
	}
	aside, err := op.HandlerWaiting().List(ctx, HandlerWaitingFilter{IDs: optionalID(query.ID), Key: query.Key}, limit, "")
	if err != nil {
		return all, err
	}
	all.letters, all.aside, all.more = letters, aside.Items, moreLetters || aside.Next != ""
	return all, nil
}

// markedEvents returns the ids of the events whose marks are looked up, by outbox. An outbox may no longer have the event, and only a
// message of a handler may show an id.
func (r *LookupResult) markedEvents(query LookupQuery, names []string) map[string][]string {
	events := map[string][]string{}
	add := func(ns, id string) {
		if len(events[ns]) < maxMarkedEvents && !slices.Contains(events[ns], id) {
			events[ns] = append(events[ns], id)
		}
	}

	names = names[:min(len(names), maxMarkedEvents)]
	for i := range r.Envelopes {
		event := &r.Envelopes[i]
		if event.Collection != "" {
			add(event.Collection, event.ID)
			continue
		}
		for _, ns := range names {
			add(ns, event.ID)
		}
	}
	if query.ID != "" {
		for _, ns := range names {
			add(ns, query.ID)
		}
	}
	return events
}

// findMarks returns the marks of the events in the inboxes of the services.
func findMarks(ctx context.Context, op Operator, events map[string][]string) (list []foundMark, err error) {
	ids := map[string][]string{} // by source
	outbox := map[string]string{}
	for ns, of := range events {
		source := sourceOf(ns)
		outbox[source] = ns
		for _, id := range of {
			// A text that looks like another type has its own identity.
			ids[source] = append(ids[source], id, "string:"+id)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}

	databases, err := op.ServiceDatabases(ctx, "")
	if err != nil {
		return nil, err
	}
	err = op.forEachService(ctx, databases, func(db string, found inventory.Inventory) error {
		for _, coll := range found.Inboxes {
			marks, err := op.Inboxes().storeOf(db, coll).FindMarks(ctx, ids)
			if err != nil {
				return err
			}
			for _, mark := range marks {
				list = append(list, foundMark{mark, outbox[mark.ID.Namespace]})
			}
		}
		return nil
	})
	return list, err
}

// addUnknown adds the event of a letter of the relay that is neither in an outbox nor waiting.
func (r *LookupResult) addUnknown(letter *DeadLetter) {
	isKnown := func(e FoundEnvelope) bool { return e.isOf(letter.Collection, letter.ID, letter.origin.stamp) }
	if slices.ContainsFunc(r.Envelopes, isKnown) {
		return
	}

	event := newTracedEvent(letter.Collection, letter.ID, letter.Type, letter.Key)
	event.AggregateType, event.Delivery, event.stamp = letter.AggregateType, letter.Delivery, letter.origin.stamp
	if seconds := letter.origin.stamp.T; seconds > 0 {
		at := time.Unix(int64(seconds), 0).UTC()
		event.setWritten(&at)
	}
	r.Envelopes = append(r.Envelopes, event)
}

// newTracedEvent returns an event that no outbox has.
func newTracedEvent(collection, id, typ, key string) FoundEnvelope {
	return FoundEnvelope{
		Collection: collection, ID: id, Type: typ, Key: key, State: stateDelivered,
		Waits: []string{}, Sent: []outboxes.Place{}, Handlers: []FoundHandler{}, Timeline: []TimelineEntry{},
	}
}

// findEvent returns the event with the id, which it adds if it is missing. collection is "" if it is unknown.
func (r *LookupResult) findEvent(collection, id, typ, key string) *FoundEnvelope {
	at := slices.IndexFunc(r.Envelopes, func(e FoundEnvelope) bool {
		return e.ID == id && (collection == "" || e.Collection == "" || e.Collection == collection)
	})
	if at < 0 {
		event := newTracedEvent(collection, id, typ, key)
		event.setWritten(readIDTime(id))
		r.Envelopes = append(r.Envelopes, event)
		at = len(r.Envelopes) - 1
	}
	event := &r.Envelopes[at]
	event.Collection, event.Type, event.Key = cmp.Or(event.Collection, collection), cmp.Or(event.Type, typ), cmp.Or(event.Key, key)
	return event
}

// readIDTime returns the time that an id contains, or nil. An event that has left its outbox has no stamp any more.
func readIDTime(id string) *time.Time {
	bsonType, value, err := parseIDs(id)[0].MarshalBSONValue()
	if err != nil {
		return nil
	}
	written, found := outboxes.IDTime(bsonType, value)
	if !found {
		return nil
	}
	written = written.UTC()
	return &written
}

// addTraces adds the traces to the events.
func (r *LookupResult) addTraces(traces traces) {
	for i := range traces.recent {
		recent := &traces.recent[i]
		event := r.findEvent(recent.Collection, recent.ID, recent.Type, recent.Key)
		event.AggregateType, event.AggregateID = cmp.Or(event.AggregateType, recent.AggregateType), cmp.Or(event.AggregateID, recent.AggregateID)
		event.setCause(recent.CorrelationID, recent.CausationID)
		if !recent.CommittedAt.IsZero() {
			event.committed = inUTC(&recent.CommittedAt)
		}
		if event.Written == nil {
			event.setWritten(event.committed)
		}
		place := outboxes.Place{Topic: recent.Topic, Partition: recent.Partition, Offset: recent.Offset}
		if event.addPlace(place) {
			event.Timeline = append(event.Timeline, TimelineEntry{At: recent.AckedAt.UTC(), What: eventSent, Text: formatPlace(place)})
		}
	}

	for i := range traces.aside {
		message := &traces.aside[i]
		event := r.findEvent("", message.ID, message.Type, message.Key)
		place := outboxes.Place{Topic: message.Topic, Partition: message.Partition, Offset: message.Offset}
		event.noteHandler(place, message.AsideAt, message.history)
		found := FoundHandler{Group: message.Group, Handler: message.Handler, State: "retried", At: message.AsideAt.UTC(), Place: formatPlace(place), Reason: message.Reason}
		text := fmt.Sprintf("%s: %s", describeHandler(&found), countAttempts(message))
		event.Handlers = append(event.Handlers, found)
		event.addAttempts(found.Name(), message.history)
		event.Timeline = append(event.Timeline, TimelineEntry{At: found.At, What: eventAside, Text: text})
	}

	for i := range traces.letters {
		r.addHandlerLetter(&traces.letters[i])
	}
	r.Letters = append(r.Letters, traces.letters...)
}

// addMarks adds the marks of handlers to the events.
func (r *LookupResult) addMarks(marks []foundMark) {
	for i := range marks {
		mark := &marks[i]
		group, handler := splitConsumer(mark.ID.Consumer)
		event := r.findEvent(mark.collection, strings.TrimPrefix(mark.ID.ID, "string:"), "", "")
		found := FoundHandler{Group: group, Handler: handler, State: eventHandled, At: mark.At.UTC()}
		if mark.Place.Topic != "" {
			place := outboxes.Place{Topic: mark.Place.Topic, Partition: mark.Place.Partition, Offset: mark.Place.Offset}
			event.noteHandler(place, found.At, nil)
			found.Place = formatPlace(place)
		}
		text := describeHandler(&found)
		if mark.State != inbox.StateHandled {
			text += ": claimed, not finished"
			found.State = eventClaimed
		}
		event.Handlers = append(event.Handlers, found)
		event.Timeline = append(event.Timeline, TimelineEntry{At: found.At, What: found.State, Text: text})
	}
}

// settle decides what depends on all traces of an event.
func (r *LookupResult) settle() {
	for i := range r.Envelopes {
		event := &r.Envelopes[i]
		// Kafka has the event, so the position of the watcher does not matter.
		if event.State == stateAppended && len(event.Sent) > 0 {
			event.State = stateDelivered
		}
		event.addReached()
		event.dropLateStamp()
		event.sortTimeline()
	}
}

// addHandlerLetter adds a letter of a handler to its event.
func (r *LookupResult) addHandlerLetter(letter *DeadLetter) {
	event := r.findEvent("", letter.ID, letter.Type, letter.Key)
	found := FoundHandler{
		Group: letter.Source.Group, Handler: letter.Source.Handler, State: letter.State(), At: letter.DiedAt.UTC(), Place: letter.Place, Reason: letter.Class + ": " + letter.Reason,
	}
	event.AggregateType, event.AggregateID = cmp.Or(event.AggregateType, letter.AggregateType), cmp.Or(event.AggregateID, letter.AggregateID)
	event.noteHandler(letter.origin.place, found.At, letter.Attempts)
	event.addAttempts(found.Name(), letter.Attempts)
	event.Timeline = append(event.Timeline, TimelineEntry{At: found.At, What: eventDead, Text: "given up " + describeHandler(&found) + ": " + found.Reason})
	event.addDiscard(letter)
	if requeue := letter.Requeued; requeue != nil {
		event.Timeline = append(event.Timeline, TimelineEntry{At: requeue.At.UTC(), What: eventRequeued, Text: "by " + requeue.Actor + " to " + nameHandlers(requeue.Handlers)})
	}
	event.Handlers = append(event.Handlers, found)
}

// nameHandlers returns the names of handlers as the end of a sentence.
func nameHandlers(names []string) string {
	if len(names) == 1 {
		return "handler " + names[0]
	}
	return "handlers " + strings.Join(names, ", ")
}

// addPlace adds a place in Kafka. It returns false if the event has the place already.
func (e *FoundEnvelope) addPlace(place outboxes.Place) bool {
	if slices.Contains(e.Sent, place) {
		return false
	}
	e.Sent = append(e.Sent, place)
	return true
}

// describeHandler returns the handler with its group, and the place of the message.
func describeHandler(found *FoundHandler) string {
	text := "by handler " + found.Name()
	if found.Handler == "" {
		text = "by group " + found.Group + ", in which no handler takes it"
	}
	if found.Place != "" {
		text += " (" + found.Place + ")"
	}
	return text
}

func countAttempts(message *HandlerMessage) string {
	switch {
	case message.Attempts == 0 && message.RequestedAt != nil:
		return "it waits for a member of the group that takes it"
	case message.Attempts == 0:
		return "it follows an earlier message of its key"
	case message.NextAt == nil:
		return fmt.Sprintf("%d failed attempts: %s", message.Attempts, message.Reason)
	}
	return fmt.Sprintf("%d failed attempts, the next at %s: %s", message.Attempts, message.NextAt.UTC().Format(time.RFC3339), message.Reason)
}

// splitConsumer returns the group and the handler of a consumer of an inbox. The name of a handler has no slash.
func splitConsumer(consumer string) (group, handler string) {
	end := strings.LastIndexByte(consumer, '/')
	return consumer[:max(end, 0)], consumer[end+1:]
}

// setLimits states what the result cannot contain.
func (r *LookupResult) setLimits() {
	const places = "the place in Kafka is known only of events whose delivery is recorded (recording: mark), that a handler has a mark or a letter of, " +
		"or that are among the recent deliveries, of which owners keep 50 for each slot"
	const retries = "messages in retry topics (WithRetryTopics) are not found; outrelay groups counts them"
	var limits []string
	delivered := func(isLimited func(event FoundEnvelope) bool) bool {
		return slices.ContainsFunc(r.Envelopes, func(event FoundEnvelope) bool { return event.State == stateDelivered && isLimited(event) })
	}
	if delivered(func(event FoundEnvelope) bool { return len(event.Sent) == 0 }) {
		limits = append(limits, places)
	}
	if delivered(func(event FoundEnvelope) bool { return len(event.Handlers) == 0 }) {
		limits = append(limits, retries)
	}
	r.Limits = strings.Join(limits, "; ")
}
