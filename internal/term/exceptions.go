package term

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/gap"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/internal/waiting"
	"github.com/outrelay/outrelay/internal/watched"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/resume"
)

// exceptionWriter stores the envelopes that are not sent, in fenced transactions: dead letters, and
// waiting envelopes as the stream contained them (N3, N16).
type exceptionWriter struct {
	cfg         *config.Config
	source      deadletter.Source
	client      *mongo.Client
	scope       *changestream.Scope
	held        *lease.Held
	stream      *changestream.Stream
	dispatcher  *pipeline.Dispatcher
	collections *watched.Collections
	indexes     *indexKeeper
	recovery    *gap.Recovery
	now         func() time.Time
	log         *slog.Logger
	partSize    *mongodb.PartSize // of the transactions

	// Set during the takeover.
	mapping    *envelope.Mapping
	seal       []byte // see term.seal
	reconciler *reconciler

	unstampedCount uint32 // exceptions without a server timestamp
}

// Record implements pipeline.Exceptions. Dead letters are moved first: an envelope that is dead for
// one target and waits for another is stored again by the second write, and an envelope that was
// stored before stays.
func (x *exceptionWriter) Record(ctx context.Context, batch []pipeline.Exception) error {
	var letters []deadletter.Letter
	var dying []*pipeline.Exception // dying[i] is the exception of letters[i]
	var list []waiting.Exception
	for i := range batch {
		e := &batch[i]
		letter, dies, err := x.deadLetterFor(*e)
		switch {
		case err != nil:
			return err
		case dies:
			letters = append(letters, letter)
			dying = append(dying, e)
		default:
			list = x.appendWaiting(list, e)
		}
	}

	if err := x.moveToDeadLetters(ctx, letters); err != nil {
		return err
	}

	// Gates open only when the letters are stored. Otherwise a later event of the key could be sent
	// before an event that is repeated after a crash.
	for i, e := range dying {
		if e.State != "" {
			e.Refusal.Class = letters[i].Class
			e.Refusal.Reason = letters[i].Reason
			x.openGates(e)
		}
	}
	if len(list) == 0 {
		return nil
	}

	if err := x.numberUnstamped(ctx, list); err != nil {
		return err
	}
	dead, err := x.writeWaiting(ctx, list)
	if err != nil {
		return err
	}

	// Nothing can fail from here on. Record is repeated after an error, and must not open a gate
	// twice.
	for _, h := range dead {
		for _, topic := range h.Pending {
			x.reconciler.outlet.OpenGate(h.NS, topic, h.Key)
		}
	}
	x.reconciler.exceptions.QueueWritten(list)
	return nil
}

// deadLetterFor returns the dead letter of an exception that does not wait. dies is false for an
// exception that waits. An exception dies if its record can never be sent, if its envelope is gone,
// or if only one attempt is allowed.
func (x *exceptionWriter) deadLetterFor(e pipeline.Exception) (l deadletter.Letter, dies bool, err error) {
	switch {
	case e.Raw == nil:
		l, err = x.newIDOnlyLetter(&e)
		return l, true, err

	case e.State == envelope.StateRetry && x.cfg.Retry.MaxAttempts <= 1:
		attempt := deadletter.Attempt{
			At:     x.now(),
			Topic:  e.Topic,
			Class:  e.Refusal.Class,
			Reason: e.Refusal.Reason,
			Node:   x.cfg.Node,
		}
		e.Refusal = record.Refusal{Class: record.AttemptsExhausted, Reason: waiting.OnlyAttempt + e.Refusal.Reason}
		l = x.newLetter(&e)
		l.Attempts = []deadletter.Attempt{attempt}
		return l, true, nil

	case e.State != "":
		return l, false, nil
	}
	return x.newLetter(&e), true, nil
}

// numberUnstamped gives positions to swept envelopes without a server timestamp, in the order of
// their decisions, which is the order of their keys (N15). A later term uses a later time. The
// time lets a later owner recognize the envelopes that its stream may repeat.
func (x *exceptionWriter) numberUnstamped(ctx context.Context, list []waiting.Exception) error {
	var at bson.Timestamp
	for i := range list {
		h := &list[i]
		if !outboxes.PosUnstamped(h.Pos) {
			continue
		}

		if at.IsZero() {
			var err error
			if at, err = mongodb.ClusterTime(ctx, x.client); err != nil {
				return err
			}
		}
		x.unstampedCount++
		h.Pos = outboxes.PosNumbered(h.Pos, at, x.unstampedCount)
	}
	return nil
}

// openGates opens the gates of e, which does not wait after all.
func (x *exceptionWriter) openGates(e *pipeline.Exception) {
	for _, topic := range e.Pending {
		x.dispatcher.OpenGate(string(e.NSHash), topic, e.Key)
	}
	e.State = ""
}

