package admin

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	handlerletters "github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
)

// DeadFilter selects dead letters by text that operators type. A letter matches if it fulfills all
// conditions that are set. The filters have the tags of the API, in a query and in a body.
type DeadFilter struct {
	Collection    string    `query:"collection" json:"collection,omitempty" maxLength:"255" doc:"Only this outbox, as database.collection."`
	IDs           []string  `query:"id" json:"ids,omitempty" maxItems:"1000" doc:"Only these dead letters, by their own ids, by the ids of their envelopes, or by the rows of a list."`
	From          time.Time `query:"from" json:"from,omitzero" doc:"Died at this time or later."`
	To            time.Time `query:"to" json:"to,omitzero" doc:"Died before this time."`
	Topic         string    `query:"topic" json:"topic,omitempty" maxLength:"255"`
	Type          string    `query:"type" json:"type,omitempty" maxLength:"255"`
	AggregateType string    `query:"aggregate_type" json:"aggregate_type,omitempty" maxLength:"255"`
	Key           string    `query:"key" json:"key,omitempty" maxLength:"4096" doc:"The ordering key."`
	Class         string    `query:"class" json:"class,omitempty" enum:"malformed,message_too_large,not_allowed,partition_out_of_range,expired,record_rejected,attempts_exhausted,skipped,handler,rejected,timeout,panic,unknown,database"`
	Message       string    `query:"message" json:"message,omitempty" maxLength:"1024" doc:"Prefix of the reason."`
	Source        string    `query:"source" json:"source,omitempty" enum:"relay,handler" doc:"Who gave up: the relay, or a handler of a consumer. Default: either. For a handler, id is the id of a message, and collection is the collection of the dead letters."`
	Group         string    `query:"group" json:"group,omitempty" maxLength:"255" doc:"Only of handlers of this consumer group."`
	Handler       string    `query:"handler" json:"handler,omitempty" maxLength:"255" doc:"Only of the handler with this name."`
	Fingerprint   string    `query:"fingerprint" json:"fingerprint,omitempty" maxLength:"64" doc:"Only of the group of this failure, as the summary lists it."`
	RequeueStatus string    `query:"requeued" json:"requeued,omitempty" enum:"any,false,true"`
	Archived      bool      `query:"archived" json:"archived,omitempty" doc:"The discarded dead letters in the archive, in place of the others."`
	All           bool      `json:"all,omitempty" doc:"Select everything if there is no condition."`
}

// Classes returns the classes that a dead letter of the relay may have.
func Classes() []string {
	return []string{
		string(record.Malformed),
		string(record.MessageTooLarge),
		string(record.NotAllowed),
		string(record.PartitionOutOfRange),
		string(record.Expired),
		string(record.RecordRejected),
		string(record.AttemptsExhausted),
		string(record.Skipped),
	}
}

// query returns the query of the filter. It returns all errors if several values are invalid.
func (l Letters) query(filter DeadFilter) (letters.Query, error) {
	query := letters.Query{
		Watcher: l.op.Watcher, NS: filter.Collection,
		From: filter.From, To: filter.To, Topic: filter.Topic, Type: filter.Type, AggregateType: filter.AggregateType, Key: filter.Key,
		Class: record.Class(filter.Class), Message: filter.Message, Fingerprint: filter.Fingerprint, Archived: filter.Archived, All: filter.All,
	}
	if filter.RequeueStatus != "any" {
		query.RequeueStatus = letters.RequeueStatus(filter.RequeueStatus)
	}

	errs := []error{filter.checkValues(Classes())}
	ids, _ := splitRows[handlerletters.ID](filter.IDs, "")
	for _, text := range ids {
		if letters.IsID(text) {
			query.Letters = append(query.Letters, text)
			continue
		}
		ids, err := parseIDValues(text)
		if err != nil {
			errs = append(errs, err)
		}
		query.IDs = append(query.IDs, ids...)
	}
	// An empty list selects nothing.
	if ids != nil && len(ids) == 0 {
		query.IDs = []bson.RawValue{}
	}
	return query, errors.Join(errs...)
}

