package admin

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	handlerletters "github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
)

// ConversationQuery selects the events of one conversation.
type ConversationQuery struct {
	ID         string    `query:"id" required:"true" minLength:"1" maxLength:"4096" doc:"The correlation id of its events: usually the id of its first event."`
	Collection string    `query:"collection" maxLength:"255" doc:"Only this outbox, as database.collection."`
	From       time.Time `query:"from" doc:"Written at this time or later. Default: 24 hours ago."`
	To         time.Time `query:"to" doc:"Written before this time."`
	Limit      int       `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"Bounds the events of each outbox."`
}

// Conversation is the events that follow from one event, as far as outboxes, the state database and dead letters have them.
type Conversation struct {
	// Events is a tree: an event follows the event that caused it, with a greater depth. Events with the same cause are in the
	// order of their time.
	Events []ConversationEvent `json:"events"`
	Since  time.Time           `json:"since"`            // begin of the time window of the search
	More   bool                `json:"more"`             // the result exceeds the limit
	Limits string              `json:"limits,omitempty"` // the limits of the result, in a sentence
}

// ConversationEvent is one event of a [Conversation], without its payload.
type ConversationEvent struct {
	Depth         int        `json:"depth"` // 0: the cause is not among the events
	Collection    string     `json:"collection"`
	ID            string     `json:"id"`
	Type          string     `json:"type"`
	AggregateType string     `json:"aggregate_type"`
	AggregateID   string     `json:"aggregate_id"`
	CausationID   string     `json:"causation_id,omitempty"` // id of the message whose handler appended the event
	State         string     `json:"state"`                  // that of [FoundEnvelope]
	Reason        string     `json:"reason,omitempty"`       // why it waits, or the class of its dead letter
	Written       *time.Time `json:"written,omitempty"`      // by its timestamp, to the second
	// Handlers are the dead letters that handlers of consumers have of the event.
	Handlers []DeadLetter `json:"handlers"`

	stamp bson.Timestamp // of the insert
}

// Indent returns the beginning of a line that shows the depth of the event.
func (e ConversationEvent) Indent() string { return strings.Repeat("› ", e.Depth) }

// defaultConversationWindow is longer than that of a key, because a conversation has pauses.
const defaultConversationWindow = 24 * time.Hour

// Conversation returns the events of a conversation as a tree. It finds the first event by its id, and the others by their header
// correlation-id: it reads the envelopes of each outbox between From and To by the time index, and all waiting envelopes and dead
// letters of the watcher.
func (o Operator) Conversation(ctx context.Context, query ConversationQuery) (Conversation, error) {
	out := Conversation{Events: []ConversationEvent{}, Since: query.From}
	if query.ID == "" {
		return out, invalidRequest("the id of the conversation is empty")
	}
	if out.Since.IsZero() {
		out.Since = time.Now().Add(-defaultConversationWindow).UTC()
	}
	if err := checkWindow(out.Since, query.To); err != nil {
		return out, err
	}
	names, err := o.lookupCollections(ctx, query.Collection)
	if err != nil {
		return out, err
	}

	search := conversationSearch{
		op: o, query: query, since: out.Since, limit: pageSize(query.Limit), places: map[string]int{},
		settled: readSettled(ctx, o),
	}
	if search.ids, err = parseIDValues(query.ID); err != nil {
		return out, err
	}
	// An event that is sent in between must not look delivered before it is, so the waiting envelopes come first.
	for _, step := range []func(context.Context) error{
		search.findWaiting, func(ctx context.Context) error { return search.findInOutboxes(ctx, names) }, search.findRecent,
		search.findLetters, search.findHandlerLetters, search.findHandled,
	} {
		if err := step(ctx); err != nil {
			return out, err
		}
	}

	out.More, out.Events = search.more, arrangeConversation(search.events)
	if slices.ContainsFunc(out.Events, func(found ConversationEvent) bool { return found.State == stateDelivered }) {
		out.Limits = conversationLimits
	}
	return out, nil
}

// conversationLimits states which events a search cannot find. An event leaves its outbox when it is due, or with the purge.
const conversationLimits = "a delivered event that is in no outbox any more, such as a scheduled one, is only found among the recent deliveries, " +
	"of which owners keep 50 for each slot"

