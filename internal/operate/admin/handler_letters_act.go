package admin

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/requeues"
	handlerletters "github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
)

// requeue is [Letters.Requeue] for letters of handlers: their messages go back to their handlers, through MongoDB.
func (h handlerLetters) requeue(ctx context.Context, filter DeadFilter, opts DeadOptions, did func(int64)) (DeadOutcome, error) {
	out := DeadOutcome{DryRun: opts.DryRun, Why: []DeadRejected{}}
	filter.RequeueStatus = string(letters.NotRequeued)
	desks, err := h.resolveChange(ctx, filter)
	if err != nil {
		return out, err
	}
	// The plan and the progress need the number before the first requeue.
	if out.Matched, err = h.count(ctx, filter); err != nil || out.Matched == 0 {
		return out, err
	}
	if opts.DryRun {
		return out, planRequeue(ctx, desks, opts, &out)
	}

	options := handlerletters.RequeueOptions{Actor: h.op.Actor, Handlers: opts.Handlers}
	if did != nil {
		reached := int64(0)
		// Edit is called for each letter before its requeue, so it can report the progress.
		options.Edit = func(*handlerletters.Letter) error {
			reached++
			did(reached)
			return nil
		}
	}
	for _, d := range desks {
		var n int64
		n, err = d.Requeue(ctx, d.query, options)
		out.Requeued += n
		err = out.addRejected(d.ns, err)
		// The action is logged even if it failed halfway.
		if err != nil {
			break
		}
	}
	return out, h.op.logOutcome(ctx, deadRequeued, bson.D{
		{Key: "requeued", Value: out.Requeued},
		{Key: "rejected", Value: out.Rejected},
		{Key: "query", Value: auditFields(filter)},
	}, err)
}

// planRequeue sets the counts of a dry run. Only the size of a message can add to the letters that it counts as rejected.
func planRequeue(ctx context.Context, desks []handlerDesk, opts DeadOptions, out *DeadOutcome) error {
	for _, desk := range desks {
		groups, err := desk.Summary(ctx, desk.query)
		if err != nil {
			return err
		}
		for _, group := range groups {
			handlers := opts.Handlers
			if len(handlers) == 0 {
				handlers = []string{group.Handler}
			}

			obstacle, err := desk.FindObstacle(ctx, module.Key{}, group.Group, handlers)
			if err != nil {
				return err
			}
			if obstacle != "" {
				out.Rejected += group.Count
				out.Why = append(out.Why, DeadRejected{Collection: desk.ns, Reason: obstacle})
			}
		}
	}
	out.Requeued = out.Matched - out.Rejected
	return nil
}

// addRejected adds the letters that a requeue has rejected. It returns the error of the requeue without them.
func (d *DeadOutcome) addRejected(ns string, err error) error {
	list := []error{err}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		list = joined.Unwrap()
	}

	var others []error
	for _, e := range list {
		rejected, ok := errors.AsType[*handlerletters.RejectedError](e)
		if !ok {
			others = append(others, e)
			continue
		}
		d.Rejected += 1 + rejected.More
		d.Why = append(d.Why, DeadRejected{"", ns, rejected.ID.Message, int32(rejected.ID.Delivery), rejected.Reason})
	}
	return errors.Join(others...)
}

