package term

import (
	"bytes"
	"context"
	"errors"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/ledger"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/pkg/event"
)

// restoreImages sets the envelopes of records that the sink gave back: it keeps only encoded records. One read of the stream
// serves the whole list. It leaves an outcome without an envelope if the envelope is gone, and sets its namespace.
func (t *term) restoreImages(ctx context.Context, list []*ledger.Outcome) error {
	missing := map[string][]*ledger.Outcome{}
	for _, o := range list {
		k := envelopeKey([]byte(o.HeaderID().String()), o.StringID, o.NSHash)
		missing[k] = append(missing[k], o)
	}

	// The stream is read first: a document may be gone, and then only its event contains it. During
	// a sweep, the stream may not reach back to the envelopes.
	if !t.recovery.IsSweeping() {
		err := t.refetchFromStream(ctx, missing)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err == nil || !changestream.Lost(err) {
			return err
		}
		t.log.Debug("some rejected records are not in the stream after the watermark", "reason", err)
	}

	for _, same := range missing {
		for _, o := range same {
			if o.Raw != nil {
				continue
			}
			if err := t.findInCollections(ctx, o); err != nil {
				return err
			}
			if o.Raw == nil {
				o.NS = t.namespaceOf(o.NSHash)
			}
		}
	}
	return nil
}

// envelopeKey returns a map key for the envelope of a record, by the canonical text of its id.
func envelopeKey(id []byte, stringID bool, ns []byte) string {
	kind := byte(0)
	if stringID {
		kind = 1
	}
	return string(ns) + string(kind) + string(id)
}

// refetchFromStream reads the missing envelopes from the stream again, from the watermark on: every one of them is unresolved, so
// its event comes after the watermark. The documents may be gone from their collections.
func (t *term) refetchFromStream(ctx context.Context, missing map[string][]*ledger.Outcome) error {
	floor, _ := t.dispatcher.Reached()
	var v envelope.View
	var id []byte
	var hit []*ledger.Outcome
	left := len(missing)

	// The type of an id is known only if the record has it.
	want := func(ev *changestream.Event) bool {
		raw := ev.Document
		if !ev.HasDocument || t.slot.shared.Mapping.Parse(raw, &v) != nil {
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

	return t.stream.Refetch(ctx, floor, want, func(ev *changestream.Event, doc []byte) bool {
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

// namespaceOf returns the outbox whose records have the namespace header hash.
func (t *term) namespaceOf(hash []byte) string {
	ns := t.slot.scope.String()
	for _, o := range t.collections.WatchedOutboxes() {
		if h := routing.NamespaceHash(o.NS()); bytes.Equal(h[:], hash) {
			ns = o.NS()
		}
	}
	return ns
}

// findInCollections sets the envelope of e from its collection, if it is there. It is for a record
// whose event the stream can no longer supply. The position is made of the server timestamp.
func (t *term) findInCollections(ctx context.Context, e *ledger.Outcome) error {
	ids := []event.ID{e.HeaderID()}
	if text := event.NewID(string(e.ID)); text != ids[0] {
		ids = append(ids, text)
	}

	for _, o := range t.collections.WatchedOutboxes() {
		if h := routing.NamespaceHash(o.NS()); !bytes.Equal(h[:], e.NSHash) {
			continue
		}

		coll := mongodb.Database(t.slot.shared.Mongo.Stream, o.DB).Collection(o.Coll)
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
			e.Pos = t.recovery.PositionOf(o.NS(), outboxes.Stamp(raw))
			return nil
		}
	}
	return nil
}