// checkValues returns an error if a value does not exist, or if the window is empty.
func (f DeadFilter) checkValues(classes []string) error {
	var errs []error
	checkValue := func(name, value string, allowed ...string) {
		if value != "" && !slices.Contains(allowed, value) {
			errs = append(errs, fmt.Errorf("%s %q is none of %s", name, value, strings.Join(allowed, ", ")))
		}
	}
	checkValue("class", f.Class, classes...)
	checkValue("source", f.Source, FromRelay, FromHandler)
	checkValue("requeued", f.RequeueStatus, "any", string(letters.NotRequeued), string(letters.Requeued))

	if f.Source == FromRelay && f.Group+f.Handler != "" {
		errs = append(errs, errors.New("group and handler select dead letters of handlers, not of the relay"))
	}
	return errors.Join(append(errs, checkWindow(f.From, f.To))...)
}

// auditFields returns the conditions of a filter for the audit log, by their names in the API, with at most 100 ids.
func auditFields(filter any) bson.D {
	given := reflect.ValueOf(filter)
	var fields bson.D
	for i := range given.NumField() {
		name, _, _ := strings.Cut(given.Type().Field(i).Tag.Get("json"), ",")
		value := given.Field(i).Interface()
		if ids, ok := value.([]string); ok {
			value = ids[:min(len(ids), 100)]
		}
		fields = append(fields, bson.E{Key: name, Value: value})
	}
	return setFields(fields)
}

// setFields returns the fields whose value is not zero or empty.
func setFields(fields bson.D) bson.D {
	return slices.DeleteFunc(fields, func(element bson.E) bool {
		value := reflect.ValueOf(element.Value)
		return value.IsZero() || value.Kind() == reflect.Slice && value.Len() == 0
	})
}

// checkWindow returns an error if both times are set and start is not before end.
func checkWindow(start, end time.Time) error {
	if start.IsZero() || end.IsZero() || start.Before(end) {
		return nil
	}
	return invalidRequest("the window from %s to %s is empty", start.Format(time.RFC3339), end.Format(time.RFC3339))
}

// parseIDValues returns the BSON values that the text of an id may stand for: a string may look
// like a UUID, an ObjectId or a number. Other types are Extended JSON.
func parseIDValues(text string) ([]bson.RawValue, error) {
	if text == "" {
		return nil, errors.New("an id is empty")
	}

	ids := parseIDs(text)
	values := make([]bson.RawValue, len(ids))
	for i, id := range ids {
		typ, data, err := id.MarshalBSONValue()
		if err != nil {
			return nil, fmt.Errorf("id %q: %w", text, err)
		}
		values[i] = bson.RawValue{Type: bson.Type(typ), Value: data}
	}
	for _, v := range letters.ParseIDText(text) {
		// In a filter, MongoDB would take it for a condition instead of a value.
		if isCondition(v) {
			return values, invalidRequest("id %.100q is a condition, not an id", text)
		}
		values = append(values, v)
	}
	return values, nil
}

// isCondition reports whether value is not compared as a value in a filter: a pattern, or a document with operators.
func isCondition(value bson.RawValue) bool {
	if value.Type == bson.TypeRegex {
		return true
	}
	doc, ok := value.DocumentOK()
	if !ok {
		return false
	}
	elems, err := doc.Elements()
	hasOperator := func(element bson.RawElement) bool { return strings.HasPrefix(element.Key(), "$") }
	return err != nil || slices.ContainsFunc(elems, hasOperator)
}

// parseIDs returns the ids that the text may stand for: a string may look like a UUID or an
// ObjectId.
func parseIDs(text string) []event.ID {
	ids := []event.ID{event.ParseID(text)}
	if plain := event.NewID(text); plain != ids[0] {
		ids = append(ids, plain)
	}
	return ids
}

// Letters are the dead letters of a watcher and of handlers. [DeadFilter.Source] and
// [DeadRef.Source] select.
type Letters struct{ op Operator }

// ofHandlers returns the letters of handlers.
func (l Letters) ofHandlers() handlerLetters { return handlerLetters(l) }

// checkNames returns an error if the watcher has read no collection yet, or not the named one. The letters of a collection
// outlive it, so this is asked only if there is no letter.
func (l Letters) checkNames(ctx context.Context, collection string) error {
	_, err := l.op.Collections(ctx, collection)
	return err
}