// conversationSearch collects the events of a conversation.
type conversationSearch struct {
	op      Operator
	query   ConversationQuery
	ids     []bson.RawValue // of the first event
	since   time.Time
	limit   int
	settled settledUpTo

	events []ConversationEvent
	places map[string]int // of an event in events, by collection and id
	more   bool
}

// matchHeaders returns the condition for documents whose headers have the correlation id, in either form. prefix is the path of the
// envelope, with a dot.
func (s *conversationSearch) matchHeaders(prefix string) (condition bson.D, ok bool) {
	field := s.op.Mapping.Name("headers")
	if field == "" {
		return nil, false
	}
	values := bson.D{{Key: "$in", Value: bson.A{s.query.ID, bson.Binary{Data: []byte(s.query.ID)}}}}
	return bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: prefix + field, Value: bson.D{{Key: "$elemMatch", Value: bson.D{
			{Key: "k", Value: event.HeaderCorrelationID}, {Key: "v", Value: values},
		}}}}},
		bson.D{{Key: prefix + field + "." + event.HeaderCorrelationID, Value: values}},
	}}}, true
}

// matchFirstOrHeaders returns the condition for the first event, whose id is in the field idField, or an event of the conversation.
func (s *conversationSearch) matchFirstOrHeaders(idField, prefix string) bson.E {
	either := bson.A{bson.D{{Key: idField, Value: bson.D{{Key: "$in", Value: s.ids}}}}}
	if condition, ok := s.matchHeaders(prefix); ok {
		either = append(either, condition)
	}
	return bson.E{Key: "$or", Value: either}
}

// withoutPayload returns the projection for stored envelopes.
func (s *conversationSearch) withoutPayload(prefix string) bson.D {
	fields := bson.D{}
	for _, element := range s.op.Mapping.Without("payload") {
		fields = append(fields, bson.E{Key: prefix + element.Key, Value: 0})
	}
	return fields
}

// storedPrefix is the path of the envelope in the documents of the state database.
const storedPrefix = "envelope."

// ofWatcher returns the conditions for documents of the state database.
func (s *conversationSearch) ofWatcher() bson.D {
	filter := bson.D{{Key: "watcher", Value: s.op.Watcher}}
	if s.query.Collection != "" {
		filter = append(filter, bson.E{Key: "ns", Value: s.query.Collection})
	}
	return filter
}

// findWaiting adds the waiting envelopes, and those that the owners send at present.
func (s *conversationSearch) findWaiting(ctx context.Context) error {
	filter := append(s.ofWatcher(), s.matchFirstOrHeaders("id", storedPrefix))
	list, err := mongodb.FindAll[waiting.Document](ctx, mongodb.Majority(s.op.waiting()), "finding waiting envelopes", filter,
		options.Find().SetLimit(int64(s.limit)+1).SetProjection(s.withoutPayload(storedPrefix)))
	if err != nil {
		return err
	}
	s.more = s.more || len(list) > s.limit
	for i := range list[:min(len(list), s.limit)] {
		s.addEnvelope(s.settled.describeWaiting(s.op.Mapping, &list[i]))
	}

	return waiting.EachClaim(ctx, s.op.State.Collection(waiting.ClaimsName), s.op.Watcher, func(claim *waiting.Claim) error {
		for i := range claim.Envelopes {
			entry := claim.Envelopes[i].Entry(s.op.Watcher)
			document := entry.Document()
			isOther := s.query.Collection != "" && s.query.Collection != document.NS
			if isOther || claim.IsDone(i) || readCause(s.op.Mapping.ToContract(document.Envelope)).CorrelationID != s.query.ID {
				continue
			}
			s.addEnvelope(s.settled.describeWaiting(s.op.Mapping, &document))
		}
		return nil
	})
}

