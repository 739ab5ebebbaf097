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

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/pkg/event"
)

// DeadFilter selects dead letters by text that operators type. A letter matches if it fulfills all
// conditions that are set. The filters have the tags of the API, in a query and in a body.
type DeadFilter struct {
	Collection    string    `query:"collection" json:"collection,omitempty" maxLength:"255" doc:"Only this outbox, as database.collection."`
	IDs           []string  `query:"id" json:"ids,omitempty" maxItems:"1000" doc:"Only dead letters of these envelopes."`
	From          time.Time `query:"from" json:"from,omitzero" doc:"Died at this time or later."`
	To            time.Time `query:"to" json:"to,omitzero" doc:"Died before this time."`
	Topic         string    `query:"topic" json:"topic,omitempty" maxLength:"255"`
	Type          string    `query:"type" json:"type,omitempty" maxLength:"255"`
	AggregateType string    `query:"aggregate_type" json:"aggregate_type,omitempty" maxLength:"255"`
	Key           string    `query:"key" json:"key,omitempty" maxLength:"4096" doc:"The ordering key."`
	Class         string    `query:"class" json:"class,omitempty" enum:"malformed,message_too_large,not_allowed,partition_out_of_range,expired,record_refused,attempts_exhausted,handler,rejected,timeout,panic,unknown,database"`
	Message       string    `query:"message" json:"message,omitempty" maxLength:"1024" doc:"Prefix of the reason."`
	Source        string    `query:"source" json:"source,omitempty" enum:"relay,handler" doc:"Dead letters of the relay (default) or of handlers of consumers. With handler, id is the id of a message, and collection is the collection of the dead letters."`
	Group         string    `query:"group" json:"group,omitempty" maxLength:"255" doc:"With source handler: the consumer group."`
	Handler       string    `query:"handler" json:"handler,omitempty" maxLength:"255" doc:"With source handler: the name of the handler."`
	RequeueStatus string    `query:"stand" json:"stand,omitempty" enum:"any,replayable,replayed"`
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
		string(record.RecordRefused),
		string(record.AttemptsExhausted),
	}
}

// toQuery returns the query of the filter. It returns all errors if several values are invalid.
func (f DeadFilter) toQuery() (deadletter.Query, error) {
	q := deadletter.Query{
		From: f.From, To: f.To, Topic: f.Topic, Type: f.Type, AggregateType: f.AggregateType, Key: f.Key,
		Class: record.Class(f.Class), Message: f.Message, All: f.All,
	}
	if f.RequeueStatus != "any" {
		q.RequeueStatus = deadletter.RequeueStatus(f.RequeueStatus)
	}

	errs := []error{f.checkValues(Classes())}
	for _, text := range f.IDs {
		ids, err := parseIDValues(text)
		if err != nil {
			errs = append(errs, err)
		}
		q.IDs = append(q.IDs, ids...)
	}
	return q, errors.Join(errs...)
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
	checkValue("stand", f.RequeueStatus, "any", string(deadletter.Replayable), string(deadletter.Requeued))

	if f.Source != FromHandler && f.Group+f.Handler != "" {
		errs = append(errs, errors.New("group and handler need source handler"))
	}
	return errors.Join(append(errs, checkWindow(f.From, f.To))...)
}

// auditFields returns the conditions of a filter for the events log, by their names in the API, with at most 100 ids.
func auditFields(filter any) bson.D {
	v := reflect.ValueOf(filter)
	var fields bson.D
	for i := range v.NumField() {
		name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
		value := v.Field(i).Interface()
		if ids, ok := value.([]string); ok {
			value = ids[:min(len(ids), 100)]
		}
		fields = append(fields, bson.E{Key: name, Value: value})
	}
	return setFields(fields)
}

// setFields returns the fields whose value is not zero or empty.
func setFields(fields bson.D) bson.D {
	return slices.DeleteFunc(fields, func(e bson.E) bool {
		v := reflect.ValueOf(e.Value)
		return v.IsZero() || v.Kind() == reflect.Slice && v.Len() == 0
	})
}

