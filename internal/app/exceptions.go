package app

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/dispatch"
	"github.com/outrelay/outrelay/internal/reconcile"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/resume"
)

// exceptions writes down, in fenced transactions, what is not sent: dead letters, and envelopes that wait, as the stream
// showed them (N3, N16).
type exceptions struct{ t *term }

// Record implements dispatch.Exceptions. What is dead is moved first: an envelope that is dead for one target and waits for
// another is written anew by what follows, and one that was written before stays.
func (x *exceptions) Record(ctx context.Context, batch []dispatch.Exception) error {
	if err := x.images(ctx, batch); err != nil {
		return err
	}
	var letters []deadletter.Letter
	var dying []*dispatch.Exception // whose letters these are
	var held []store.Exception
	for i := range batch {
		e := &batch[i]
		l, dies, err := x.death(*e)
		switch {
		case err != nil:
			return err
		case dies:
			letters, dying = append(letters, l), append(dying, e)
		default:
			held = x.held(held, e)
		}
	}
	if err := x.move(ctx, letters); err != nil {
		return err
	}
	for i, e := range dying { // not before the letters are safe: a later event of the key would stand before what a crash repeats
		if e.State != "" {
			e.Why.Class, e.Why.Reason = letters[i].Class, letters[i].Reason
			x.over(e)
		}
	}
	if len(held) == 0 {
		return nil
	}
	if err := x.number(ctx, held); err != nil {
		return err
	}
	dead, err := x.write(ctx, held)
	if err != nil {
		return err
	}
	for _, h := range dead { // behind all that may fail: what is repeated must not open a gate twice
		for _, topic := range h.Pending {
			x.t.rec.outlet.Open(h.NS, topic, h.Key)
		}
	}
	for i := range held {
		x.t.dirty.marked(held[i].NS)
	}
	x.t.rec.exceptions.Written(held)
	return nil
}

// death is the letter of an exception that does not wait: it is dead for a reason of its own, or nothing is left to send, or one
// attempt is all that is allowed.
func (x *exceptions) death(e dispatch.Exception) (l deadletter.Letter, dies bool, err error) {
	switch {
	case e.Raw == nil:
		l, err = x.bare(&e)
		return l, true, err
	case e.State == event.StateRetry && x.t.cfg.Retry.MaxAttempts <= 1:
		only := deadletter.Attempt{At: x.t.clock.now(), Topic: e.Topic, Class: e.Why.Class, Reason: e.Why.Reason, Node: x.t.cfg.Node}
		e.Why = record.Refusal{Class: record.AttemptsExhausted, Reason: reconcile.OnlyAttempt + e.Why.Reason}
		l = x.letter(&e)
		l.Attempts = []deadletter.Attempt{only}
		return l, true, nil
	}
	if e.State != "" {
		return l, false, nil
	}
	return x.letter(&e), true, nil
}

// number gives envelopes without a stamp, which a sweep found, positions in the order of their decisions: that is the order of their
// key (N15). A later term numbers at a later time. The time tells a successor which of them its stream may bring again.
func (x *exceptions) number(ctx context.Context, held []store.Exception) error {
	var at bson.Timestamp
	for i := range held {
		h := &held[i]
		if !store.PosUnstamped(h.Pos) {
			continue
		}
		if at.IsZero() {
			var err error
			if at, err = store.ClusterTime(ctx, x.t.mongo.stream); err != nil {
				return err
			}
		}
		x.t.unstamped++
		h.Pos = store.PosNumbered(h.Pos, at, x.t.unstamped)
	}
	return nil
}

// over says that an envelope does not wait after all.
func (x *exceptions) over(e *dispatch.Exception) {
	for _, topic := range e.Pending {
		x.t.disp.Open(string(e.NSHash), topic, e.Key)
	}
	e.State = ""
}

