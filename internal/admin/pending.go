package admin

import (
	"context"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// PendingTopic counts the envelopes that wait for one topic. An envelope that waits for several
// topics counts for each.
type PendingTopic struct {
	Topic       string     `json:"topic"` // "" if the envelopes do not name it
	Retry       int64      `json:"retry"`
	Blocked     int64      `json:"blocked"`
	Parked      int64      `json:"parked"`
	Keys        int64      `json:"keys"`             // ordering keys with any of these
	Oldest      *time.Time `json:"oldest,omitempty"` // when the oldest envelope was committed, to the second
	OldestAgeS  float64    `json:"oldest_age_s"`
	Collections []string   `json:"collections"`
	// Target is the owner's report about the topic, if it cannot be written now.
	Target *Blocked `json:"target,omitempty"`
}

// Topics returns the waiting envelopes by topic. The topic with the oldest envelope comes first.
// The counts are figures like those of [Operator.Overview].
func (w Waiting) Topics(ctx context.Context) ([]PendingTopic, error) {
	status, err := ReadStatus(ctx, w.op.State)
	if err != nil {
		return nil, err
	}
	f, err := w.op.currentFigures(ctx)
	if err != nil {
		return nil, err
	}
	return addTargets(f.pending, status, w.op.Watcher), nil
}

// addTargets returns a copy of list with the owners' reports about topics that cannot be written.
// It adds topics for which no waiting envelope is stored yet.
func addTargets(list []PendingTopic, s Status, watcher string) []PendingTopic {
	topics := append([]PendingTopic{}, list...)
	for i := range s.Watchers {
		w := &s.Watchers[i]
		if w.Name != watcher {
			continue
		}
		for _, b := range w.Blocked {
			topics = addTarget(topics, b)
		}
	}
	return topics
}

// addTarget adds one report. If several slots report the same topic, it keeps the earliest report.
func addTarget(list []PendingTopic, b Blocked) []PendingTopic {
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

// WaitingPage is a page of waiting envelopes.
type WaitingPage struct {
	Envelopes []WaitingEnvelope `json:"envelopes"`
	Total     int64             `json:"total"` // on all pages
	Next      string            `json:"next,omitempty"`
}

// waitingPlace is the place of an envelope in the list of a collection.
type waitingPlace struct {
	Key bson.RawValue `bson:"k"`
	Pos bson.RawValue `bson:"p"`
	ID  bson.RawValue `bson:"i"`
}

// Page returns a page of waiting envelopes without payloads, sorted by collection and key. Within a
// key, they have the order in which they will be sent. The cost of a page grows with
// the number of exceptions.
func (w Waiting) Page(ctx context.Context, f WaitingFilter, limit int, after string) (WaitingPage, error) {
	page := WaitingPage{Envelopes: []WaitingEnvelope{}}
	switch f.State {
	case "", envelope.StateRetry, envelope.StateBlocked, envelope.StateParked:
	default:
		return page, invalidRequest("state %q is none of retry, blocked, parked; "+
			"outrelay scheduled and outrelay dead list the others", f.State)
	}
	names, err := w.op.lookupCollections(ctx, f.Collection)
	if err != nil {
		return page, err
	}

	lister := collectionLister[WaitingEnvelope, waitingPlace]{
		count: func(ns string) (int64, error) {
			n, err := w.collection(ns).CountDocuments(ctx, f.mongoFilter())
			return n, wrapError("counting waiting envelopes in "+ns, err)
		},
		read: func(ns string, after *waitingPlace, limit int) ([]WaitingEnvelope, *waitingPlace, error) {
			return w.readWaiting(ctx, ns, f, after, limit)
		},
	}
	page.Envelopes, page.Total, page.Next, err = lister.readPage(names, pageSize(limit), after)
	return page, err
}

func (w Waiting) collection(ns string) *mongo.Collection {
	return mongodb.Majority(outboxes.CollectionOf(w.op.State.Client(), ns))
}

// readWaiting returns up to limit envelopes of a collection after a place, and the place of the last one if more may follow.
func (w Waiting) readWaiting(
	ctx context.Context, ns string, f WaitingFilter, after *waitingPlace, limit int,
) (list []WaitingEnvelope, last *waitingPlace, err error) {
	filter := f.mongoFilter()
	// The comparison must use the order of the sort below, in which a missing field counts as null.
	if after != nil {
		place := bson.D{
			{Key: "k", Value: fieldOrNull("$key")},
			{Key: "p", Value: fieldOrNull("$pos")},
			{Key: "i", Value: "$_id"},
		}
		isAfter := bson.D{{Key: "$gt", Value: bson.A{place, mongodb.Literal(after)}}}
		filter = append(filter, bson.E{Key: "$expr", Value: isAfter})
	}

	docs, err := mongodb.FindAll[bson.Raw](ctx, w.collection(ns), "reading waiting envelopes in "+ns, filter, options.Find().
		SetAllowDiskUse(true).
		SetLimit(int64(limit)).
		SetSort(bson.D{{Key: "key", Value: 1}, {Key: "pos", Value: 1}, {Key: "_id", Value: 1}}).
		SetProjection(append(w.op.Mapping.Without("payload", "headers"), bson.E{Key: "history", Value: 0})))
	if err != nil {
		return nil, nil, err
	}

	for _, raw := range docs {
		list = append(list, newWaitingEnvelope(ns, w.op.Mapping.ToContract(raw)))
	}
	if n := len(docs); n == limit {
		raw := docs[n-1]
		last = &waitingPlace{Key: nullIfMissing(raw.Lookup("key")), Pos: nullIfMissing(raw.Lookup("pos")), ID: raw.Lookup("_id")}
	}
	return list, last, nil
}

func nullIfMissing(v bson.RawValue) bson.RawValue {
	if v.Type == 0 {
		return bson.RawValue{Type: bson.TypeNull}
	}
	return v
}

func fieldOrNull(field string) bson.D {
	return bson.D{{Key: "$ifNull", Value: bson.A{field, nil}}}
}

func (f WaitingFilter) mongoFilter() bson.D {
	states := bson.A{envelope.StateRetry, envelope.StateBlocked, envelope.StateParked}
	if f.State != "" {
		states = bson.A{f.State}
	}
	filter := bson.D{{Key: "state", Value: bson.D{{Key: "$in", Value: states}}}}

	if f.Key != "" {
		filter = append(filter, bson.E{Key: "key", Value: bson.D{{Key: "$in", Value: parseKeyValues(f.Key)}}})
	}
	if f.Topic != "" {
		// Without the field, an envelope waits for all topics that it routes to.
		filter = append(filter, bson.E{Key: "$or", Value: bson.A{
			bson.D{{Key: "pending", Value: nil}},
			bson.D{{Key: "pending", Value: f.Topic}},
		}})
	}
	return filter
}

// InvalidError is returned for a request that is wrong.
type InvalidError struct{ Reason string }

func (e *InvalidError) Error() string { return e.Reason }

func invalidRequest(format string, args ...any) error {
	return &InvalidError{fmt.Sprintf(format, args...)}
}
