package admin

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/purge"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// HistoryQuery selects envelopes whose delivery is recorded. Either IDs or a time range must be
// set. A key narrows the time range.
type HistoryQuery struct {
	Collections []string  `query:"collection" maxItems:"100" doc:"Only these outboxes, as database.collection."`
	IDs         []string  `query:"id" maxItems:"1000"`
	Key         string    `query:"key" maxLength:"4096" doc:"The ordering key."`
	From        time.Time `query:"from"`
	To          time.Time `query:"to"`
	Limit       int       `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"Maximum number of entries of the page."`
	After       string    `query:"after" maxLength:"8192" doc:"The cursor in next of the previous page. Default: the first page."`
}

// Delivered is an envelope and the places of its records. Times are server times.
type Delivered struct {
	Collection    string           `json:"collection"`
	ID            string           `json:"id"`
	AggregateType string           `json:"aggregate_type"`
	Key           string           `json:"key"`
	Type          string           `json:"type"`
	Written       *time.Time       `json:"written,omitempty"` // by its timestamp; nil if it has none
	SentAt        *time.Time       `json:"sent_at,omitempty"` // nil if the delivery is not recorded
	Sent          []outboxes.Place `json:"sent"`
	State         string           `json:"state"` // sent, scheduled, waiting, or not_marked
}

// History is one page. It has no total: a count would read the whole window.
type History struct {
	Items []Delivered `json:"items"`
	Next  string      `json:"next,omitempty"` // After of the next page, or "" on the last page
}

// History returns the deliveries that recording mark has written on envelopes. It covers the
// envelopes that are still in the outbox, collection by collection, in the order in which they were
// written. A query by id returns every existing envelope.
func (o Operator) History(ctx context.Context, historyQuery HistoryQuery) (History, error) {
	list, err := o.registeredOutboxes(ctx, historyQuery.Collections)
	if err != nil {
		return History{}, err
	}
	names := make([]string, len(list))
	for i, b := range list {
		names[i] = b.NS()
	}
	query := purge.HistoryQuery{Key: historyQuery.Key, From: historyQuery.From, To: historyQuery.To, Mapping: o.Mapping}
	for _, text := range historyQuery.IDs {
		query.IDs = append(query.IDs, parseIDs(text)...)
	}

	lister := collectionLister[Delivered, string]{
		read: func(ns string, after *string, limit int) (found []Delivered, last *string, err error) {
			part := query
			part.Limit = limit
			if after != nil {
				part.After = *after
			}
			page, err := purge.SentHistory(ctx, outboxes.CollectionOf(o.State.Client(), ns), part)
			if err != nil {
				return nil, nil, err
			}
			waits, err := o.waitingAmong(ctx, ns, page.Envelopes)
			for _, h := range page.Envelopes {
				found = append(found, newDelivered(h, waits[mongodb.ValueKey(h.ID)]))
			}
			if page.Next != "" {
				last = &page.Next
			}
			return found, last, err
		},
	}
	if historyQuery.Limit <= 0 {
		historyQuery.Limit = DefaultPage
	}
	page, err := lister.readPage(names, historyQuery.Limit, historyQuery.After)
	return History{Items: page.Items, Next: page.Next}, err
}

// waitingAmong returns which envelopes of the list wait, by their ids.
func (o Operator) waitingAmong(ctx context.Context, ns string, list []purge.History) (map[string]bool, error) {
	var ids []bson.RawValue
	for _, h := range list {
		if h.SentAt == nil {
			ids = append(ids, h.ID)
		}
	}

	waits := map[string]bool{}
	if len(ids) == 0 {
		return waits, nil
	}
	err := waiting.EachStampOf(ctx, o.waiting(), o.Watcher, ns, ids, func(id bson.RawValue, _ bson.Timestamp) {
		waits[mongodb.ValueKey(id)] = true
	})
	return waits, err
}

func newDelivered(history purge.History, waits bool) Delivered {
	delivered := Delivered{
		Collection:    history.NS,
		ID:            letters.IDText(history.ID),
		AggregateType: history.AggregateType,
		Key:           envelope.CanonicalText(history.Key),
		Type:          history.Type,
		SentAt:        history.SentAt,
		Sent:          history.Sent,
	}
	if delivered.Key == "" {
		delivered.Key = envelope.CanonicalText(history.AggregateID)
	}
	if delivered.Sent == nil {
		delivered.Sent = []outboxes.Place{}
	}
	if history.TS.T > 0 {
		at := time.Unix(int64(history.TS.T), 0).UTC()
		delivered.Written = &at
	}

	switch {
	case waits:
		delivered.State = "waiting"
	case history.DueAt != nil:
		delivered.State = "scheduled"
	case history.SentAt != nil:
		delivered.State = "sent"
	default:
		delivered.State = "not_marked"
	}
	return delivered
}