// writeWaiting stores waiting envelopes. It dead-letters and returns the envelopes that MongoDB
// rejects, because the added fields make them too large or too deep, or because a validator of the
// collection forbids the fields. Repeating such a write could not succeed.
func (x *exceptionWriter) writeWaiting(
	ctx context.Context, list []waiting.Exception,
) (dead []*waiting.Exception, err error) {
	write := func(part []waiting.Exception) error { return waiting.WriteExceptions(ctx, x.held, part, x.partSize) }

	reject := func(h waiting.Exception, rejection error) error {
		e := pipeline.Exception{
			NS:    h.NS,
			Raw:   h.Raw,
			Pos:   h.Pos,
			Topic: h.Pending[0],
			Refusal: record.Refusal{
				Class: record.Malformed,
				Reason: "it has to wait for its target, and MongoDB rejects it with the fields that are added for that: " +
					rejection.Error(),
			},
		}
		// The class of an earlier failure explains the letter better.
		if h.Error != nil {
			e.Refusal.Class = h.Error.Class
		}
		dead = append(dead, &h)
		return x.moveToDeadLetters(ctx, []deadletter.Letter{x.newLetter(&e)})
	}

	err = waiting.WriteHalves(list, write, reject)
	return dead, err
}

// moveToDeadLetters stores letters and deletes their envelopes.
func (x *exceptionWriter) moveToDeadLetters(ctx context.Context, letters []deadletter.Letter) error {
	if len(letters) == 0 {
		return nil
	}

	moved, err := deadletter.Move(ctx, x.held, letters, x.partSize)
	if err != nil {
		return fmt.Errorf("moving to the dead letters: %w", err)
	}
	for i := range letters {
		x.log.Warn("an envelope is dead", "collection", letters[i].NS, "id", deadletter.IDText(bson.Raw(letters[i].Raw).Lookup("_id")), "class", string(letters[i].Class),
			"reason", letters[i].Reason, "topic", letters[i].Topic)
	}
	x.indexes.indexFirstDeadLetters(letters)
	x.log.Debug("moved to the dead letters", "new", moved.Moved, "known", moved.Known, "deleted", moved.Deleted)
	return nil
}

// newLetter returns the dead letter of e.
func (x *exceptionWriter) newLetter(e *pipeline.Exception) deadletter.Letter {
	return deadletter.Letter{
		NS:            e.NS,
		Mapping:       x.mapping,
		Raw:           e.Raw,
		Class:         e.Refusal.Class,
		Reason:        e.Refusal.Reason,
		Topic:         e.Topic,
		Partition:     record.AnyPartition,
		Pos:           e.Pos,
		KeepIfWaiting: e.Topic != "",
		Source:        x.source,
	}
}

// appendWaiting appends the waiting envelope of e to list. An envelope that several targets
// returned is in list only once.
func (x *exceptionWriter) appendWaiting(list []waiting.Exception, e *pipeline.Exception) []waiting.Exception {
	w := waiting.Exception{
		NS:      e.NS,
		Raw:     e.Raw,
		State:   e.State,
		Pos:     e.Pos,
		Pending: e.Pending,
		Key:     e.Key,
		Node:    x.cfg.Node,
		Seal:    x.seal,
		// Every exception during a sweep comes from the sweep: all earlier events are resolved
		// before it, and it is resolved itself before the stream continues.
		Redelivered: x.recovery.IsSweeping(),
	}
	if e.State == envelope.StateRetry {
		w.Attempts = 1
		w.Delay = retryPolicy(x.cfg).Delay(0)
		w.Error = &waiting.ExceptionError{Class: e.Refusal.Class, Reason: e.Refusal.Reason, Topic: e.Topic}
	}

	for i := range list {
		o := &list[i]
		same := o.NS == w.NS && o.Pos == w.Pos &&
			bytes.Equal(o.Raw.Lookup("_id").Value, w.Raw.Lookup("_id").Value)
		if !same {
			continue
		}

		// The envelope waits for the targets of both. An attempt that failed decides about its state.
		pending := append(o.Pending, w.Pending...)
		if w.State == envelope.StateRetry {
			*o = w
		}
		o.Pending = pending
		return list
	}
	return append(list, w)
}

