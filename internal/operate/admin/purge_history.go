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
	AggregateType string           `json:"aggregatetype"`
	Key           string           `json:"key"`
	Type          string           `json:"type"`
	Written       *time.Time       `json:"written,omitempty"` // by its timestamp; nil if it has none
	SentAt        *time.Time       `json:"sent_at,omitempty"` // nil if the delivery is not recorded
	Sent          []outboxes.Place `json:"sent"`
	State         string           `json:"state"` // sent, scheduled, waiting, or not_marked
}

// History is one page.
type History struct {
	Envelopes []Delivered `json:"envelopes"`
	Next      string      `json:"next,omitempty"` // After of the next page, or "" on the last page
}

// History returns the deliveries that recording mark has written on envelopes. It covers the
// envelopes that are still in the outbox, collection by collection, in the order in which they were
// written. A query by id returns every existing envelope.
func (o Operator) History(ctx context.Context, q HistoryQuery) (History, error) {
	list, err := o.registeredOutboxes(ctx, q.Collections)
	if err != nil {
		return History{}, err
	}
	names := make([]string, len(list))
	for i, b := range list {
		names[i] = b.NS()
	}
	query := purge.HistoryQuery{Key: q.Key, From: q.From, To: q.To, Mapping: o.Mapping}
	for _, text := range q.IDs {
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
	if q.Limit <= 0 {
		q.Limit = DefaultPage
	}
	var page History
	page.Envelopes, _, page.Next, err = lister.readPage(names, q.Limit, q.After)
	return page, err
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

func newDelivered(h purge.History, waits bool) Delivered {
	d := Delivered{
		Collection:    h.NS,
		ID:            letters.IDText(h.ID),
		AggregateType: h.AggregateType,
		Key:           envelope.CanonicalText(h.Key),
		Type:          h.Type,
		SentAt:        h.SentAt,
		Sent:          h.Sent,
	}
	if d.Key == "" {
		d.Key = envelope.CanonicalText(h.AggregateID)
	}
	if d.Sent == nil {
		d.Sent = []outboxes.Place{}
	}
	if h.TS.T > 0 {
		at := time.Unix(int64(h.TS.T), 0).UTC()
		d.Written = &at
	}

	switch {
	case waits:
		d.State = "waiting"
	case h.DueAt != nil:
		d.State = "scheduled"
	case h.SentAt != nil:
		d.State = "sent"
	default:
		d.State = "not_marked"
	}
	return d
}
