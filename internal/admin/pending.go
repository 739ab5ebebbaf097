package admin

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
)

// PendingTopic is what waits for one topic. An envelope that waits for several counts for each.
type PendingTopic struct {
	Topic       string     `json:"topic"` // "" where the envelopes do not say
	Retry       int64      `json:"retry"`
	Blocked     int64      `json:"blocked"`
	Parked      int64      `json:"parked"`
	Keys        int64      `json:"keys"`             // ordering keys that have any of these
	Oldest      *time.Time `json:"oldest,omitempty"` // when the oldest one was committed, to the second
	OldestAgeS  float64    `json:"oldest_age_s"`
	Collections []string   `json:"collections"`
	// Target is the topic as the owner sees it, if it cannot be written now.
	Target *Blocked `json:"target,omitempty"`
}

// Pending is what waits, by topic, the oldest first. It is counted as the figures of [Desk.Overview] are.
func (k Desk) Pending(ctx context.Context) ([]PendingTopic, error) {
	status, err := ReadStatus(ctx, k.State)
	if err != nil {
		return nil, err
	}
	f, err := k.d.figures.get(ctx, k)
	if err != nil {
		return nil, err
	}
	return withTargets(f.pending, status, k.Watcher), nil
}

// withTargets adds what the owners report: topics that cannot be written, also those for which nothing is stored yet.
func withTargets(list []PendingTopic, s Status, watcher string) []PendingTopic {
	out := append([]PendingTopic{}, list...)
	for i := range s.Watchers {
		w := &s.Watchers[i]
		if w.Name != watcher {
			continue
		}
		for j := range w.Blocked {
			b := w.Blocked[j]
			out = withTarget(out, b)
		}
	}
	return out
}

func withTarget(list []PendingTopic, b Blocked) []PendingTopic {
	for i := range list {
		if list[i].Topic != b.Topic {
			continue
		}
		if t := list[i].Target; t == nil || b.Since.Before(t.Since) {
			list[i].Target = &b
		}
		return list
	}
	return append(list, PendingTopic{Topic: b.Topic, Collections: []string{}, Target: &b})
}

// WaitingPage is a page of envelopes that wait.
type WaitingPage struct {
	Envelopes []WaitingEnvelope `json:"envelopes"`
	Total     int64             `json:"total"` // on all pages
	Next      string            `json:"next,omitempty"`
}

// waitingPlace is where a page ended: every envelope of the collections before NS, and of NS those up to this one.
type waitingPlace struct {
	NS    string        `bson:"n"`
	State bson.RawValue `bson:"s"`
	Key   bson.RawValue `bson:"k"`
	Pos   bson.RawValue `bson:"p"`
	ID    bson.RawValue `bson:"i"`
}

// WaitingPage reads a page: collection by collection, by state, by key, and within a key in the order in which they will be
// sent. A page costs as much as there are exceptions behind it; none has a payload.
func (k Desk) WaitingPage(ctx context.Context, f WaitingFilter, limit int, after string) (WaitingPage, error) {
	page := WaitingPage{Envelopes: []WaitingEnvelope{}}
	switch f.State {
	case "", event.StateRetry, event.StateBlocked, event.StateParked:
	default:
		return page, invalid("state %q is none of retry, blocked, parked", f.State)
	}
	var place waitingPlace
	if after != "" {
		if err := parseCursor(after, &place); err != nil {
			return page, err
		}
	}
	names, err := k.sorted(ctx, f.Collection)
	if err != nil {
		return page, err
	}
	limit = pageSize(limit)
	for _, ns := range names {
		room := limit - len(page.Envelopes)
		if ns < place.NS {
			room = 0 // shown before; counted only
		}
		if err := k.waitingOf(ctx, ns, f, place, room, &page); err != nil {
			return page, err
		}
		if len(page.Envelopes) == limit && page.Next == "" && room > 0 {
			if page.Next, err = cursorText(k.lastPlace(ns, &page)); err != nil {
				return page, err
			}
		}
	}
	for i := range page.Envelopes {
		page.Envelopes[i].raw = nil
	}
	return page, nil
}