// checkWindow returns an error if both times are set and from is not before to.
func checkWindow(from, to time.Time) error {
	if from.IsZero() || to.IsZero() || from.Before(to) {
		return nil
	}
	return invalidRequest("the window from %s to %s is empty", from.Format(time.RFC3339), to.Format(time.RFC3339))
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
	for _, v := range deadletter.ParseIDText(text) {
		// In a filter, MongoDB would take it for a condition instead of a value.
		if isCondition(v) {
			return values, invalidRequest("id %.100q is a condition, not an id", text)
		}
		values = append(values, v)
	}
	return values, nil
}

// isCondition reports whether v is not compared as a value in a filter: a pattern, or a document with operators.
func isCondition(v bson.RawValue) bool {
	if v.Type == bson.TypeRegex {
		return true
	}
	doc, ok := v.DocumentOK()
	if !ok {
		return false
	}
	elems, err := doc.Elements()
	hasOperator := func(e bson.RawElement) bool { return strings.HasPrefix(e.Key(), "$") }
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

// resolveFilter returns the outboxes and the query of a filter.
func (l Letters) resolveFilter(ctx context.Context, f DeadFilter) ([]string, deadletter.Query, error) {
	q, err := f.toQuery()
	if err != nil {
		return nil, q, err
	}
	namespaces, err := l.op.Collections(ctx, f.Collection)
	return namespaces, q, err
}

// DeadPage is a page of dead letters without their envelopes, newest first.
type DeadPage struct {
	Letters []DeadLetter `json:"letters"`
	Total   int64        `json:"total"`          // on all pages
	Next    string       `json:"next,omitempty"` // cursor of the next page, or "" on the last page
}

// List returns a page of dead letters. limit defaults to 100. after is Next of the previous
// page.
func (l Letters) List(ctx context.Context, f DeadFilter, limit int, after string) (DeadPage, error) {
	if f.Source == FromHandler {
		return l.ofHandlers().list(ctx, f, limit, after)
	}

	page := DeadPage{Letters: []DeadLetter{}}
	namespaces, q, err := l.resolveFilter(ctx, f)
	if err != nil {
		return page, err
	}
	list, err := deadletter.List(ctx, l.op.State.Client(), namespaces, q, deadletter.Page{Limit: limit, After: after})
	if err != nil {
		return page, err
	}

	for i := range list.Letters {
		page.Letters = append(page.Letters, newDeadLetter(&list.Letters[i]))
	}
	page.Total, page.Next = list.Total, list.Next
	return page, nil
}

// Count returns the number of matching dead letters.
func (l Letters) Count(ctx context.Context, f DeadFilter) (int64, error) {
	if f.Source == FromHandler {
		return l.ofHandlers().count(ctx, f)
	}

	namespaces, q, err := l.resolveFilter(ctx, f)
	if err != nil {
		return 0, err
	}
	return deadletter.Count(ctx, l.op.State.Client(), namespaces, q)
}

// DeadGroup summarizes letters of the relay with the same topic, type and class, or letters of handlers with the same group,
// handler, type and class.
type DeadGroup struct {
	deadletter.Group
	ConsumerGroup string `json:"group,omitempty"`
	Handler       string `json:"handler,omitempty"`
}

// Summary counts the matching letters in groups. The largest group comes first.
func (l Letters) Summary(ctx context.Context, f DeadFilter) ([]DeadGroup, error) {
	if f.Source == FromHandler {
		return l.ofHandlers().summary(ctx, f)
	}

	namespaces, q, err := l.resolveFilter(ctx, f)
	if err != nil {
		return nil, err
	}

	list, err := deadletter.Summarize(ctx, l.op.State.Client(), namespaces, q)
	if err != nil {
		return nil, err
	}
	groups := make([]DeadGroup, len(list))
	for i, g := range list {
		groups[i].Group = g
	}
	return groups, nil
}

// DeadRef identifies one letter.
type DeadRef struct {
	Collection string `query:"collection" maxLength:"255" doc:"Only this outbox, as database.collection."`
	ID         string `query:"id" required:"true" minLength:"1" maxLength:"4096" doc:"Of the envelope, as in the header id."`
	Delivery   int    `query:"delivery" minimum:"-1" maximum:"2147483647" default:"-1" doc:"The delivery that died; -1 selects the latest one."`
	Source     string `query:"source" enum:"relay,handler" doc:"Who gave up: the relay (default), or a handler of a consumer."`
	Group      string `query:"group" maxLength:"255" doc:"With source handler: the consumer group."`
	Handler    string `query:"handler" maxLength:"255" doc:"With source handler: the name of the handler."`
}

// Show returns one letter with its envelope, in which the rules of [Operator.Redact] hide values. The
// payload, and fields that do not belong to an envelope, are included only if payload is true. Show
// then writes an entry to the events log first, and returns an error if that fails.
func (l Letters) Show(ctx context.Context, ref DeadRef, payload bool) (DeadLetter, error) {
	letter, envelope, err := l.open(ctx, ref)
	if err != nil {
		return DeadLetter{}, err
	}

	// A message of a handler is shown in the form of the contract.
	m := l.op.Mapping
	if ref.Source == FromHandler {
		m = nil
	}
	letter.Envelope = l.op.Redact.redactEnvelope(envelopeJSON(envelope, payload, m), payload, m)
	if !payload {
		return letter, nil
	}

	// The entry comes first: a payload that was shown without a record cannot be taken back.
	err = l.op.logAction(ctx, "payload_shown", bson.D{
		{Key: "collection", Value: letter.Collection},
		{Key: "id", Value: letter.ID},
		{Key: "delivery", Value: letter.Delivery},
	})
	if err != nil {
		return DeadLetter{}, fmt.Errorf("the payload is not shown, because the events log cannot be written: %w", err)
	}
	return letter, nil
}

// open returns one letter and its envelope.
func (l Letters) open(ctx context.Context, ref DeadRef) (DeadLetter, bson.Raw, error) {
	if ref.Source == FromHandler {
		return l.ofHandlers().show(ctx, ref)
	}
	d, err := l.findLetter(ctx, ref)
	return newDeadLetter(&d), d.Envelope, err
}

// findLetter returns the letter that ref identifies. It returns an error if letters of two
// collections match, or letters with ids of two BSON types.
func (l Letters) findLetter(ctx context.Context, ref DeadRef) (deadletter.Dead, error) {
	var none deadletter.Dead
	namespaces, q, err := l.resolveFilter(ctx, DeadFilter{Collection: ref.Collection, IDs: []string{ref.ID}})
	if err != nil {
		return none, err
	}
	// An id may have died several times, so all of its letters are read.
	list, err := deadletter.List(ctx, l.op.State.Client(), namespaces, q, deadletter.Page{Limit: deadletter.MaxPageSize})
	if err != nil {
		return none, err
	}

	var found *deadletter.Dead
	for i := range list.Letters {
		d := &list.Letters[i]
		// A negative delivery stands for the latest one.
		if ref.Delivery >= 0 && int(d.ID.Delivery) != ref.Delivery {
			continue
		}

		switch {
		case found == nil:
			found = d
		case found.ID.NS != d.ID.NS:
			return none, fmt.Errorf("both %s and %s have dead letters of id %s; name the collection",
				found.ID.NS, d.ID.NS, ref.ID)
		case found.ID.ID.Type != d.ID.ID.Type:
			return none, fmt.Errorf("%s has dead letters of id %s in two BSON types; the text does not identify one of them",
				d.ID.NS, ref.ID)
		case d.ID.Delivery > found.ID.Delivery:
			found = d
		}
	}
	// Only ids and reasons were read above. The body may be stored in chunks, so it is fetched for one letter.
	if found == nil {
		return none, fmt.Errorf("dead letter of id %s in %s: %w; outrelay dead list lists the letters",
			ref.ID, strings.Join(namespaces, ", "), mongodb.ErrNotFound)
	}

	db, _, _ := strings.Cut(found.ID.NS, ".")
	return deadletter.Open(ctx, l.op.State.Client().Database(db), found.ID)
}

// Empty reports whether the filter has no condition except Stand, Source and Collection.
func (f DeadFilter) Empty() bool {
	return len(f.IDs) == 0 && f.From.IsZero() && f.To.IsZero() && f.Topic == "" && f.Type == "" && f.AggregateType == "" &&
		f.Key == "" && f.Class == "" && f.Message == "" && f.Group == "" && f.Handler == ""
}