// write stores what waits. One that the server does not take, because it is too large or too deep with what is added to
// it, or because a validator of the collection forbids that, is a dead letter: to repeat the write would help nobody. It
// returns those.
func (x *exceptions) write(ctx context.Context, held []store.Exception) (dead []*store.Exception, err error) {
	err = store.WriteHalves(held, func(part []store.Exception) error { return store.WriteExceptions(ctx, x.t.held, part) }, func(h store.Exception, why error) error {
		e := dispatch.Exception{NS: h.NS, Raw: h.Raw, Pos: h.Pos, Topic: h.Pending[0], Why: record.Refusal{
			Class: record.Malformed, Reason: "it has to wait for its target, and MongoDB does not take it with what is needed for that: " + why.Error(),
		}}
		if h.Error != nil {
			e.Why.Class = h.Error.Class
		}
		dead = append(dead, &h)
		return x.move(ctx, []deadletter.Letter{x.letter(&e)})
	})
	return dead, err
}

func (x *exceptions) move(ctx context.Context, letters []deadletter.Letter) error {
	if len(letters) == 0 {
		return nil
	}
	moved, err := deadletter.Move(ctx, x.t.held, letters)
	if err != nil {
		return fmt.Errorf("moving to the dead letters: %w", err)
	}
	for i := range letters {
		x.t.log.Warn("an envelope is dead", "collection", letters[i].NS, "class", string(letters[i].Class), "reason", letters[i].Reason, "topic", letters[i].Topic)
	}
	x.t.firstLetters(letters)
	x.t.log.Debug("moved to the dead letters", "new", moved.Moved, "known", moved.Known, "deleted", moved.Deleted)
	return nil
}

func (x *exceptions) letter(e *dispatch.Exception) deadletter.Letter {
	return deadletter.Letter{
		NS: e.NS, Raw: e.Raw, Class: e.Why.Class, Reason: e.Why.Reason, Topic: e.Topic, Partition: record.AnyPartition, Pos: e.Pos,
		Shared: e.Topic != "",
		Source: deadletter.Source{Kind: "relay", Watcher: x.t.cfg.Watcher, Node: x.t.cfg.Node, Epoch: x.t.held.Document().Epoch, Version: x.t.version},
	}
}

// held appends an envelope that waits. One that several targets gave back is written once.
func (x *exceptions) held(list []store.Exception, e *dispatch.Exception) []store.Exception {
	w := store.Exception{
		NS: e.NS, Raw: e.Raw, State: e.State, Pos: e.Pos, Pending: e.Pending, Key: e.Key, Node: x.t.cfg.Node, Seal: x.t.seal,
		Redelivered: x.t.sweeping.Load() != nil, // a sweep drains what was before it, and is drained itself
	}
	if e.State == event.StateRetry {
		w.Attempts, w.Delay = 1, x.t.retryPolicy().Delay(0)
		w.Error = &store.ExceptionError{Class: e.Why.Class, Reason: e.Why.Reason, Topic: e.Topic}
	}
	for i := range list {
		if o := &list[i]; o.NS == w.NS && o.Pos == w.Pos && bytes.Equal(o.Raw.Lookup("_id").Value, w.Raw.Lookup("_id").Value) {
			if w.State == event.StateRetry {
				w.Pending, *o = append(o.Pending, w.Pending...), w
			} else {
				o.Pending = append(o.Pending, w.Pending...)
			}
			return list
		}
	}
	return append(list, w)
}

// images brings the envelopes of records that the sink gave back: it keeps encoded records only.
func (x *exceptions) images(ctx context.Context, batch []dispatch.Exception) error {
	missing := map[string][]*dispatch.Exception{}
	left := 0
	for i := range batch {
		e := &batch[i]
		if e.Raw == nil {
			k := imageKey(e.ID, e.StringID, e.NSHash)
			missing[k] = append(missing[k], e)
			left++
		}
	}
	if left == 0 {
		return nil
	}
	if x.t.sweeping.Load() == nil { // what was swept the stream may not reach back to
		err := x.refetch(ctx, batch[0].Floor, missing)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err == nil || !changestream.Lost(err) {
			return err // nil, or to be repeated: the document may be gone already, and the image is there alone
		}
		x.t.log.Debug("some refused records are not in the stream behind the watermark", "reason", err)
	}
	for _, list := range missing {
		for _, e := range list {
			if e.Raw != nil {
				continue
			}
			if err := x.find(ctx, e); err != nil {
				return err
			}
		}
	}
	return nil
}

