package admin

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/service/inventory"
	"github.com/outrelay/outrelay/internal/service/setaside"
)

// The entries of the audit log for actions on messages that handlers retry.
const (
	handlerRetried   nodes.Kind = "handler_retried"
	handlerDiscarded nodes.Kind = "handler_discarded"
)

// HandlerWaiting is the set of the messages that handlers of consumers retry, and of the messages that follow them in the order of a key.
// They are in [Operator.ServiceDatabases], in the collection inbox_waiting. Messages in retry topics are in Kafka: [Groups] counts them.
//
// Changes are requests: the member of the group that has the partition carries them out within about two seconds. Without a running
// member, they wait for one.
type HandlerWaiting struct{ op Operator }

// HandlerWaitingFilter selects messages that handlers retry. A message matches if it fulfills all conditions that are set.
type HandlerWaitingFilter struct {
	Database string   `query:"database" json:"database,omitempty" maxLength:"63" doc:"Only this database of a service."`
	Group    string   `query:"group" json:"group,omitempty" maxLength:"255" doc:"The consumer group."`
	Handler  string   `query:"handler" json:"handler,omitempty" maxLength:"255" doc:"The name of the handler."`
	Topic    string   `query:"topic" json:"topic,omitempty" maxLength:"255"`
	Key      string   `query:"key" json:"key,omitempty" maxLength:"4096" doc:"The key of the record."`
	Reason   string   `query:"reason" json:"reason,omitempty" maxLength:"512" doc:"The beginning of the reason of a failure."`
	IDs      []string `query:"id" json:"ids,omitempty" maxItems:"1000" doc:"Ids of messages, places as topic/partition@offset, or rows of a list."`
	All      bool     `query:"-" json:"all,omitempty" doc:"Allows an action without a condition."`
}

// Empty reports whether the filter has no condition except the database.
func (f HandlerWaitingFilter) Empty() bool {
	return f.Group == "" && f.Handler == "" && f.Topic == "" && f.Key == "" && f.Reason == "" && f.IDs == nil
}

// checkTexts returns an error if a value cannot match.
func (f HandlerWaitingFilter) checkTexts() error {
	if slices.Contains(f.IDs, "") {
		return invalidRequest("an id is empty; list the messages for their ids")
	}
	if strings.Contains(f.Handler, "/") {
		return invalidRequest("handler %q contains a slash; give the group and the name of the handler separately", f.Handler)
	}
	return nil
}

// toQuery returns the query of the filter for the messages of a database.
func (f HandlerWaitingFilter) toQuery(database string) setaside.Query {
	ids, rows := splitRows[digest](f.IDs, database)
	query := setaside.Query{Group: f.Group, Handler: f.Handler, Topic: f.Topic, Key: f.Key, IDs: ids, Reason: f.Reason}
	for _, id := range rows {
		query.Messages = append(query.Messages, setaside.Digest(id))
	}
	return query
}

// HandlerMessage is a message that a handler retries, without its payload.
type HandlerMessage struct {
	Row         string     `json:"row"` // names this message of this handler alone; the actions take it as an id
	Database    string     `json:"database"`
	Group       string     `json:"group"`
	Handler     string     `json:"handler"`
	Topic       string     `json:"topic"`
	Partition   int32      `json:"partition"`
	Offset      int64      `json:"offset"`
	Place       string     `json:"place"` // "<topic>/<partition>@<offset>", which the actions take as an id
	ID          string     `json:"id"`    // of the message; its place if its headers have no id
	Type        string     `json:"type"`
	Key         string     `json:"key"`
	AsideAt     time.Time  `json:"aside_at"`               // when it was set aside
	Attempts    int        `json:"attempts"`               // failed ones; 0: it follows an earlier message of its key, untried
	Class       string     `json:"class,omitempty"`        // of the last failure: handler, timeout, panic, malformed, database
	Reason      string     `json:"reason,omitempty"`       // of the last failure
	FailedAt    *time.Time `json:"failed_at,omitempty"`    // the first failure
	NextAt      *time.Time `json:"next_at,omitempty"`      // the next attempt; missing if it follows an earlier message of its key
	RequestedAt *time.Time `json:"requested_at,omitempty"` // a retry or a discard that no member has carried out yet
	DiscardedBy string     `json:"discarded_by,omitempty"` // an operator has discarded it, and no member has made the dead letter yet

	history []record.Attempt // the last failures
	names   []string         // ids of the message and its row, as filters take them
}

// HandlerWaitingGroup counts the messages that a handler retries in one topic.
type HandlerWaitingGroup struct {
	Database  string     `json:"database"`
	Group     string     `json:"group"`
	Handler   string     `json:"handler"`
	Topic     string     `json:"topic"`
	Count     int64      `json:"count"`
	Failed    int64      `json:"failed"`              // the others follow a failed message of their key
	Discarded int64      `json:"discarded"`           // discarded, and not carried out yet
	FailedAt  *time.Time `json:"failed_at,omitempty"` // the first failure of the oldest
	NextAt    *time.Time `json:"next_at,omitempty"`   // the first next attempt
}