// edit is [Letters.Edit] for letters of handlers.
func (h handlerLetters) edit(ctx context.Context, ref DeadRef, edit DeadEdit, opts DeadOptions) (DeadEdited, error) {
	desk, letter, err := h.find(ctx, ref)
	if err != nil {
		return DeadEdited{}, err
	}
	// The version detects an edit or a requeue after the letter was shown.
	shown := newHandlerLetter(desk.ns, &letter)
	if requeue := shown.Requeued; requeue != nil {
		return DeadEdited{}, fmt.Errorf("dead letter %s: %w by %s at %s", letter.ID, requeues.ErrRequeued, requeue.Actor, requeue.At.UTC().Format(time.RFC3339))
	}
	if edit.Version != shown.Version {
		return DeadEdited{}, fmt.Errorf("dead letter %s: %w", letter.ID, requeues.ErrOtherVersion)
	}

	edited, err := edit.applyTo(&letter)
	if err == nil && len(edited) == 0 {
		err = invalidRequest("the edit changes nothing: change a field, a header or the payload, or requeue the dead letter as it is")
	}
	out := DeadEdited{
		DryRun: opts.DryRun, Collection: desk.ns, ID: letter.ID.Message, Died: shown.Delivery, Delivery: shown.Delivery + 1, Edited: edited,
	}
	if err != nil || opts.DryRun {
		return out, err
	}

	// The stored letter is changed again, because the letter above was read outside of the requeue.
	changed := handlerletters.RequeueOptions{Actor: h.op.Actor, Handlers: opts.Handlers, Edit: func(stored *handlerletters.Letter) error {
		_, err := edit.applyTo(stored)
		return err
	}}
	n, err := desk.Requeue(ctx, handlerletters.Query{IDs: []handlerletters.ID{letter.ID}, Archived: letter.Archived != nil}, changed)
	// Another requeue or a discard came first, after the letter was read above.
	if err == nil && n == 0 {
		err = fmt.Errorf("dead letter %s: %w", letter.ID, requeues.ErrRequeued)
	}
	if err != nil {
		return out, err
	}
	return out, h.op.logOutcome(ctx, deadEdited, bson.D{
		{Key: "letter", Value: letter.ID.String()},
		{Key: "delivery", Value: out.Delivery},
		{Key: "edited", Value: out.Edited},
	}, nil)
}

// applyTo changes the message of a letter, and returns the parts that differ then. Of the fields it can change only the key.
func (e DeadEdit) applyTo(letter *handlerletters.Letter) (edited []string, err error) {
	before := *letter
	if err := e.replaceParts(letter); err != nil {
		return nil, err
	}

	isSame := func(a, b []byte) bool { return bytes.Equal(a, b) && (a == nil) == (b == nil) }
	isSameHeader := func(a, b event.Header) bool { return a.Key == b.Key && isSame(a.Value, b.Value) }
	if !isSame(before.Key, letter.Key) {
		edited = append(edited, "key")
	}
	if !slices.EqualFunc(before.Headers, letter.Headers, isSameHeader) {
		edited = append(edited, "headers")
	}
	if !isSame(before.Value, letter.Value) {
		edited = append(edited, "payload")
	}
	return edited, nil
}

// replaceParts sets the parts of the message of a letter that the edit names.
func (e DeadEdit) replaceParts(letter *handlerletters.Letter) error {
	for name := range e.Fields {
		if name != "key" {
			return invalidRequest("%s of a message cannot be changed; only the key, the headers and the payload can", name)
		}
		letter.Key = []byte(e.Fields[name])
	}
	for _, name := range e.Unset {
		if name != "key" {
			return invalidRequest("%s of a message cannot be removed; only the key can", name)
		}
		letter.Key = nil
	}

	if e.Headers != nil {
		letter.Headers = replaceHeaders(e.Headers, letter.Headers,
			func(stored event.Header) (string, string) { return stored.Key, string(stored.Value) },
			func(name, text string) event.Header { return event.Header{Key: name, Value: []byte(text)} })
	}

	switch {
	case e.PayloadAs == PayloadNull && len(e.Payload) > 0:
		return errors.New("a null payload has no bytes")
	case e.PayloadAs == PayloadNull:
		letter.Value = nil
	case e.Payload != nil:
		// A payload of Kafka has no type, so the bytes are stored as they are.
		letter.Value = e.Payload
	}
	return nil
}

// discard is [Letters.Discard] for letters of handlers.
func (h handlerLetters) discard(ctx context.Context, filter DeadFilter, effect Effect, did func(int64)) (DeadDiscarded, error) {
	out := DeadDiscarded{DryRun: bool(effect), ArchivedUntil: Letters(h).archiveEnd(filter)}
	desks, err := h.resolveChange(ctx, filter)
	if err != nil {
		return out, err
	}
	if out.Matched, err = h.count(ctx, filter); err != nil || effect == DryRun || out.Matched == 0 {
		return out, err
	}
	if err := h.op.logDiscarding(ctx, filter, out.Matched); err != nil {
		return out, err
	}

	for _, d := range desks {
		var n int64
		n, err = d.Discard(ctx, d.query, handlerletters.DiscardOptions{
			// Here no time means none; in the options it means the default.
			Actor: h.op.Actor, Archive: cmp.Or(h.op.LetterArchive, -1), Did: addDone(did, out.Discarded),
		})
		out.Discarded += n

		// The action is logged even if it failed halfway.
		if err != nil {
			break
		}
	}
	return out, h.op.logDiscarded(ctx, filter, out.Discarded, err)
}
