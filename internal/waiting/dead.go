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
	for ns, dead := range groupByNS(batch, func(a *decision) bool { return a.fate.End == Dead && !a.moved }) {
		for part := range slices.Chunk(dead, deadAtOnce) {
			if err := f.moveDeadPart(ctx, ns, part); err != nil {
				return fmt.Errorf("moving exceptions of %s to the dead letters: %w", ns, err)
			}
		}
	}
	return nil
}

// groupByNS returns the selected decisions of a batch by their collections.
func groupByNS(batch []*decision, selects func(*decision) bool) map[string][]*decision {
	byNS := map[string][]*decision{}
	for _, a := range batch {
		if selects(a) {
			byNS[a.NS] = append(byNS[a.NS], a)
		}
	}
	return byNS
}

// readAgain reads the envelopes of decisions, which are all of the collection ns, and calls visit for each.
// It sets the fates of those that are not found to Gone: they were removed, or visit recognizes another delivery.
func (f *Finisher) readAgain(
	ctx context.Context, ns string, list []*decision, visit func(a *decision, raw bson.Raw) (same bool, err error),
) error {
	byID := make(map[string]*decision, len(list))
	ids := make([]bson.RawValue, 0, len(list))
	for _, a := range list {
		byID[mongodb.ValueKey(a.ID)] = a
		ids = append(ids, a.ID)
	}

	found := make(map[*decision]bool, len(list))
	err := mongodb.FetchMany(ctx, outboxes.CollectionOf(f.config.Client, ns), ids, func(raw bson.Raw) (err error) {
		if a := byID[mongodb.ValueKey(raw.Lookup("_id"))]; a != nil {
			found[a], err = visit(a, raw)
		}
		return err
	})
	if err != nil {
		return err
	}

	for _, a := range list {
		if !found[a] {
			a.fate.End = Gone
		}
	}
	return nil
}

// moveDeadPart moves dead envelopes of the collection ns. The fate of an envelope that is not found
// becomes Gone, and that of an envelope that was given further attempts becomes Waiting.
func (f *Finisher) moveDeadPart(ctx context.Context, ns string, part []*decision) error {
	var letters []deadletter.Letter
	var moving []*decision
	size := 0
	move := func() error {
		if _, err := deadletter.Move(ctx, f.config.Fencer, letters, f.partSize); err != nil {
			return err
		}
		for _, a := range moving {
			a.moved = true
			f.config.Log.Warn("an envelope is dead", "collection", ns, "id", deadletter.IDText(a.ID), "class", string(a.fate.Class),
				"reason", a.deadReason, "topic", a.failure.Topic, "attempts", a.Attempts)
		}
		letters, moving, size = letters[:0], moving[:0], 0
		return nil
	}

	err := f.readAgain(ctx, ns, part, func(a *decision, raw bson.Raw) (bool, error) {
		if !isSameDelivery(raw, a.Claim, a.Number) {
			return false, nil
		}

		// An operator has given it further attempts.
		attempts, _ := raw.Lookup("attempts").AsInt64OK()
		if a.fate.Class == record.AttemptsExhausted && int32(attempts) != a.Attempts {
			a.fate.End = Waiting
			return true, nil
		}

		l, err := f.newLetter(a, raw)
		if err != nil {
			return true, err
		}
		letters, moving = append(letters, l), append(moving, a)
		size += len(raw)
		if size > mongodb.MaxBytes {
			return true, move()
		}
		return true, nil
	})
	if err != nil {
		return err
	}
	return move()
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
		Source:    f.config.Source,
	}
	l.Pos, _ = stored.Pos.StringValueOK()
	l.ReplayOf, _ = stored.ReplayOf.StringValueOK()

	if len(stored.History) > 0 || a.fate.Class == record.AttemptsExhausted {
		x := a.failure
		last := deadletter.Attempt{
			At: f.config.Now(), Topic: x.Topic, Class: x.Class, Reason: x.Reason, Node: f.config.Source.Node,
		}
		l.Attempts = append(stored.History, last)
	}
	return l, nil
}

// markGone is called if outcomes of a batch matched no envelope. It sets the fate of envelopes that are
// gone, which wait no more.
func (f *Finisher) markGone(ctx context.Context, batch []*decision) error {
	// A finished or dead envelope may be gone already.
	stays := func(a *decision) bool { return a.changed && (a.fate.End == Retrying || a.fate.End == Waiting) }
	for ns, list := range groupByNS(batch, stays) {
		err := f.readAgain(ctx, ns, list, func(a *decision, raw bson.Raw) (bool, error) {
			return isSameDelivery(raw, "", a.Number), nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}
