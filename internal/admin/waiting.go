package admin

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/store"
)

// MaxWaiting is how many envelopes a list of waiting ones has at most.
const MaxWaiting = 10_000

// WaitingGroup is how many envelopes of a collection wait in one state for one topic, or lie in the dead letters.
type WaitingGroup struct {
	Collection string `json:"collection"`
	// State is retry, blocked, parked, scheduled or dead; of the latter those that were not requeued.
	State string `json:"state"`
	Topic string `json:"topic,omitempty"` // that it waits for, which counts it; "" where the envelope does not say
	Count int64  `json:"count"`
	// Oldest is when the oldest one was committed, to the second; of scheduled ones, when the first is due.
	Oldest *time.Time `json:"oldest,omitempty"`
}

// WaitingSummary counts what is not delivered and not just passing through, over the watcher's collections or the one that
// is named. It reads every exception, and an index entry for each scheduled envelope.
func (o Operator) WaitingSummary(ctx context.Context, collection string) ([]WaitingGroup, error) {
	out := []WaitingGroup{}
	namespaces, err := o.Collections(ctx, collection)
	if err != nil {
		return out, err
	}
	for _, ns := range namespaces {
		coll, err := store.Outboxed(o.State.Client(), ns)
		if err != nil {
			return out, err
		}
		counts, err := store.CountExceptions(ctx, coll, slot.Part{})
		if err != nil {
			return out, err
		}
		for _, c := range counts {
			g := WaitingGroup{Collection: ns, State: c.State, Topic: c.Topic, Count: c.N}
			if !c.Oldest.IsZero() {
				g.Oldest = &c.Oldest
			}
			out = append(out, g)
		}
		dead, err := deadletter.Count(ctx, o.State.Client(), []string{ns}, deadletter.Query{Stand: deadletter.Replayable})
		if err != nil {
			return out, err
		}
		if dead > 0 {
			out = append(out, WaitingGroup{Collection: ns, State: "dead", Count: dead})
		}
	}
	return out, nil
}

// WaitingFilter says which envelopes. What is set must hold all together.
type WaitingFilter struct {
	Collection string // an outbox as database.collection; "" is all of the watcher's
	State      string // retry, blocked or parked; "" is any of them
	Topic      string // that it waits for
	Key        string // the ordering key
}

// WaitingEnvelope is an envelope whose fate is written on it, because it could not be sent in its turn.
type WaitingEnvelope struct {
	Collection string     `json:"collection"`
	ID         string     `json:"id"`
	Delivery   int32      `json:"delivery"`
	Type       string     `json:"type"`
	Key        string     `json:"key"` // the ordering key
	State      string     `json:"state"`
	Topics     []string   `json:"topics"` // that it waits for; empty is all that it routes to
	Origin     string     `json:"origin"` // stream, scheduled, requeue or replay
	Attempts   int32      `json:"attempts"`
	NextAt     *time.Time `json:"next_at,omitempty"`
	Reason     string     `json:"reason,omitempty"` // of the last attempt that failed

	raw bson.Raw // while a page is made
}

var errEnough = errors.New("enough")

// WaitingList are up to limit envelopes that wait, collection by collection, by key, and within a key in the order in which
// they will be sent. It holds them in memory, without their payloads. limit is at most [MaxWaiting].
func (o Operator) WaitingList(ctx context.Context, f WaitingFilter, limit int) ([]WaitingEnvelope, error) {
	out := []WaitingEnvelope{}
	switch f.State {
	case "", "retry", "blocked", "parked":
	default:
		return out, fmt.Errorf("state %q is none of retry, blocked, parked; outrelay scheduled and outrelay dead list the others", f.State)
	}
	if limit < 1 || limit > MaxWaiting {
		return out, fmt.Errorf("a list has from 1 to %d envelopes", MaxWaiting)
	}
	namespaces, err := o.Collections(ctx, f.Collection)
	if err != nil {
		return out, err
	}
	for _, ns := range namespaces {
		coll, err := store.Outboxed(o.State.Client(), ns)
		if err != nil {
			return out, err
		}
		scan := store.ExceptionScan{Coll: coll}
		if f.Key != "" {
			scan.Keys = keyValues(f.Key)
		}
		if f.Topic != "" {
			scan.Only = []string{f.Topic}
		}
		for more := true; more && err == nil; {
			more, err = scan.Page(ctx, 500, func(raw bson.Raw) error {
				if e := waitingEnvelope(ns, raw); f.State == "" || f.State == e.State {
					out = append(out, e)
				}
				if len(out) == limit {
					return errEnough
				}
				return nil
			})
		}
		if errors.Is(err, errEnough) {
			return out, nil
		}
		if err != nil {
			return out, err
		}
	}
	return out, nil
}

func waitingEnvelope(ns string, raw bson.Raw) WaitingEnvelope {
	text := func(path ...string) string {
		s, _ := raw.Lookup(path...).StringValueOK()
		return clip(s)
	}
	number := func(name string) int32 {
		n, _ := raw.Lookup(name).AsInt64OK()
		return int32(n)
	}
	e := WaitingEnvelope{
		Collection: ns, ID: idText(raw.Lookup("_id")), Delivery: number("delivery"), Type: text("type"), Key: clip(idText(raw.Lookup("key"))), State: text("state"),
		Topics: []string{}, Origin: text("origin"), Attempts: number("attempts"), Reason: text("lastError", "reason"),
	}
	if at, ok := raw.Lookup("nextAt").TimeOK(); ok {
		e.NextAt = &at
	}
	if list, ok := raw.Lookup("pending").ArrayOK(); ok {
		values, _ := list.Values() // of a whole document
		for _, v := range values {
			if s, ok := v.StringValueOK(); ok {
				e.Topics = append(e.Topics, s)
			}
		}
	}
	return e
}

// keyValues are the values in which a key of that text may be stored.
func keyValues(text string) []bson.RawValue {
	values, _ := idValues(text) // it is not empty
	if n, err := strconv.ParseInt(text, 10, 64); err == nil && strconv.FormatInt(n, 10) == text {
		_, data, _ := bson.MarshalValue(n)
		values = append(values, bson.RawValue{Type: bson.TypeInt64, Value: data}) // equal to an int32 of that value
	}
	return values
}
