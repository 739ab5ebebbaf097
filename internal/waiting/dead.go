package waiting

import (
	"context"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
)

// deadAtOnce bounds the dead envelopes that are read and moved at a time, because they are not kept in
// memory while they are in flight.
const deadAtOnce = 100

// moveDead moves the dead envelopes of a batch to the dead letters. It reads them again, and leaves out
// an envelope that is gone or has become another delivery.
func (f *Finisher) moveDead(ctx context.Context, batch []*decision) error {
	byNS := map[string][]*decision{}
	for _, a := range batch {
		if a.fate.End == Dead && !a.moved {
			byNS[a.NS] = append(byNS[a.NS], a)
		}
	}

	for ns, dead := range byNS {
		for part := range slices.Chunk(dead, deadAtOnce) {
			if err := f.moveDeadPart(ctx, ns, part); err != nil {
				return err
			}
		}
	}
	return nil
}

// moveDeadPart moves dead envelopes of the collection ns. The fate of an envelope that is not found
// becomes Gone, and that of an envelope that was given further attempts becomes Waiting.
func (f *Finisher) moveDeadPart(ctx context.Context, ns string, part []*decision) error {
	coll := outboxes.CollectionOf(f.config.Client, ns)

	byID := make(map[string]*decision, len(part))
	ids := make([]bson.RawValue, 0, len(part))
	for _, a := range part {
		byID[IDKey(a.ID)] = a
		ids = append(ids, a.ID)
	}

	var letters []deadletter.Letter
	var moving []*decision
	found, size := map[*decision]bool{}, 0
	move := func() error {
		if _, err := deadletter.Move(ctx, f.config.Fencer, letters, f.partSize); err != nil {
			return err
		}
		for _, a := range moving {
			a.moved = true
		}
		letters, moving, size = letters[:0], moving[:0], 0
		return nil
	}

	err := mongodb.FetchMany(ctx, coll, ids, func(raw bson.Raw) error {
		a := byID[IDKey(raw.Lookup("_id"))]
		if a == nil || !isSameDelivery(raw, a.Claim, a.Number) {
			return nil
		}
		found[a] = true

		// An operator has given it further attempts.
		attempts, _ := raw.Lookup("attempts").AsInt64OK()
		if a.fate.Class == record.AttemptsExhausted && int32(attempts) != a.Attempts {
			a.fate.End = Waiting
			return nil
		}

		l, err := f.newLetter(a, raw)
		if err != nil {
			return err
		}
		letters, moving = append(letters, l), append(moving, a)
		size += len(raw)
		if size > mongodb.MaxBytes {
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
		f.config.Log.Warn("an envelope is dead", "collection", ns, "id", deadletter.IDText(a.ID), "class", string(a.fate.Class),
			"reason", a.deadReason, "topic", a.failure.Topic, "attempts", a.Attempts)
	}
	return nil
}

// newLetter returns the dead letter of a: the envelope as it was before it became an exception, with all
// attempts.
func (f *Finisher) newLetter(a *decision, raw bson.Raw) (deadletter.Letter, error) {
	var stored struct {
		History  []deadletter.Attempt `bson:"history"`
		ReplayOf bson.RawValue        `bson:"replayOf"`
		Pos      bson.RawValue        `bson:"pos"`
	}
	// Wrong values in these fields must not keep the envelope out of the dead letters.
	_ = bson.Unmarshal(raw, &stored)

	plain, err := removeException(raw)
	if err != nil {
		return deadletter.Letter{}, fmt.Errorf("reading a dead envelope: %w", err)
	}

	l := deadletter.Letter{
		NS:        a.NS,
		Mapping:   f.config.Mapping,
		Raw:       plain,
		Class:     a.fate.Class,
		Reason:    a.deadReason,
		Topic:     a.failure.Topic,
		Partition: a.partition,
		Source: deadletter.Source{
			Kind:    "relay",
			Watcher: f.config.Watcher,
			Node:    f.config.Node,
			Epoch:   f.config.Epoch,
			Version: f.config.Version,
		},
	}
	l.Pos, _ = stored.Pos.StringValueOK()
	l.ReplayOf, _ = stored.ReplayOf.StringValueOK()

	if len(stored.History) > 0 || a.fate.Class == record.AttemptsExhausted {
		x := a.failure
		last := deadletter.Attempt{
			At: f.config.Now(), Topic: x.Topic, Class: x.Class, Reason: x.Reason, Node: f.config.Node,
		}
		l.Attempts = append(stored.History, last)
	}
	return l, nil
}

// markGone is called if outcomes of a batch matched no envelope. It sets the fate of envelopes that are
// gone, which wait no more.
func (f *Finisher) markGone(ctx context.Context, batch []*decision) error {
	byNS := map[string]map[string]*decision{}
	ids := map[string][]bson.RawValue{}
	for _, a := range batch {
		// A finished or dead envelope may be gone already.
		if !a.changed || a.fate.End != Retrying && a.fate.End != Waiting {
			continue
		}

		if byNS[a.NS] == nil {
			byNS[a.NS] = map[string]*decision{}
		}
		byNS[a.NS][IDKey(a.ID)] = a
		ids[a.NS] = append(ids[a.NS], a.ID)
	}

	for ns, gone := range byNS {
		coll := outboxes.CollectionOf(f.config.Client, ns)

		err := mongodb.FetchMany(ctx, coll, ids[ns], func(raw bson.Raw) error {
			id := IDKey(raw.Lookup("_id"))
			a := gone[id]
			// An envelope that was replaced in the meantime is another delivery, and counts as gone.
			if a != nil && isSameDelivery(raw, "", a.Number) {
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

// IDKey returns an id as the key of a map.
func IDKey(id bson.RawValue) string { return string(byte(id.Type)) + string(id.Value) }
