package admin

import (
	"cmp"
	"context"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// The entries of the audit log for actions on failed envelopes.
const (
	failedReset   nodes.Kind = "failed_reset"
	failedRetried nodes.Kind = "failed_retried"
)

// Waiting is the set of the waiting envelopes of a watcher. All of them are in one collection of the state database, so the cost
// of its functions depends on what waits, and not on the number of outboxes.
type Waiting struct{ op Operator }

// WaitingGroup counts the envelopes of a collection that wait for one reason and one topic, or that are scheduled.
type WaitingGroup struct {
	Collection string `json:"collection"`
	Reason     string `json:"reason"`          // retry, blocked, parked, queued or scheduled
	Topic      string `json:"topic,omitempty"` // the topic that they wait for; "" if the envelopes do not name it
	Count      int64  `json:"count"`
	// Oldest is when the oldest envelope was committed, to the second. For scheduled envelopes it
	// is the earliest due time.
	Oldest *time.Time `json:"oldest,omitempty"`
}

// Summary counts the waiting and scheduled envelopes of all collections of the watcher, or of the named one. It reads every
// waiting envelope, and one index entry per scheduled envelope.
func (w Waiting) Summary(ctx context.Context, collection string) ([]WaitingGroup, error) {
	groups := []WaitingGroup{}
	if err := w.checkRead(ctx, collection); err != nil {
		return groups, err
	}

	counts, err := waiting.CountGroups(ctx, w.op.waiting(), waiting.Query{Watcher: w.op.Watcher, NS: collection})
	if err != nil {
		return groups, err
	}
	for _, c := range counts {
		group := WaitingGroup{Collection: c.NS, Reason: string(c.Reason), Topic: c.Topic, Count: c.N}
		if !c.Oldest.IsZero() {
			group.Oldest = &c.Oldest
		}
		groups = append(groups, group)
	}

	names, err := w.op.scheduledCollections(ctx, collection)
	if err != nil {
		return groups, err
	}
	counter := w.op.newCounter()
	due, err := counter.CountScheduled(ctx, names)
	if err != nil {
		return groups, err
	}
	for ns, scheduled := range due {
		if scheduled.N > 0 {
			groups = append(groups, WaitingGroup{Collection: ns, Reason: "scheduled", Count: scheduled.N, Oldest: &scheduled.First})
		}
	}

	// The scheduled ones of a collection stay after those that wait.
	slices.SortStableFunc(groups, func(a, b WaitingGroup) int { return cmp.Compare(a.Collection, b.Collection) })
	return groups, nil
}

// checkRead returns an error if the watcher has read no collection, or does not read the named one.
func (w Waiting) checkRead(ctx context.Context, collection string) error {
	if collection == "" {
		_, err := w.op.Collections(ctx, "")
		return err
	}
	return w.op.checkCollection(ctx, collection)
}

// WaitingFilter selects waiting envelopes. An envelope matches if it fulfills all conditions that
// are set.
type WaitingFilter struct {
	Collection string   `query:"collection" json:"collection,omitempty" maxLength:"255" doc:"Only this outbox, as database.collection."`
	Reason     string   `query:"reason" json:"reason,omitempty" enum:"retry,blocked,parked,queued"`
	Topic      string   `query:"topic" json:"topic,omitempty" maxLength:"255" doc:"A topic that it waits for."`
	Key        string   `query:"key" json:"key,omitempty" maxLength:"4096" doc:"The ordering key."`
	IDs        []string `query:"id" json:"ids,omitempty" maxItems:"1000" doc:"Only these envelopes, by their ids or by the rows of a list."`
	Failed     bool     `query:"failed" json:"failed,omitempty" doc:"Only envelopes that were rejected and wait for another attempt."`
	All        bool     `query:"-" json:"all,omitempty" doc:"Allows an action without a condition."`
}

// Empty reports whether the filter has no condition except the collection.
func (f WaitingFilter) Empty() bool {
	return f.Reason == "" && f.Topic == "" && f.Key == "" && f.IDs == nil
}

// toQuery returns the query of the filter, or an error for a reason or a collection that does not exist.
func (w Waiting) toQuery(ctx context.Context, filter WaitingFilter) (waiting.Query, error) {
	query := waiting.Query{
		Watcher: w.op.Watcher, NS: filter.Collection, Reason: waiting.Reason(filter.Reason), Topic: filter.Topic, Key: filter.Key, Failed: filter.Failed,
	}
	if filter.Reason != "" && !slices.Contains(waiting.Reasons(), query.Reason) {
		return query, invalidRequest("reason %q is none of retry, blocked, parked, queued; "+
			"outrelay scheduled and outrelay dead list the others", filter.Reason)
	}

	// A text may stand for ids of several BSON types. An empty list selects nothing.
	if filter.IDs != nil {
		query.IDs, query.Documents = []bson.RawValue{}, [][waiting.IDSize]byte{}
	}
	for _, text := range filter.IDs {
		if _, document, isRow := parseRow[digest](text); isRow {
			query.Documents = append(query.Documents, document)
			continue
		}
		ids, err := parseIDValues(text)
		if err != nil {
			return query, err
		}
		query.IDs = append(query.IDs, ids...)
	}
	return query, w.op.checkCollection(ctx, filter.Collection)
}

// WaitingEnvelope is an envelope that could not be sent in the order of the stream, so that the relay stores it until it is sent.
type WaitingEnvelope struct {
	Row        string        `json:"row"` // names this envelope and delivery alone; the actions take it as an id
	Collection string        `json:"collection"`
	ID         string        `json:"id"`
	Delivery   int32         `json:"delivery"`
	Type       string        `json:"type"`
	Key        string        `json:"key"`    // the ordering key
	Reason     string        `json:"reason"` // retry, blocked, parked or queued
	Why        string        `json:"why"`    // in words: the error of the last attempt, or the reason of the topic
	Topics     []string      `json:"topics"` // topics that it waits for; empty means all that it routes to
	Origin     string        `json:"origin"` // stream, sweep, scheduled, requeue or replay
	Attempts   int32         `json:"attempts"`
	NextAt     *time.Time    `json:"next_at,omitempty"`
	Error      *WaitingError `json:"error,omitempty"` // of the last failed attempt
}

// WaitingError is a failed attempt.
type WaitingError struct {
	Class  string    `json:"class"`
	Reason string    `json:"reason"`
	Topic  string    `json:"topic,omitempty"` // the topic that rejected it
	At     time.Time `json:"at"`
	Node   string    `json:"node,omitempty"`
}

// List returns a page of waiting envelopes without payloads, sorted by collection and key. Within a
// key, they have the order in which they will be sent.
func (w Waiting) List(ctx context.Context, filter WaitingFilter, limit int, after string) (Page[WaitingEnvelope], error) {
	page := newPage[WaitingEnvelope]()
	query, err := w.toQuery(ctx, filter)
	if err != nil {
		return page, err
	}
	items, next, err := waiting.List(ctx, w.op.waiting(), query, heavyFields(w.op.Mapping, "payload", "headers"), pageSize(limit), after)
	if err != nil {
		return page, err
	}
	page.Next = next

	obstacles, err := readObstacles(ctx, w.op)
	if err != nil {
		return page, err
	}
	for i := range items {
		envelope := w.op.newWaitingEnvelope(&items[i])
		envelope.Why = obstacles.explain(&envelope)
		page.Items = append(page.Items, envelope)
	}
	page.Total, err = waiting.CountMatching(ctx, w.op.waiting(), query)
	return page, err
}

// obstacles are the reasons why topics cannot be written, as the owners of a watcher report them.
type obstacles map[string]string

// readObstacles costs a read of the documents of the watchers.
func readObstacles(ctx context.Context, op Operator) (obstacles, error) {
	status, err := ReadStatus(ctx, op.State)
	reasons := obstacles{}
	for i := range status.Slots {
		for _, topic := range status.Slots[i].Unwritable {
			if status.Slots[i].Name == op.Watcher {
				reasons[topic.Topic] = topic.Reason
			}
		}
	}
	return reasons, err
}

// explain returns in words why an envelope waits.
func (o obstacles) explain(envelope *WaitingEnvelope) string {
	for _, topic := range envelope.Topics {
		if why := o[topic]; why != "" && envelope.Reason == string(waiting.Parked) {
			return why
		}
	}

	switch waiting.Reason(envelope.Reason) {
	case waiting.Parked:
		return "the topic could not be written; the event is sent soon, or waits for an owner"
	case waiting.Blocked:
		return "an earlier event of the key waits"
	case waiting.Queued:
		return "it is sent next"
	case waiting.Retry:
		if envelope.Error != nil {
			return envelope.Error.Reason
		}
	}
	return ""
}

// heavyFields returns the names of fields in the documents of an envelope, which a list leaves out.
func heavyFields(mapping *envelope.Mapping, fields ...string) (names []string) {
	for _, e := range mapping.Without(fields...) {
		names = append(names, e.Key)
	}
	return names
}

func (o Operator) newWaitingEnvelope(i *waiting.Document) WaitingEnvelope {
	typ, _ := o.Mapping.ToContract(i.Envelope).Lookup("type").StringValueOK()
	envelope := WaitingEnvelope{
		Row:        nameRow(i.NS, digest(i.DocumentID)),
		Collection: i.NS,
		ID:         letters.IDText(i.ID),
		Delivery:   i.Delivery,
		Type:       truncateText(typ),
		Key:        truncateText(i.Key),
		Reason:     string(i.Reason),
		Topics:     nonNil(i.Pending),
		Origin:     i.Origin,
		Attempts:   i.Attempts,
		NextAt:     i.NextTime(),
	}
	if attempt := i.Error; attempt != nil {
		envelope.Error = &WaitingError{Class: string(attempt.Class), Reason: attempt.Reason, Topic: attempt.Topic, At: attempt.At.UTC(), Node: attempt.Node}
	}

	return envelope
}

// FailedOutcome counts the effects of an action on failed envelopes, or with a dry run the expected
// effects.
type FailedOutcome struct {
	DryRun bool  `json:"dry_run"`
	Failed int64 `json:"failed"` // failed envelopes that match
	Done   int64 `json:"done"`

	NotFound []string `json:"not_found,omitempty"` // those ids of the filter that no failed envelope has
}

// Attempts is the fate of the failed attempts of an envelope at a retry.
type Attempts bool

// The attempts count as before, or are cleared.
const (
	KeepAttempts  Attempts = false
	ResetAttempts Attempts = true
)

// Retry makes the failed envelopes that match due now. If it resets their failed attempts, they are tried as often as new
// envelopes. It does not change envelopes that wait for another reason, or that were sent in the meantime.
func (w Waiting) Retry(ctx context.Context, filter WaitingFilter, attempts Attempts, effect Effect) (FailedOutcome, error) {
	out := FailedOutcome{DryRun: bool(effect)}
	if err := CheckSelection(filter, filter.All); err != nil {
		return out, err
	}
	filter.Failed = true
	query, err := w.toQuery(ctx, filter)
	if err != nil {
		return out, err
	}
	if query.Reason != "" && query.Reason != waiting.Retry {
		return out, invalidRequest("envelopes with the reason %s have not failed; they are sent when the obstacle is gone", filter.Reason)
	}

	out.NotFound, err = findMissing(filter.IDs, func(after string) (Page[WaitingEnvelope], error) {
		return w.List(ctx, filter, MaxPage, after)
	}, func(envelope *WaitingEnvelope) []string { return []string{envelope.Row, envelope.ID} })
	if err != nil {
		return out, err
	}
	if out.Failed, err = waiting.CountMatching(ctx, w.op.waiting(), query); err != nil || effect == DryRun || out.Failed == 0 {
		return out, err
	}
	// A statement that fails may have changed some.
	if out.Done, err = waiting.RetryFailed(ctx, w.op.waiting(), query, bool(attempts)); err == nil && out.Done == 0 {
		return out, nil
	}

	kind := failedRetried
	if attempts == ResetAttempts {
		kind = failedReset
	}
	fields := append(auditFields(filter), bson.E{Key: "count", Value: out.Done})
	return out, w.op.logOutcome(ctx, kind, fields, err)
}