// Restore implements pipeline.Exceptions: the sink keeps only encoded records. One read of the stream serves the whole list.
func (x *exceptionWriter) Restore(ctx context.Context, list []pipeline.Exception) error {
	missing := map[string][]*pipeline.Exception{}
	for i := range list {
		e := &list[i]
		if e.Raw == nil {
			k := envelopeKey([]byte(idOf(e).String()), e.StringID, e.NSHash)
			missing[k] = append(missing[k], e)
		}
	}
	if len(missing) == 0 {
		return nil
	}

	// The stream is read first: a document may be gone, and then only its event contains it. During
	// a sweep, the stream may not reach back to the envelopes.
	if !x.recovery.IsSweeping() {
		err := x.refetchFromStream(ctx, list[0].Floor, missing)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err == nil || !changestream.Lost(err) {
			return err
		}
		x.log.Debug("some rejected records are not in the stream after the watermark", "reason", err)
	}

	for _, same := range missing {
		for _, e := range same {
			if e.Raw != nil {
				continue
			}
			if err := x.findInCollections(ctx, e); err != nil {
				return err
			}
		}
	}
	return nil
}

// idOf returns the id in the headers of a rejected record. A header marks a string that looks like an id of another type.
func idOf(e *pipeline.Exception) event.ID {
	if e.StringID {
		return event.NewID(string(e.ID))
	}
	return event.ParseID(string(e.ID))
}

// envelopeKey returns a map key for the envelope of a record, by the canonical text of its id.
func envelopeKey(id []byte, stringID bool, ns []byte) string {
	kind := byte(0)
	if stringID {
		kind = 1
	}
	return string(ns) + string(kind) + string(id)
}

// refetchFromStream reads the missing envelopes from the stream again, from floor on, which is the
// watermark. The documents may be gone from their collections.
func (x *exceptionWriter) refetchFromStream(
	ctx context.Context, floor resume.Position, missing map[string][]*pipeline.Exception,
) error {
	var v envelope.View
	var id []byte
	var hit []*pipeline.Exception
	left := len(missing)

	// The type of an id is known only if the record has it.
	want := func(ev *changestream.Event) bool {
		raw := ev.Document
		if !ev.HasDocument || x.mapping.Parse(raw, &v) != nil {
			return false
		}

		id = v.AppendID(id[:0])
		h := routing.NamespaceHash(string(ev.DB) + "." + string(ev.Coll))
		for _, stringID := range []bool{v.AmbiguousID(), false} {
			if hit = missing[envelopeKey(id, stringID, h[:])]; hit != nil {
				return hit[0].Raw == nil
			}
		}
		return false
	}

	return x.stream.Refetch(ctx, floor, want, func(ev *changestream.Event, doc []byte) bool {
		raw := slices.Clone(doc)
		for _, e := range hit {
			e.Raw = raw
			e.NS = string(ev.DB) + "." + string(ev.Coll)
			e.Pos = string(ev.Data)
		}
		left--
		return left > 0
	})
}

// newIDOnlyLetter returns the letter of an envelope that no longer exists. It contains the id,
// which the rejected record has. Without the letter, the watermark would wait for an envelope that
// cannot be found.
func (x *exceptionWriter) newIDOnlyLetter(e *pipeline.Exception) (deadletter.Letter, error) {
	e.NS = x.scope.String()
	for _, o := range x.collections.WatchedOutboxes() {
		if h := routing.NamespaceHash(o.NS()); bytes.Equal(h[:], e.NSHash) {
			e.NS = o.NS()
		}
	}

	raw, err := bson.Marshal(bson.D{{Key: "_id", Value: idOf(e)}})
	e.Raw = raw

	if e.Refusal.Class == "" {
		e.Refusal.Class = record.Malformed
		e.Refusal.Reason = "its target could not be written"
	}
	e.Refusal.Reason += "; the envelope is gone, only its id is left"
	return x.newLetter(e), err
}

// findInCollections sets the envelope of e from its collection, if it is there. It is for a record
// whose event the stream can no longer supply. The position is made of the server timestamp.
func (x *exceptionWriter) findInCollections(ctx context.Context, e *pipeline.Exception) error {
	ids := []event.ID{idOf(e)}
	if text := event.NewID(string(e.ID)); text != ids[0] {
		ids = append(ids, text)
	}

	for _, o := range x.collections.WatchedOutboxes() {
		if h := routing.NamespaceHash(o.NS()); !bytes.Equal(h[:], e.NSHash) {
			continue
		}

		coll := mongodb.Database(x.client, o.DB).Collection(o.Coll)
		for _, id := range ids {
			kind, val, err := id.MarshalBSONValue()
			if err != nil {
				return err
			}
			raw, err := mongodb.Fetch(ctx, coll, bson.RawValue{Type: bson.Type(kind), Value: val})
			if errors.Is(err, mongodb.ErrNotFound) {
				continue
			}
			if err != nil {
				return err
			}

			e.NS = o.NS()
			e.Raw = raw
			e.Pos = x.recovery.PositionOf(o.NS(), outboxes.Stamp(raw))
			return nil
		}
	}
	return nil
}