// waitingDesk is the messages of a database, with the query of a filter for them.
type waitingDesk struct {
	database string
	*setaside.Desk
	query setaside.Query
}

// resolve returns the databases that have messages of handlers, or only the named one, in order, with the queries of a filter.
func (h HandlerWaiting) resolve(ctx context.Context, filter HandlerWaitingFilter) (desks []waitingDesk, err error) {
	if err := filter.checkTexts(); err != nil {
		return nil, err
	}
	all, err := h.op.ServiceDatabases(ctx, filter.Database)
	if err != nil {
		return nil, err
	}

	err = h.op.forEachService(ctx, all, func(db string, found inventory.Inventory) error {
		if found.Waiting {
			desks = append(desks, waitingDesk{db, setaside.NewDesk(h.op.database(db), setaside.DefaultCollection), filter.toQuery(db)})
		}
		return nil
	})
	return desks, err
}

// List returns a page of the messages by database, handler, topic, partition and key. The messages of a key have the order of their
// attempts.
func (h HandlerWaiting) List(ctx context.Context, filter HandlerWaitingFilter, limit int, after string) (Page[HandlerMessage], error) {
	page := newPage[HandlerMessage]()
	list, err := h.resolve(ctx, filter)
	if err != nil {
		return page, err
	}
	var names []string
	desks := map[string]waitingDesk{}
	for _, desk := range list {
		names = append(names, desk.database)
		desks[desk.database] = desk
	}

	lister := collectionLister[HandlerMessage, setaside.Position]{
		count: func(db string) (int64, error) { return desks[db].Count(ctx, desks[db].query) },
		read: func(db string, after *setaside.Position, limit int) ([]HandlerMessage, *setaside.Position, error) {
			items, last, err := desks[db].List(ctx, desks[db].query, after, limit)
			list := make([]HandlerMessage, len(items))
			for i := range items {
				list[i] = newHandlerMessage(db, &items[i])
			}
			return list, last, err
		},
	}
	return lister.readPage(names, pageSize(limit), after)
}

func newHandlerMessage(database string, item *setaside.Item) HandlerMessage {
	group, handler := item.SplitHandler()
	place := item.FormatPlace()
	message := HandlerMessage{
		Row: nameRow(database, digest(item.Message.ID)), Database: database, Group: group, Handler: handler, Topic: item.Topic, Partition: item.Partition, Offset: item.Offset, Place: place,
		ID:   truncateText(cmp.Or(item.Header(setaside.IDHeaders...), place)),
		Type: truncateText(item.Header(setaside.TypeHeaders...)), Key: truncateText(string(item.Key)),
		AsideAt: item.AsideAt.UTC(), Attempts: item.Failed, FailedAt: inUTC(item.Since), NextAt: inUTC(item.Due), RequestedAt: inUTC(item.RequestedAt),
	}

	message.names = []string{message.Row, place}
	for _, name := range setaside.IDHeaders {
		message.names = append(message.names, item.Header(name))
	}
	for _, failure := range item.History {
		message.history = append(message.history, record.Attempt{At: failure.At, Class: record.Class(failure.Class), Reason: failure.Reason})
	}
	if n := len(item.History); n > 0 {
		message.Class, message.Reason = item.History[n-1].Class, item.History[n-1].Reason
	}
	if item.Discarded != nil {
		message.DiscardedBy = item.Discarded.By
	}
	return message
}

// compareFirst orders times, with missing ones at the end.
func compareFirst(a, b *time.Time) int {
	if a == nil || b == nil {
		return -compareTimes(a, b)
	}
	return a.Compare(*b)
}

// inUTC returns a time in UTC, or nil for nil and for the zero time.
func inUTC(moment *time.Time) *time.Time {
	if moment == nil || moment.IsZero() {
		return nil
	}
	utc := moment.UTC()
	return &utc
}

// Summary counts the messages that match by database, group, handler and topic. The handler that fails for the longest time comes first.
func (h HandlerWaiting) Summary(ctx context.Context, filter HandlerWaitingFilter) ([]HandlerWaitingGroup, error) {
	groups := []HandlerWaitingGroup{}
	desks, err := h.resolve(ctx, filter)
	if err != nil {
		return groups, err
	}

	for _, desk := range desks {
		sums, err := desk.Summarize(ctx, desk.query)
		if err != nil {
			return groups, err
		}
		for _, s := range sums {
			place := setaside.Place{Handler: s.Handler}
			group, handler := place.SplitHandler()
			groups = append(groups, HandlerWaitingGroup{
				Database: desk.database, Group: group, Handler: handler, Topic: s.Topic,
				Count: s.Count, Failed: s.Failed, Discarded: s.Discarded, FailedAt: inUTC(&s.Since), NextAt: inUTC(&s.Due),
			})
		}
	}
	slices.SortStableFunc(groups, func(a, b HandlerWaitingGroup) int { return compareFirst(a.FailedAt, b.FailedAt) })
	return groups, nil
}

