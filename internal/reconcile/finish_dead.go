package reconcile

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/store"
)

// deadAtOnce bounds how many dead envelopes are read and moved at a time: they are not kept while they are in flight.
const deadAtOnce = 100

// moveDead moves the dead ones of the batch. Their envelopes are read again: one that is gone, or that somebody changed
// into another delivery, is no letter.
func (f *Finisher) moveDead(ctx context.Context, batch []*decision) error {
	byNS := map[string][]*decision{}
	for _, a := range batch {
		if a.dead != nil && !a.moved {
			byNS[a.NS] = append(byNS[a.NS], a)
		}
	}
	for ns, dead := range byNS {
		for len(dead) > 0 {
			part := dead[:min(len(dead), deadAtOnce)]
			dead = dead[len(part):]
			if err := f.moveDeadPart(ctx, ns, part); err != nil {
				return err
			}
		}
	}
	return nil
}

// moveDeadPart moves a part of them. One that is not found is gone; one that got further attempts meanwhile waits for them.
func (f *Finisher) moveDeadPart(ctx context.Context, ns string, part []*decision) error {
	coll, err := store.Outboxed(f.config.Client, ns)
	if err != nil {
		return err
	}
	by := make(map[string]*decision, len(part))
	ids := make([]bson.RawValue, 0, len(part))
	for _, a := range part {
		by[idKey(a.ID)] = a
		ids = append(ids, a.ID)
	}
	var letters []deadletter.Letter
	var moving []*decision
	found, size := map[*decision]bool{}, 0
	move := func() error {
		if _, err := deadletter.Move(ctx, f.config.Fencer, letters); err != nil {
			return err
		}
		for _, a := range moving {
			a.moved = true
		}
		letters, moving, size = letters[:0], moving[:0], 0
		return nil
	}
	err = store.FetchMany(ctx, coll, ids, func(raw bson.Raw) error {
		a := by[idKey(raw.Lookup("_id"))]
		if a == nil || !store.SameDelivery(raw, a.Claim, a.Number) {
			return nil
		}
		found[a] = true
		if spent, _ := raw.Lookup("attempts").AsInt64OK(); a.dead.class == record.AttemptsExhausted && int32(spent) != a.Attempts {
			a.fate.End, a.fate.Left = Waiting, a.Pending // somebody has given it further attempts
			return nil
		}
		l, err := f.newLetter(a, raw)
		if err != nil {
			return err
		}
		letters, moving = append(letters, l), append(moving, a)
		if size += len(raw); size > deadletter.MaxBytes {
			return move()
		}
		return nil
	})
	if err == nil {
		err = move()
	}
	if err != nil {
		return fmt.Errorf("moving exceptions of %s to the dead letters: %w", ns, err)
	}
	for _, a := range part {
		if !found[a] {
			a.fate.End = Gone
		}
		if !a.moved {
			continue
		}
		f.config.Log.Warn("an envelope is dead", "collection", ns, "class", string(a.dead.class), "reason", a.dead.reason,
			"topic", a.dead.topic, "attempts", a.Attempts)
	}
	return nil
}

// newLetter is the envelope as it was before it became an exception, and all that was tried.
func (f *Finisher) newLetter(a *decision, raw bson.Raw) (deadletter.Letter, error) {
	var told struct {
		History  []deadletter.Attempt `bson:"history"`
		ReplayOf bson.RawValue        `bson:"replayOf"`
		Pos      bson.RawValue        `bson:"pos"`
	}
	_ = bson.Unmarshal(raw, &told) // what somebody wrote into these fields is no reason to keep the envelope
	plain, err := store.WithoutException(raw)
	if err != nil {
		return deadletter.Letter{}, fmt.Errorf("reading a dead envelope: %w", err)
	}
	l := deadletter.Letter{
		NS: a.NS, Raw: plain, Class: a.dead.class, Reason: a.dead.reason, Topic: a.dead.topic, Partition: a.dead.partition,
		Source: deadletter.Source{Kind: "relay", Watcher: f.config.Watcher, Node: f.config.Node, Epoch: f.config.Epoch, Version: f.config.Version},
	}
	l.Pos, _ = told.Pos.StringValueOK()
	l.ReplayOf, _ = told.ReplayOf.StringValueOK()
	if len(told.History) > 0 || a.dead.class == record.AttemptsExhausted {
		x := a.dead.failure
		l.Attempts = append(told.History, deadletter.Attempt{At: f.config.Now(), Topic: x.Topic, Class: x.Class, Reason: x.Reason, Node: f.config.Node})
	}
	return l, nil
}

// markGone looks at what the outcomes of a batch did not find. An envelope that is gone waits for nothing any more.
func (f *Finisher) markGone(ctx context.Context, batch []*decision) error {
	byNS := map[string]map[string]*decision{}
	ids := map[string][]bson.RawValue{}
	for _, a := range batch {
		if a.outcome == nil || a.fate.End != Retrying && a.fate.End != Waiting {
			continue
		}
		if byNS[a.NS] == nil {
			byNS[a.NS] = map[string]*decision{}
		}
		byNS[a.NS][idKey(a.ID)] = a
		ids[a.NS] = append(ids[a.NS], a.ID)
	}
	for ns, gone := range byNS {
		coll, err := store.Outboxed(f.config.Client, ns)
		if err != nil {
			return err
		}
		err = store.FetchMany(ctx, coll, ids[ns], func(raw bson.Raw) error {
			id := idKey(raw.Lookup("_id"))
			if a := gone[id]; a != nil && store.SameDelivery(raw, "", a.Number) {
				delete(gone, id)
			}
			return nil
		})
		if err != nil {
			return err
		}
		for _, a := range gone {
			a.fate.End = Gone
		}
	}
	return nil
}

// idKey is an id as the key of a map.
func idKey(id bson.RawValue) string { return string(byte(id.Type)) + string(id.Value) }