func imageKey(id []byte, text bool, ns []byte) string {
	kind := byte(0)
	if text {
		kind = 1
	}
	return string(ns) + string(kind) + string(id)
}

// refetch reads the images again from the stream, behind the watermark: the documents may be gone from their collections.
func (x *exceptions) refetch(ctx context.Context, floor resume.Position, missing map[string][]*dispatch.Exception) error {
	var v event.View
	var id []byte
	var hit []*dispatch.Exception
	left := len(missing)
	want := func(ev *changestream.Event) bool {
		raw := ev.Document
		if !ev.HasDocument || event.Parse(raw, &v) != nil {
			return false
		}
		id = v.AppendID(id[:0])
		h := routing.NamespaceHash(string(ev.DB) + "." + string(ev.Coll))
		for _, ns := range [][]byte{h[:], nil} {
			for _, text := range []bool{v.AmbiguousID(), false} {
				if hit = missing[imageKey(id, text, ns)]; hit != nil {
					return hit[0].Raw == nil
				}
			}
		}
		return false
	}
	return x.t.stream.Refetch(ctx, floor, want, func(ev *changestream.Event, doc []byte) bool {
		raw := slices.Clone(doc)
		for _, e := range hit {
			e.Raw, e.NS, e.Pos = raw, string(ev.DB)+"."+string(ev.Coll), string(ev.Data)
		}
		left--
		return left > 0
	})
}

// bare is the letter of an envelope that is nowhere any more: its id is what the refused record tells of it. Without it the
// watermark would wait for an image that cannot come.
func (x *exceptions) bare(e *dispatch.Exception) (deadletter.Letter, error) {
	e.NS = x.t.scope.String()
	for _, o := range x.t.outboxes() {
		if h := routing.NamespaceHash(o.NS()); len(e.NSHash) == 0 || bytes.Equal(h[:], e.NSHash) {
			e.NS = o.NS()
		}
	}
	id := event.ParseID(string(e.ID))
	if e.StringID {
		id = event.NewID(string(e.ID))
	}
	raw, err := bson.Marshal(bson.D{{Key: "_id", Value: id}})
	e.Raw = raw
	if e.Why.Class == "" {
		e.Why.Class, e.Why.Reason = record.Malformed, "its target could not be written"
	}
	e.Why.Reason += "; the envelope is gone, only its id is left"
	return x.letter(e), err
}

// find reads an envelope from its collection, for a record whose place in the stream is lost. Its position is made of its
// stamp.
func (x *exceptions) find(ctx context.Context, e *dispatch.Exception) error {
	text := string(e.ID)
	ids := []event.ID{event.ParseID(text), event.NewID(text)}
	if e.StringID {
		ids = ids[1:]
	}
	for _, o := range x.t.outboxes() {
		if h := routing.NamespaceHash(o.NS()); len(e.NSHash) > 0 && !bytes.Equal(h[:], e.NSHash) {
			continue
		}
		for _, id := range ids {
			kind, val, err := id.MarshalBSONValue()
			if err != nil {
				return err
			}
			raw, err := store.Fetch(ctx, x.t.mongo.stream.Database(o.DB).Collection(o.Coll), bson.RawValue{Type: bson.Type(kind), Value: val})
			if errors.Is(err, store.ErrNotFound) {
				continue
			}
			if err == nil {
				e.NS, e.Raw, e.Pos = o.NS(), raw, x.t.renamed.place(o.NS(), reconcile.Stamp(raw))
			}
			return err
		}
	}
	return nil
}

// withoutDocument is the envelope of an event that was too large for the stream and gone when it was fetched (N24): its id
// is all that is left of it.
func withoutDocument(ev *changestream.Event) []byte {
	raw, err := bson.Marshal(bson.D{{Key: "_id", Value: bson.RawValue{Type: bson.Type(ev.IDType), Value: ev.ID}}})
	if err != nil {
		return nil
	}
	return raw
}