// HandlerRetried counts the messages of a retry, or with a dry run the expected ones.
type HandlerRetried struct {
	DryRun  bool  `json:"dry_run"`
	Matched int64 `json:"matched"`
	// Retried are the messages that have failed. The others of Matched follow an earlier message of their key, and need no retry of
	// their own.
	Retried int64 `json:"retried"`

	NotFound []string `json:"not_found,omitempty"` // those ids of the filter that no message has
}

// Retry requests an attempt now for the messages that match and have failed. Their attempts count as before. A handler that is suspended
// tries them too; one that is paused by PauseHandler does not.
func (h HandlerWaiting) Retry(ctx context.Context, filter HandlerWaitingFilter, effect Effect) (HandlerRetried, error) {
	out := HandlerRetried{DryRun: bool(effect)}
	desks, err := h.resolveChange(ctx, filter)
	if err != nil {
		return out, err
	}

	if out.NotFound, err = h.findMissing(ctx, filter); err != nil {
		return out, err
	}
	for _, desk := range desks {
		matched, err := desk.Count(ctx, desk.query)
		if err != nil {
			return out, err
		}
		failed, err := desk.CountFailed(ctx, desk.query)
		if err != nil {
			return out, err
		}
		out.Matched += matched
		out.Retried += failed
	}
	if effect == DryRun || out.Retried == 0 {
		return out, nil
	}

	out.Retried, err = changeEach(desks, func(desk waitingDesk) (int64, error) { return desk.Retry(ctx, desk.query) })
	return out, h.op.logOutcome(ctx, handlerRetried, bson.D{
		{Key: "retried", Value: out.Retried}, {Key: "query", Value: auditFields(filter)},
	}, err)
}

// HandlerDiscarded counts the messages of a discard, or with a dry run the expected ones.
type HandlerDiscarded struct {
	DryRun    bool  `json:"dry_run"`
	Matched   int64 `json:"matched"`
	Discarded int64 `json:"discarded"`

	NotFound []string `json:"not_found,omitempty"` // those ids of the filter that no message has
}

// Discard orders that the messages that match become dead letters of class skipped, without another attempt. Later messages of their
// keys are tried then. The dead letters can be requeued.
func (h HandlerWaiting) Discard(ctx context.Context, filter HandlerWaitingFilter, effect Effect) (HandlerDiscarded, error) {
	out := HandlerDiscarded{DryRun: bool(effect)}
	desks, err := h.resolveChange(ctx, filter)
	if err != nil {
		return out, err
	}

	if out.NotFound, err = h.findMissing(ctx, filter); err != nil {
		return out, err
	}
	for _, desk := range desks {
		n, err := desk.Count(ctx, desk.query)
		if err != nil {
			return out, err
		}
		out.Matched += n
	}
	if effect == DryRun || out.Matched == 0 {
		return out, nil
	}

	actor := cmp.Or(h.op.Actor, "an operator")
	out.Discarded, err = changeEach(desks, func(desk waitingDesk) (int64, error) { return desk.Discard(ctx, desk.query, actor) })
	return out, h.op.logOutcome(ctx, handlerDiscarded, bson.D{
		{Key: "discarded", Value: out.Discarded}, {Key: "query", Value: auditFields(filter)},
	}, err)
}

// findMissing returns those ids of the filter that no message has that matches.
func (h HandlerWaiting) findMissing(ctx context.Context, filter HandlerWaitingFilter) ([]string, error) {
	return findMissing(filter.IDs, func(after string) (Page[HandlerMessage], error) {
		return h.List(ctx, filter, MaxPage, after)
	}, func(message *HandlerMessage) []string { return message.names })
}

// resolveChange is resolve for an action. It returns an error if the filter is empty and does not select all.
func (h HandlerWaiting) resolveChange(ctx context.Context, filter HandlerWaitingFilter) ([]waitingDesk, error) {
	if err := CheckSelection(filter, filter.All); err != nil {
		return nil, err
	}
	return h.resolve(ctx, filter)
}

// changeEach adds the results of a change in each database. It ends with the first error, and returns the sum until then.
func changeEach(desks []waitingDesk, change func(desk waitingDesk) (int64, error)) (sum int64, err error) {
	for _, desk := range desks {
		n, err := change(desk)
		sum += n
		if err != nil {
			return sum, err
		}
	}
	return sum, nil
}