// lastPlace is that of the last envelope of the page.
func (k Desk) lastPlace(ns string, page *WaitingPage) waitingPlace {
	raw := page.Envelopes[len(page.Envelopes)-1].raw
	return waitingPlace{NS: ns, State: raw.Lookup("state"), Key: orNullValue(raw.Lookup("key")), Pos: orNullValue(raw.Lookup("pos")), ID: raw.Lookup("_id")}
}

func orNullValue(v bson.RawValue) bson.RawValue {
	if v.Type == 0 {
		return bson.RawValue{Type: bson.TypeNull}
	}
	return v
}

func (k Desk) waitingOf(ctx context.Context, ns string, f WaitingFilter, place waitingPlace, room int, page *WaitingPage) error {
	outbox, err := store.Outboxed(k.State.Client(), ns)
	if err != nil {
		return err
	}
	coll := store.Majority(outbox)
	query := f.query()
	n, err := coll.CountDocuments(ctx, query)
	if err != nil {
		return wrapped("counting what waits in "+ns, err)
	}
	if page.Total += n; n == 0 || room == 0 {
		return nil
	}
	if ns == place.NS {
		query = append(query, bson.E{Key: "$expr", Value: bson.D{{Key: "$gt", Value: bson.A{
			bson.D{{Key: "s", Value: "$state"}, {Key: "k", Value: orNullField("$key")}, {Key: "p", Value: orNullField("$pos")}, {Key: "i", Value: "$_id"}},
			bson.D{{Key: "$literal", Value: bson.D{{Key: "s", Value: place.State}, {Key: "k", Value: place.Key}, {Key: "p", Value: place.Pos}, {Key: "i", Value: place.ID}}}},
		}}}})
	}
	cur, err := coll.Find(ctx, query, options.Find().SetAllowDiskUse(true).SetLimit(int64(room)).
		SetSort(bson.D{{Key: "state", Value: 1}, {Key: "key", Value: 1}, {Key: "pos", Value: 1}, {Key: "_id", Value: 1}}).
		SetProjection(bson.D{{Key: "payload", Value: 0}, {Key: "headers", Value: 0}, {Key: "history", Value: 0}}))
	if err != nil {
		return wrapped("reading what waits in "+ns, err)
	}
	var docs []bson.Raw
	if err := cur.All(ctx, &docs); err != nil {
		return wrapped("reading what waits in "+ns, err)
	}
	for _, raw := range docs {
		e := waitingEnvelope(ns, raw)
		e.raw = raw
		page.Envelopes = append(page.Envelopes, e)
	}
	return nil
}

func orNullField(field string) bson.D {
	return bson.D{{Key: "$ifNull", Value: bson.A{field, nil}}}
}

func (f WaitingFilter) query() bson.D {
	states := bson.A{event.StateRetry, event.StateBlocked, event.StateParked}
	if f.State != "" {
		states = bson.A{f.State}
	}
	q := bson.D{{Key: "state", Value: bson.D{{Key: "$in", Value: states}}}}
	if f.Key != "" {
		q = append(q, bson.E{Key: "key", Value: bson.D{{Key: "$in", Value: keyValues(f.Key)}}})
	}
	if f.Topic != "" {
		q = append(q, bson.E{Key: "$or", Value: bson.A{bson.D{{Key: "pending", Value: nil}}, bson.D{{Key: "pending", Value: f.Topic}}}})
	}
	return q
}

// sorted are the watcher's collections, or the one that is named, each once and by name.
func (k Desk) sorted(ctx context.Context, only string) ([]string, error) {
	if only != "" {
		return k.Collections(ctx, only)
	}
	claims, err := store.NewRegistry(k.State.Collection("collections")).Claims(ctx, k.Watcher)
	if err != nil {
		return nil, err
	}
	return namesOf(claims), nil
}

// InvalidError is a request that cannot be meant so.
type InvalidError struct{ Reason string }

func (e *InvalidError) Error() string { return e.Reason }

func invalid(format string, args ...any) error {
	return &InvalidError{fmt.Sprintf(format, args...)}
}