// Count returns the number of matching dead letters.
func (l Letters) Count(ctx context.Context, filter DeadFilter) (int64, error) {
	kinds, err := l.kindsOf(ctx, filter)
	if err != nil {
		return 0, err
	}

	var ofHandlers int64
	if kinds.handlers {
		if ofHandlers, err = l.ofHandlers().count(ctx, filter); err != nil || !kinds.relay {
			return ofHandlers, err
		}
	}
	query, err := l.query(filter)
	if err != nil {
		return 0, err
	}
	n, err := letters.Count(ctx, l.op.letters(), query)
	if err == nil && n+ofHandlers == 0 {
		err = l.checkNames(ctx, query.NS)
	}
	return n + ofHandlers, err
}

// DeadGroup summarizes letters with one failure: who gave up, topic, type, class, and message without variable parts.
type DeadGroup struct {
	letters.Group
	Source        string `json:"source"` // relay or handler
	ConsumerGroup string `json:"group,omitempty"`
	Handler       string `json:"handler,omitempty"`
}

// Summary counts the matching letters in groups. The largest group comes first.
func (l Letters) Summary(ctx context.Context, filter DeadFilter) ([]DeadGroup, error) {
	groups := []DeadGroup{}
	kinds, err := l.kindsOf(ctx, filter)
	if err != nil {
		return groups, err
	}
	if kinds.relay {
		query, err := l.query(filter)
		if err != nil {
			return groups, err
		}
		list, err := letters.Summarize(ctx, l.op.letters(), query)
		if err != nil {
			return groups, err
		}
		for _, g := range list {
			groups = append(groups, DeadGroup{Group: g, Source: FromRelay})
		}
	}

	if kinds.handlers {
		list, err := l.ofHandlers().summary(ctx, filter)
		if err != nil {
			return groups, err
		}
		groups = append(groups, list...)
	}

	if len(groups) == 0 && kinds.relay && filter.Collection != "" {
		return groups, l.checkNames(ctx, filter.Collection)
	}
	slices.SortStableFunc(groups, func(a, b DeadGroup) int { return int(b.Count - a.Count) })
	return groups, nil
}

// DeadRef identifies one letter, by its own id or by that of its envelope.
type DeadRef struct {
	Collection string `query:"collection" maxLength:"255" doc:"Only this outbox, as database.collection."`
	ID         string `query:"id" required:"true" minLength:"1" maxLength:"4096" doc:"Of the dead letter, or of the envelope, as in the header id; or the row of a list. Of a letter of a handler, also the place of the record: topic/partition@offset."`
	Delivery   int    `query:"delivery" minimum:"-1" maximum:"2147483647" default:"-1" doc:"With the id of an envelope: the delivery that died; -1 selects the latest one."`
	Source     string `query:"source" enum:"relay,handler" doc:"Who gave up: the relay, or a handler of a consumer. Default: whose dead letter has this id."`
	Group      string `query:"group" maxLength:"255" doc:"Only of a handler of this consumer group."`
	Handler    string `query:"handler" maxLength:"255" doc:"Only of the handler with this name."`
}

// Detail is whether a letter is shown with its payload and the fields that do not belong to an envelope.
type Detail bool

// The details.
const (
	WithoutPayload Detail = false
	WithPayload    Detail = true
)

// Show returns one letter with its envelope, in which the rules of [Operator.Redact] hide values. Before it shows a payload, it
// writes an entry to the audit log, and returns an error if that fails.
func (l Letters) Show(ctx context.Context, ref DeadRef, detail Detail) (DeadLetter, error) {
	letter, envelope, err := l.open(ctx, ref)
	if err != nil {
		return DeadLetter{}, err
	}

	// A message of a handler is shown in the form of the contract.
	mapping := l.op.Mapping
	if letter.Source.Kind == FromHandler {
		mapping = nil
	}
	payload := detail == WithPayload
	letter.Envelope = l.op.Redact.redactEnvelope(envelopeJSON(envelope, payload, mapping), payload, mapping)
	if !payload {
		return letter, nil
	}

	err = logShown(ctx, l.op, bson.D{
		{Key: "collection", Value: letter.Collection},
		{Key: "id", Value: letter.ID},
		{Key: "delivery", Value: letter.Delivery},
	})
	if err != nil {
		return DeadLetter{}, err
	}
	return letter, nil
}

