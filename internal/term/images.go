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
	"github.com/outrelay/outrelay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/pkg/event"
)

// images finds the envelopes of records that the sink gave back: it keeps only encoded records.
type images struct {
	*sources
	resolver *pipeline.Resolver
}

// restore sets the envelopes of records that the sink gave back. One read of the stream
// serves the whole list. It leaves an outcome without an envelope if the envelope is gone, and sets its namespace.
func (m *images) restore(ctx context.Context, list []*ledger.Outcome) error {
	missing := map[string][]*ledger.Outcome{}
	for _, o := range list {
		k := envelopeKey([]byte(o.HeaderID().String()), o.StringID, o.NSHash)
		missing[k] = append(missing[k], o)
	}

	// The stream is read first: a document may be gone, and then only its event contains it. During
	// a sweep, the stream may not reach back to the envelopes.
	if !m.plan.IsSweeping() {
		err := m.refetchFromStream(ctx, missing)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err == nil || !changestream.Lost(err) {
			return err
		}
		m.log.Debug("some rejected records are not in the stream after the watermark", "reason", err)
	}

	for _, same := range missing {
		for _, o := range same {
			if o.Raw != nil {
				continue
			}
			if err := m.findInCollections(ctx, o); err != nil {
				return err
			}
			if o.Raw == nil {
				o.NS = m.namespaceOf(o.NSHash)
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
func (m *images) refetchFromStream(ctx context.Context, missing map[string][]*ledger.Outcome) error {
	floor, _ := m.resolver.Reached()
	var v envelope.View
	var id []byte
	var hit []*ledger.Outcome
	left := len(missing)

	// Records may lack the namespace, and the type of an id is known only if the record has it.
	want := func(ev *changestream.Event) bool {
		raw := ev.Document
		if !ev.HasDocument || m.slot.shared.Mapping.Parse(raw, &v) != nil {
			return false
		}

		id = v.AppendID(id[:0])
		h := routing.NamespaceHash(string(ev.DB) + "." + string(ev.Coll))
		for _, ns := range [][]byte{h[:], nil} {
			for _, stringID := range []bool{v.AmbiguousID(), false} {
				if hit = missing[envelopeKey(id, stringID, ns)]; hit != nil {
					return hit[0].Raw == nil
				}
			}
		}
		return false
	}

	return m.stream.Refetch(ctx, floor, want, func(ev *changestream.Event, doc []byte) bool {
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
func (m *images) namespaceOf(hash []byte) string {
	ns := m.slot.scope.String()
	for _, o := range m.collections.WatchedOutboxes() {
		// Without a hash in the record, the watcher has one collection.
		if h := routing.NamespaceHash(o.NS()); len(hash) == 0 || bytes.Equal(h[:], hash) {
			ns = o.NS()
		}
	}
	return ns
}

// findInCollections sets the envelope of e from its collection, if it is there. It is for a record
// whose event the stream can no longer supply. The position is made of the server timestamp.
func (m *images) findInCollections(ctx context.Context, e *ledger.Outcome) error {
	ids := []event.ID{e.HeaderID()}
	if text := event.NewID(string(e.ID)); text != ids[0] {
		ids = append(ids, text)
	}

	for _, o := range m.collections.WatchedOutboxes() {
		if h := routing.NamespaceHash(o.NS()); len(e.NSHash) > 0 && !bytes.Equal(h[:], e.NSHash) {
			continue
		}

		coll := mongodb.Database(m.slot.shared.Mongo.Stream, o.DB).Collection(o.Coll)
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
			e.Pos = m.plan.PositionOf(o.NS(), outboxes.Stamp(raw))
			return nil
		}
	}
	return nil
}
