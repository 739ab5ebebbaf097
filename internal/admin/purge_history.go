package admin

import (
	"context"
	"fmt"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
)

// HistoryQuery asks what became of envelopes. Either IDs or a window of time, which a key narrows.
type HistoryQuery struct {
	Collections []string // as database.collection; empty is all that the watcher is registered for
	IDs         []string // canonical texts
	Key         string   // canonical text of an ordering key
	From, To    time.Time
	Limit       int    // of one page; 100 if it is 0 or less
	After       string // History.Next of the page before
}

// Delivered is an envelope and where its records stand. Times are the server's.
type Delivered struct {
	Collection    string           `json:"collection"`
	ID            string           `json:"id"`
	AggregateType string           `json:"aggregatetype"`
	Key           string           `json:"key"`
	Type          string           `json:"type"`
	Written       *time.Time       `json:"written,omitempty"` // by its stamp; nil if it has none
	SentAt        *time.Time       `json:"sent_at,omitempty"` // nil: not marked
	Sent          []store.Position `json:"sent"`
	State         string           `json:"state"` // sent, scheduled, retry, blocked, parked, or not_marked
	Delivery      int32            `json:"delivery"`
}

// History is one page.
type History struct {
	Envelopes []Delivered `json:"envelopes"`
	Next      string      `json:"next,omitempty"` // pass it on as After for the next page; "" after the last
}

// History reads what recording mark has written on the envelopes that are still in the outbox, collection by collection,
// in the order in which they were written. Asked for by id, it tells of every one that is there.
func (o Operator) History(ctx context.Context, q HistoryQuery) (History, error) {
	outboxes, err := o.claimed(ctx, q.Collections)
	if err != nil {
		return History{}, err
	}
	ask := store.HistoryQuery{Key: q.Key, From: q.From, To: q.To, Limit: q.Limit}
	for _, text := range q.IDs {
		ask.IDs = append(ask.IDs, event.ParseID(text))
		if literal := event.NewID(text); literal != event.ParseID(text) {
			ask.IDs = append(ask.IDs, literal) // a string that looks like another type
		}
	}
	if ask.Limit <= 0 {
		ask.Limit = 100
	}
	// The place is that of one collection; those before it are done.
	skipTo, after, _ := strings.Cut(q.After, " ")
	page := History{Envelopes: []Delivered{}}
	found := q.After == ""
	for _, b := range outboxes {
		if !found && b.NS() != skipTo {
			continue
		}
		found = true
		ask.After, after = after, ""
		coll := o.State.Client().Database(b.DB).Collection(b.Coll)
		got, err := store.SentHistory(ctx, coll, ask)
		if err != nil {
			return page, err
		}
		for _, h := range got.Envelopes {
			page.Envelopes = append(page.Envelopes, delivered(h))
		}
		if got.Next != "" {
			page.Next = b.NS() + " " + got.Next
			return page, nil
		}
		if ask.Limit -= len(got.Envelopes); ask.Limit <= 0 {
			break
		}
	}
	if !found {
		return page, fmt.Errorf("%w: %s is not a collection that is asked for", store.ErrBadCursor, skipTo)
	}
	return page, nil
}

func delivered(h store.History) Delivered {
	d := Delivered{
		Collection: h.NS, ID: canonical(h.ID), AggregateType: h.AggregateType, Key: canonical(h.Key), Type: h.Type,
		SentAt: h.SentAt, Sent: h.Sent, State: h.State, Delivery: h.Delivery,
	}
	if d.Key == "" {
		d.Key = canonical(h.AggregateID)
	}
	if d.Sent == nil {
		d.Sent = []store.Position{}
	}
	if h.TS.T > 0 {
		at := time.Unix(int64(h.TS.T), 0).UTC()
		d.Written = &at
	}
	switch {
	case d.State != "":
	case h.DueAt != nil:
		d.State = "scheduled"
	case h.SentAt != nil:
		d.State = "sent"
	default:
		d.State = "not_marked"
	}
	return d
}

// canonical is the canonical text of an id or a key.
func canonical(v bson.RawValue) string {
	var id event.ID
	if s, ok := v.StringValueOK(); ok {
		return s
	}
	if n, ok := v.AsInt64OK(); ok {
		return fmt.Sprint(n)
	}
	if v.IsZero() || v.Type == bson.TypeNull || v.Unmarshal(&id) != nil {
		return ""
	}
	return id.String()
}