// open returns one letter and its envelope.
func (l Letters) open(ctx context.Context, ref DeadRef) (DeadLetter, bson.Raw, error) {
	source, err := l.sourceOf(ctx, ref)
	if err != nil {
		return DeadLetter{}, nil, err
	}
	if source == FromHandler {
		return l.ofHandlers().show(ctx, ref)
	}
	letter, err := l.findLetter(ctx, ref)
	return newDeadLetter(&letter), letter.Envelope, err
}

// maxNamed bounds the letters that the error of an ambiguous reference names.
const maxNamed = 10

// findLetter returns the letter that ref identifies. Without a delivery, it is the letter of the latest one. It returns an
// error that names the letters if several match: an id may be that of several events, of envelopes in several outboxes, or
// of an event that several topics rejected.
func (l Letters) findLetter(ctx context.Context, ref DeadRef) (letters.Dead, error) {
	var none letters.Dead
	query, err := l.query(DeadFilter{Collection: ref.Collection, IDs: []string{ref.ID}})
	if err != nil {
		return none, err
	}
	var found []*letters.Dead
	// The archive comes last: it may have an earlier letter of the envelope.
	for _, archived := range []bool{false, true} {
		query.Archived = archived
		list, _, err := letters.List(ctx, l.op.letters(), query, MaxPage, "")
		if err != nil {
			return none, err
		}
		if found = ref.selectDelivery(list); len(found) > 0 {
			break
		}
	}

	switch len(found) {
	case 0:
		if err := l.checkNames(ctx, ref.Collection); err != nil {
			return none, err
		}
		return none, fmt.Errorf("dead letter of id %s: %w; outrelay dead list lists the letters, with --key the letters of an ordering key", ref.ID, mongodb.ErrNotFound)
	case 1:
		// Only ids and reasons were read above. The body may be stored in chunks, so it is fetched for one letter.
		return letters.Open(ctx, l.op.letters(), found[0].ID)
	}
	names := make([]string, min(len(found), maxNamed))
	for i := range names {
		letter := found[i]
		names[i] = fmt.Sprintf("%s (%s, delivery %d, topic %q)", letter.ID, letter.NS, letter.Delivery, letter.Topic)
	}
	return none, fmt.Errorf("id %s has %d dead letters; name one of them instead of the id: %s",
		ref.ID, len(found), strings.Join(names, ", "))
}

// selectDelivery returns the letters of the delivery, or without a delivery the letters of the latest delivery of each event.
func (ref DeadRef) selectDelivery(list []letters.Dead) (found []*letters.Dead) {
	for i := range list {
		letter := &list[i]
		if ref.Delivery >= 0 && int(letter.Delivery) != ref.Delivery {
			continue
		}
		// A negative delivery stands for the latest one of an event.
		same := slices.IndexFunc(found, func(other *letters.Dead) bool { return other.IsSameEvent(&letter.Content) })
		switch {
		case same < 0:
			found = append(found, letter)
		case letter.Delivery > found[same].Delivery:
			found[same] = letter
		case letter.Delivery == found[same].Delivery:
			found = append(found, letter)
		}
	}
	return found
}

// listWithArchive returns the first letters that match, also those in the archive, and whether there are more.
func (l Letters) listWithArchive(ctx context.Context, filter DeadFilter, limit int) (list []DeadLetter, more bool, err error) {
	for _, archived := range []bool{false, true} {
		filter.Archived = archived
		page, err := l.List(ctx, filter, limit, "")
		if err != nil {
			return list, more, err
		}
		list = append(list, page.Items...)
		more = more || page.Next != ""
	}
	return list, more, nil
}

// Empty reports whether the filter has no condition except RequeueStatus, Archived, Source and Collection.
func (f DeadFilter) Empty() bool {
	return f.IDs == nil && f.From.IsZero() && f.To.IsZero() && f.Topic == "" && f.Type == "" && f.AggregateType == "" &&
		f.Key == "" && f.Class == "" && f.Message == "" && f.Group == "" && f.Handler == "" && f.Fingerprint == ""
}
