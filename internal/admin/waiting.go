package admin

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/outrelay/outrelay/internal/outboxes"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/waiting"
)

// MaxWaiting bounds the result of [Waiting.List].
const MaxWaiting = 10_000

// Waiting is the set of the waiting envelopes of a watcher.
type Waiting struct{ op Operator }

// WaitingGroup counts the envelopes of a collection that wait in one state for one topic, or are
// dead letters.
type WaitingGroup struct {
	Collection string `json:"collection"`
	// State is retry, blocked, parked, scheduled or dead. Dead letters that are requeued are not
	// counted.
	State string `json:"state"`
	Topic string `json:"topic,omitempty"` // the topic that they wait for; "" if the envelopes do not name it
	Count int64  `json:"count"`
	// Oldest is when the oldest envelope was committed, to the second. For scheduled envelopes it
	// is the earliest due time.
	Oldest *time.Time `json:"oldest,omitempty"`
}

// Summary counts the waiting envelopes and dead letters of all collections of the watcher,
// or of the named one. It reads every exception, and one index entry per scheduled envelope.
func (w Waiting) Summary(ctx context.Context, collection string) ([]WaitingGroup, error) {
	groups := []WaitingGroup{}
	namespaces, err := w.op.Collections(ctx, collection)
	if err != nil {
		return groups, err
	}

	for _, ns := range namespaces {
		coll := outboxes.CollectionOf(w.op.State.Client(), ns)
		counts, err := waiting.CountExceptions(ctx, coll, slot.Range{})
		if err != nil {
			return groups, err
		}
		for _, c := range counts {
			g := WaitingGroup{Collection: ns, State: c.State, Topic: c.Topic, Count: c.N}
			if !c.Oldest.IsZero() {
				g.Oldest = &c.Oldest
			}
			groups = append(groups, g)
		}

		notRequeued := deadletter.Query{RequeueStatus: deadletter.Replayable}
		dead, err := deadletter.Count(ctx, w.op.State.Client(), []string{ns}, notRequeued)
		if err != nil {
			return groups, err
		}
		if dead > 0 {
			groups = append(groups, WaitingGroup{Collection: ns, State: "dead", Count: dead})
		}
	}
	return groups, nil
}

// WaitingFilter selects waiting envelopes. An envelope matches if it fulfills all conditions that
// are set.
type WaitingFilter struct {
	Collection string `query:"collection" maxLength:"255" doc:"Only this outbox, as database.collection."`
	State      string `query:"state" enum:"retry,blocked,parked"`
	Topic      string `query:"topic" maxLength:"255" doc:"A topic that it waits for."`
	Key        string `query:"key" maxLength:"4096" doc:"The ordering key."`
}

// WaitingEnvelope is an envelope that could not be sent in the order of the stream, so that its
// state is stored on it.
type WaitingEnvelope struct {
	Collection string     `json:"collection"`
	ID         string     `json:"id"`
	Delivery   int32      `json:"delivery"`
	Type       string     `json:"type"`
	Key        string     `json:"key"` // the ordering key
	State      string     `json:"state"`
	Topics     []string   `json:"topics"` // topics that it waits for; empty means all that it routes to
	Origin     string     `json:"origin"` // stream, scheduled, requeue or replay
	Attempts   int32      `json:"attempts"`
	NextAt     *time.Time `json:"next_at,omitempty"`
	Reason     string     `json:"reason,omitempty"` // of the last failed attempt
}

// List returns up to limit waiting envelopes without payloads, sorted by collection and key.
// Within a key, they have the order in which they will be sent. limit is at most [MaxWaiting].
func (w Waiting) List(ctx context.Context, f WaitingFilter, limit int) ([]WaitingEnvelope, error) {
	list := []WaitingEnvelope{}
	if limit < 1 || limit > MaxWaiting {
		return list, fmt.Errorf("limit %d is not between 1 and %d", limit, MaxWaiting)
	}
	if _, err := w.op.Collections(ctx, f.Collection); err != nil {
		return list, err
	}

	for after := ""; ; {
		page, err := w.Page(ctx, f, limit-len(list), after)
		list = append(list, page.Envelopes...)
		after = page.Next
		if err != nil || after == "" || len(list) == limit {
			return list, err
		}
	}
}

func newWaitingEnvelope(ns string, raw bson.Raw) WaitingEnvelope {
	text := func(path ...string) string {
		s, _ := raw.Lookup(path...).StringValueOK()
		return truncateText(s)
	}
	number := func(name string) int32 {
		n, _ := raw.Lookup(name).AsInt64OK()
		return int32(n)
	}

	e := WaitingEnvelope{
		Collection: ns,
		ID:         deadletter.IDText(raw.Lookup("_id")),
		Delivery:   number("delivery"),
		Type:       text("type"),
		Key:        truncateText(envelope.CanonicalText(raw.Lookup("key"))),
		State:      text("state"),
		Topics:     []string{},
		Origin:     text("origin"),
		Attempts:   number("attempts"),
		Reason:     text("lastError", "reason"),
	}
	if at, ok := raw.Lookup("nextAt").TimeOK(); ok {
		e.NextAt = &at
	}

	// The document comes whole from the server, so reading the array cannot fail.
	if list, ok := raw.Lookup("pending").ArrayOK(); ok {
		values, _ := list.Values()
		for _, v := range values {
			if s, ok := v.StringValueOK(); ok {
				e.Topics = append(e.Topics, s)
			}
		}
	}
	return e
}

// parseKeyValues returns the BSON values as which a key with this text may be stored. text must not
// be empty.
func parseKeyValues(text string) []bson.RawValue {
	// An error leaves out only what is not a value.
	values, _ := parseIDValues(text)

	// MongoDB compares numbers of different types by value, so an int64 also matches an int32.
	if n, err := strconv.ParseInt(text, 10, 64); err == nil && strconv.FormatInt(n, 10) == text {
		_, data, _ := bson.MarshalValue(n)
		values = append(values, bson.RawValue{Type: bson.TypeInt64, Value: data})
	}
	return values
}
