package admin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/service/inventory"
	"github.com/outrelay/outrelay/internal/service/setaside"
	handlerletters "github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// The values of [DeadFilter.Source].
const (
	FromRelay   = "relay"
	FromHandler = "handler"
)

// HandlerClasses returns the classes that a dead letter of a handler may have.
func HandlerClasses() []string {
	return []string{
		handlerletters.ClassHandler,
		handlerletters.ClassRejected,
		handlerletters.ClassTimeout,
		handlerletters.ClassPanic,
		handlerletters.ClassMalformed,
		handlerletters.ClassExpired,
		handlerletters.ClassUnknown,
		handlerletters.ClassSkipped,
		handlerletters.ClassDatabase,
	}
}

// handlerLetters are the dead letters of handlers in [Operator.ServiceDatabases].
type handlerLetters struct{ op Operator }

// handlerDesk is one collection of letters, with the query of a filter for it.
type handlerDesk struct {
	ns string
	*handlerletters.Desk
	query handlerletters.Query
}

// openDesks returns the collections of letters, in the order of their names. only selects one of them; "" means all.
func (h handlerLetters) openDesks(ctx context.Context, only string) ([]handlerDesk, error) {
	database, _, _ := strings.Cut(only, ".")
	databases, err := h.op.ServiceDatabases(ctx, database)
	if err != nil {
		return nil, err
	}

	var desks []handlerDesk
	err = h.op.forEachService(ctx, databases, func(db string, found inventory.Inventory) error {
		for _, coll := range found.Letters {
			if only != "" && only != db+"."+coll {
				continue
			}
			desk, err := handlerletters.New(h.op.database(db), handlerletters.WithCollection(coll))
			if err != nil {
				return err
			}
			desks = append(desks, handlerDesk{ns: db + "." + coll, Desk: desk})
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	// Without a name, having no letters is normal.
	if only != "" && len(desks) == 0 {
		return nil, wrapError("dead letters of handlers in "+only, mongodb.ErrNotFound)
	}
	return desks, nil
}

// toHandlerQuery returns the query of the filter for letters of handlers in the collection ns.
func (f DeadFilter) toHandlerQuery(ns string) (handlerletters.Query, error) {
	messages, rows := splitRows[handlerletters.ID](f.IDs, ns)
	query := handlerletters.Query{
		IDs: rows, Messages: messages, Group: f.Group, Handler: f.Handler, Class: f.Class, Name: f.Type, AggregateType: f.AggregateType,
		Topic: f.Topic, Reason: f.Message, Fingerprint: f.Fingerprint, From: f.From, Before: f.To,
		Archived: f.Archived, All: f.All,
	}
	if f.Key != "" {
		query.Key = []byte(f.Key)
	}
	if f.RequeueStatus != "" && f.RequeueStatus != "any" {
		requeued := f.RequeueStatus == string(letters.Requeued)
		query.Requeued = &requeued
	}
	if slices.Contains(f.IDs, "") {
		return query, invalidRequest("an id is empty")
	}
	return query, f.checkValues(HandlerClasses())
}

// resolve returns the collections with the queries of a filter.
func (h handlerLetters) resolve(ctx context.Context, filter DeadFilter) ([]handlerDesk, error) {
	if _, err := filter.toHandlerQuery(""); err != nil {
		return nil, err
	}
	desks, err := h.openDesks(ctx, filter.Collection)
	for i := range desks {
		if desks[i].query, err = filter.toHandlerQuery(desks[i].ns); err != nil {
			return nil, err
		}
	}
	return desks, err
}

// resolveChange is resolve for an action. It returns an error if the filter is empty and does not select all.
func (h handlerLetters) resolveChange(ctx context.Context, filter DeadFilter) ([]handlerDesk, error) {
	if err := CheckSelection(filter, filter.All); err != nil {
		return nil, err
	}
	return h.resolve(ctx, filter)
}

// newHandlerLetter converts a stored letter, without its message.
func newHandlerLetter(ns string, letter *handlerletters.Letter) DeadLetter {
	deadLetter := DeadLetter{
		Row:           nameRow(ns, letter.ID),
		Collection:    ns,
		ID:            letter.ID.Message,
		Delivery:      int32(letter.ID.Delivery),
		Version:       letters.VersionOf(int32(letter.ID.Delivery), letter.Requeued != nil),
		AggregateType: letter.Aggregate.Type,
		AggregateID:   letter.Aggregate.ID,
		Type:          letter.Name,
		Key:           string(letter.Key),
		Topic:         letter.ID.Topic,
		Partition:     &letter.ID.Partition,
		Place:         letter.ID.Place(),
		Class:         letter.Class,
		Reason:        letter.Reason,
		Size:          letter.Size,
		Source:        letters.Source{Kind: FromHandler, Group: letter.ID.Group, Handler: letter.ID.Handler},
		Attempts:      []record.Attempt{},
		FirstFailure:  letter.GivenUpAt,
		LastFailure:   letter.GivenUpAt,
		DiedAt:        letter.GivenUpAt,
		origin:        letterOrigin{place: outboxes.Place{Topic: letter.ID.Topic, Partition: letter.ID.Partition, Offset: letter.ID.Offset}},
	}

	// A row is text, and other producers may use bytes as ids.
	if !utf8.ValidString(letter.ID.Message) {
		deadLetter.Row = deadLetter.Place
	}
	for _, a := range letter.History {
		deadLetter.Attempts = append(deadLetter.Attempts, record.Attempt{At: a.At, Class: record.Class(a.Class), Reason: a.Reason})
	}
	if n := len(letter.History); n > 0 {
		deadLetter.FirstFailure, deadLetter.LastFailure = letter.History[0].At, letter.History[n-1].At
	}
	if requeued := letter.Requeued; requeued != nil {
		deadLetter.Requeued = &letters.Requeue{At: requeued.At, Actor: requeued.Actor, Delivery: deadLetter.Delivery + 1, Handlers: requeued.Handlers}
		deadLetter.Waiting = requeued.Waiting
	}
	if archived := letter.Archived; archived != nil {
		deadLetter.Archived = newDeadArchived(&letters.Archived{At: archived.At, Actor: archived.Actor}, letter.ExpireAt)
	}

	return deadLetter
}

// count is [Letters.Count] for letters of handlers.
func (h handlerLetters) count(ctx context.Context, filter DeadFilter) (total int64, err error) {
	desks, err := h.resolve(ctx, filter)
	if err != nil {
		return 0, err
	}
	for _, d := range desks {
		n, err := d.Count(ctx, d.query)
		if err != nil {
			return 0, err
		}
		total += n
	}
	return total, nil
}

// summary is [Letters.Summary] for letters of handlers, by their failure.
func (h handlerLetters) summary(ctx context.Context, filter DeadFilter) ([]DeadGroup, error) {
	groups := []DeadGroup{}
	desks, err := h.resolve(ctx, filter)
	if err != nil {
		return nil, err
	}

	for _, d := range desks {
		list, err := d.Summary(ctx, d.query)
		if err != nil {
			return nil, err
		}
		for _, s := range list {
			group := letters.Group{
				Fingerprint: s.Fingerprint, Failure: s.Failure, Topic: s.Topic, Type: s.Name, Class: record.Class(s.Class), Count: s.Count, NotRequeued: s.Count - s.Requeued, First: s.First, Last: s.Last,
			}
			groups = addGroup(groups, DeadGroup{Group: group, Source: FromHandler, ConsumerGroup: s.Group, Handler: s.Handler})
		}
	}

	slices.SortStableFunc(groups, func(a, b DeadGroup) int { return int(b.Count - a.Count) })
	return groups, nil
}

// addGroup adds a group, or adds its counts to the group of the same failure in another collection.
func addGroup(groups []DeadGroup, group DeadGroup) []DeadGroup {
	i := slices.IndexFunc(groups, func(other DeadGroup) bool { return other.Fingerprint == group.Fingerprint })
	if i < 0 {
		return append(groups, group)
	}

	known := &groups[i]
	known.Count += group.Count
	known.NotRequeued += group.NotRequeued
	if group.First.Before(known.First) {
		known.First = group.First
	}
	if group.Last.After(known.Last) {
		known.Last = group.Last
	}
	return groups
}

// find returns the letter that ref identifies, whole. The id of ref may be a row, or the place of the record in place of the id of the
// message. It returns an error if several letters have that id.
func (h handlerLetters) find(ctx context.Context, ref DeadRef) (handlerDesk, handlerletters.Letter, error) {
	var in handlerDesk
	var found handlerletters.Letter
	ns, id, isRow := parseRow[handlerletters.ID](ref.ID)
	desks, err := h.openDesks(ctx, cmp.Or(ns, ref.Collection))
	if err != nil {
		return in, found, err
	}
	if isRow {
		found, err = getLetter(ctx, desks[0], id)
		return desks[0], found, err
	}

	query := handlerletters.Query{Messages: []string{ref.ID}, Group: ref.Group, Handler: ref.Handler, NoValues: true}
	queries := []handlerletters.Query{query}
	if topic, _, _, ok := setaside.ParsePlace(ref.ID); ok {
		query.Messages, query.Topic = nil, topic
		queries = append(queries, query)
	}
	// The archive comes last: it may have an earlier letter of the message.
	for _, query := range slices.Clone(queries) {
		query.Archived = true
		queries = append(queries, query)
	}
	for len(queries) > 0 && in.Desk == nil {
		for _, d := range desks {
			for l, err := range d.List(ctx, queries[0]) {
				switch {
				case err != nil:
					return in, found, err
				case ref.ID != l.ID.Message && ref.ID != l.ID.Place(), ref.Delivery >= 0 && l.ID.Delivery != ref.Delivery:
				// Of one message at one handler, the latest delivery counts.
				case in.Desk == nil, in.ns == d.ns && isLaterDelivery(l.ID, found.ID):
					in, found = d, l
				case in.ns != d.ns || !isLaterDelivery(found.ID, l.ID):
					return in, found, invalidRequest("there are several dead letters of message %s, for example %s and %s; "+
						"name the collection, the group and the handler, or the place of the record in place of the id, as in %s",
						ref.ID, found.ID, l.ID, found.ID.Place())
				}
			}
		}
		queries = queries[1:]
	}
	if in.Desk == nil {
		return in, found, fmt.Errorf("no dead letter of a handler for message %s: %w", ref.ID, mongodb.ErrNotFound)
	}

	// The search left out the value.
	found, err = getLetter(ctx, in, found.ID)
	return in, found, err
}

// getLetter reads one letter, whole.
func getLetter(ctx context.Context, desk handlerDesk, id handlerletters.ID) (handlerletters.Letter, error) {
	letter, err := desk.Get(ctx, id)
	if errors.Is(err, handlerletters.ErrNotFound) {
		err = fmt.Errorf("%w: %w", err, mongodb.ErrNotFound)
	}
	return letter, err
}

// isLaterDelivery reports whether a is a later delivery than b of the same message to the same handler.
func isLaterDelivery(a, b handlerletters.ID) bool {
	later := a.Delivery > b.Delivery
	b.Delivery = a.Delivery
	return later && a == b
}

// show returns one letter with its message in the form of an envelope.
func (h handlerLetters) show(ctx context.Context, ref DeadRef) (DeadLetter, bson.Raw, error) {
	desk, letter, err := h.find(ctx, ref)
	if err != nil {
		return DeadLetter{}, nil, err
	}
	raw, err := bson.Marshal(messageEnvelope(&letter))
	return newHandlerLetter(desk.ns, &letter), raw, err
}

// messageEnvelope returns the message of a letter in the form of an envelope. Bytes that are text are strings. Texts that the record does
// not have are left out: few presets write the type of the aggregate.
func messageEnvelope(letter *handlerletters.Letter) bson.D {
	asText := func(data []byte) any {
		switch {
		case data == nil:
			return nil
		case utf8.Valid(data):
			return string(data)
		default:
			return data
		}
	}

	headers := bson.A{}
	for _, h := range letter.Headers {
		headers = append(headers, bson.D{{Key: "k", Value: h.Key}, {Key: "v", Value: asText(h.Value)}})
	}
	envelope := setFields(bson.D{
		{Key: "_id", Value: letter.ID.Message},
		{Key: "aggregatetype", Value: letter.Aggregate.Type},
		{Key: "aggregateid", Value: letter.Aggregate.ID},
		{Key: "type", Value: letter.Name},
		{Key: "contenttype", Value: letter.ContentType},
		{Key: "schemaversion", Value: letter.SchemaVersion},
	})
	return append(envelope,
		bson.E{Key: "key", Value: asText(letter.Key)},
		bson.E{Key: "headers", Value: headers},
		bson.E{Key: "payload", Value: asText(letter.Value)},
	)
}