// findInOutboxes adds the envelopes of the outboxes.
func (s *conversationSearch) findInOutboxes(ctx context.Context, names []string) error {
	filters := []bson.D{{{Key: "_id", Value: bson.D{{Key: "$in", Value: s.ids}}}}}
	if condition, ok := s.matchHeaders(""); ok {
		window := bson.D{{Key: "$gte", Value: outboxes.FirstStampAt(s.since)}}
		if !s.query.To.IsZero() {
			window = append(window, bson.E{Key: "$lte", Value: outboxes.LastStampBefore(s.query.To)})
		}
		filters = append(filters, append(bson.D{envelope.Stamped(window...)}, condition...))
		// If an envelope has no timestamp, its id may contain the time.
		for _, ids := range outboxes.IDsBetween(s.since, s.query.To) {
			filters = append(filters, append(bson.D{ids, {Key: "$and", Value: bson.A{bson.D{outboxes.Unstamped()}}}}, condition...))
		}
	}

	for _, ns := range names {
		outbox := mongodb.Majority(outboxes.CollectionOf(s.op.State.Client(), ns))
		for _, filter := range filters {
			// The first events come first, so that a long conversation is cut at its end.
			docs, err := mongodb.FindAll[bson.Raw](ctx, outbox, "finding envelopes in "+ns, filter, options.Find().
				SetSort(bson.D{{Key: "ts", Value: 1}}).SetAllowDiskUse(true).
				SetLimit(int64(s.limit)+1).SetProjection(s.withoutPayload("")))
			if err != nil {
				return err
			}
			s.more = s.more || len(docs) > s.limit
			found, err := s.settled.describeStored(ctx, ns, docs[:min(len(docs), s.limit)])
			if err != nil {
				return err
			}
			for i := range found {
				s.addEnvelope(found[i])
			}
		}
	}
	return nil
}

// findRecent adds the recent deliveries, of which the outbox may have no envelope any more.
func (s *conversationSearch) findRecent(ctx context.Context) error {
	recent, err := s.op.Activity().Recent(ctx, "")
	if err != nil {
		return err
	}

	for i := range recent.Events {
		event := &recent.Events[i]
		isOther := s.query.Collection != "" && s.query.Collection != event.Collection
		if isOther || event.CorrelationID != s.query.ID && event.ID != s.query.ID {
			continue
		}
		found := newTracedEvent(event.Collection, event.ID, event.Type, event.Key)
		found.AggregateType, found.AggregateID, found.CausationID = event.AggregateType, event.AggregateID, event.CausationID
		if found.Written = readIDTime(event.ID); found.Written != nil {
			found.stamp = bson.Timestamp{T: uint32(found.Written.Unix())}
		}
		s.addEnvelope(found)
	}
	return nil
}

// findLetters adds the dead letters of the relay.
func (s *conversationSearch) findLetters(ctx context.Context) error {
	// A chunk of a letter has no such field.
	filter := append(s.ofWatcher(), bson.E{Key: "movedAt", Value: bson.D{{Key: "$gt", Value: time.Unix(0, 0)}}}, s.matchFirstOrHeaders("id", storedPrefix))
	list, err := mongodb.FindAll[letters.Dead](ctx, mongodb.Majority(s.op.letters()), "finding dead letters", filter,
		options.Find().SetSort(bson.D{{Key: "movedAt", Value: 1}}).SetLimit(int64(s.limit)+1).SetProjection(s.withoutPayload(storedPrefix)))
	if err != nil {
		return err
	}

	s.more = s.more || len(list) > s.limit
	for i := range list[:min(len(list), s.limit)] {
		letter := &list[i]
		found := s.settled.describeEnvelope(letter.NS, s.op.Mapping.ToContract(letter.Envelope))
		found.Collection, found.ID = letter.NS, letter.IDText()
		found.Type, found.AggregateType = cmp.Or(found.Type, letter.Type), cmp.Or(found.AggregateType, letter.AggregateType)
		place := s.addEnvelope(found)
		// A requeue sends the event again.
		if added := &s.events[place]; letter.Requeued == nil && added.State != stateWaiting {
			added.State, added.Reason = stateDead, string(letter.Class)
		}
	}
	return nil
}

// findHandlerLetters adds the dead letters of handlers to the events. A service may have none.
func (s *conversationSearch) findHandlerLetters(ctx context.Context) error {
	if len(s.events) == 0 {
		return nil
	}
	desks, err := handlerLetters{s.op}.openDesks(ctx, "")
	if errors.Is(err, ErrNoCollections) {
		return nil
	}
	if err != nil {
		return err
	}

	places := map[string]int{}
	query := handlerletters.Query{Messages: []string{}, NoValues: true}
	for i := range s.events {
		places[s.events[i].ID] = i
		query.Messages = append(query.Messages, s.events[i].ID)
	}
	for _, desk := range desks {
		for letter, err := range desk.List(ctx, query) {
			if err != nil {
				return err
			}
			found := &s.events[places[letter.ID.Message]]
			found.Handlers = append(found.Handlers, newHandlerLetter(desk.ns, &letter))
			found.noteDelivery()
		}
	}
	return nil
}

// findHandled finds the events whose delivery the position of the watcher does not show yet, and that a handler has handled.
func (s *conversationSearch) findHandled(ctx context.Context) error {
	appended := map[string][]string{} // ids, by outbox
	for i := range s.events {
		if event := &s.events[i]; event.State == stateAppended {
			appended[event.Collection] = append(appended[event.Collection], event.ID)
		}
	}

	marks, err := findMarks(ctx, s.op, appended)
	if err != nil {
		return err
	}
	for _, mark := range marks {
		if place, known := s.places[placeKey(mark.collection, strings.TrimPrefix(mark.ID.ID, "string:"))]; known {
			s.events[place].noteDelivery()
		}
	}
	return nil
}

// noteDelivery ends the state appended: Kafka has the event.
func (e *ConversationEvent) noteDelivery() {
	if e.State == stateAppended {
		e.State = stateDelivered
	}
}

// placeKey is the key of an event in the field places.
func placeKey(collection, id string) string { return collection + "\x00" + id }

// addEnvelope adds an event, unless it is known, and returns its place.
func (s *conversationSearch) addEnvelope(found FoundEnvelope) (place int) {
	key := placeKey(found.Collection, found.ID)
	if place, known := s.places[key]; known {
		if found.State == stateDelivered {
			s.events[place].noteDelivery()
		}
		return place
	}

	s.places[key] = len(s.events)
	s.events = append(s.events, ConversationEvent{
		Collection: found.Collection, ID: found.ID, Type: found.Type, AggregateType: found.AggregateType, AggregateID: found.AggregateID,
		CausationID: found.CausationID,
		State:       found.State, Reason: found.Reason, Written: found.Written, Handlers: []DeadLetter{}, stamp: found.stamp,
	})
	return len(s.events) - 1
}

// readCause returns the cause of a stored envelope in the form of the contract.
func readCause(raw bson.Raw) (cause event.Cause) {
	// The envelope has no payload here, so it is not complete.
	headers := raw.Lookup("headers")
	text := func(value bson.RawValue) string {
		if _, data, ok := value.BinaryOK(); ok {
			return string(data)
		}
		text, _ := value.StringValueOK()
		return text
	}
	note := func(name string, value bson.RawValue) {
		switch name {
		case event.HeaderCorrelationID:
			cause.CorrelationID = cmp.Or(cause.CorrelationID, text(value))
		case event.HeaderCausationID:
			cause.CausationID = cmp.Or(cause.CausationID, text(value))
		}
	}

	if document, ok := headers.DocumentOK(); ok {
		elements, _ := document.Elements()
		for _, element := range elements {
			note(element.Key(), element.Value())
		}
	}
	if list, ok := headers.ArrayOK(); ok {
		values, _ := list.Values()
		for _, value := range values {
			if pair, ok := value.DocumentOK(); ok {
				name, _ := pair.Lookup("k").StringValueOK()
				note(name, pair.Lookup("v"))
			}
		}
	}
	return cause
}

// arrangeConversation returns the events as a tree, in the order of a walk from each cause to its consequences.
func arrangeConversation(events []ConversationEvent) []ConversationEvent {
	slices.SortStableFunc(events, func(a, b ConversationEvent) int {
		return cmp.Or(a.stamp.Compare(b.stamp), compareTimes(a.Written, b.Written))
	})
	known := map[string]bool{}
	for i := range events {
		known[events[i].ID] = true
	}
	consequences := map[string][]int{}
	for i := range events {
		cause := events[i].CausationID
		// An event whose cause is not among the events begins a tree.
		if !known[cause] || cause == events[i].ID {
			cause = ""
		}
		consequences[cause] = append(consequences[cause], i)
	}

	arranged := make([]ConversationEvent, 0, len(events))
	taken := make([]bool, len(events))
	var take func(list []int, depth int)
	take = func(list []int, depth int) {
		for _, i := range list {
			if taken[i] {
				continue
			}
			taken[i] = true
			events[i].Depth = depth
			arranged = append(arranged, events[i])
			take(consequences[events[i].ID], depth+1)
		}
	}
	take(consequences[""], 0)
	// Events that name each other as the cause are in no tree.
	for i := range events {
		take([]int{i}, 0)
	}
	return arranged
}
