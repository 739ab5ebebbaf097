package term

import (
	"bytes"
	"context"
	"errors"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/eventid"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/internal/changestream"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// images finds the envelopes of records that the sink gave back: it keeps only encoded records.
type images struct {
	*sources
	resolver *pipeline.Resolver
}

// restore sets the envelopes of records that the sink gave back. One read of the stream
// serves the whole list. It leaves an outcome without an envelope if the envelope is gone, and sets its namespace.
func (m *images) restore(ctx context.Context, list []*ledger.Outcome) error {
	missing := missingImages{}
	for _, o := range list {
		// An earlier call may have found a part of them.
		if o.Raw == nil {
			missing[o.Event] = append(missing[o.Event], o)
		}
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
		m.log.Debug("some rejected records are not in the stream after the position", "error", err)
	}

	// The outbox has only the latest envelope of an id. The outcomes have the order of their events, at least within a key.
	taken := map[string]uint64{}
	for _, o := range slices.Backward(list) {
		if o.Raw != nil {
			continue
		}

		key := envelopeKey(o)
		if latest, known := taken[key]; !known || latest == o.Event {
			taken[key] = o.Event
			if err := m.findInCollections(ctx, o); err != nil {
				return err
			}
		}
		if o.Raw == nil {
			o.NS = m.namespaceOf(o.NSHash)
		}
	}
	return nil
}

// envelopeKey returns a map key for the envelope of a record, by the values of its headers.
func envelopeKey(outcome *ledger.Outcome) string {
	kind := "other"
	if outcome.StringID {
		kind = "string"
	}
	return string(outcome.NSHash) + kind + outcome.HeaderID().String()
}

// missingImages are outcomes of records that the sink gave back, by the numbers of their events: an id may have been inserted again.
type missingImages map[uint64][]*ledger.Outcome

// findOf returns the outcomes of the insert ev that have no envelope yet. Inserts of two shards may have one number, because they may have
// one position.
func (m missingImages) findOf(ev *changes.Event) (found []*ledger.Outcome) {
	list := m[pipeline.EventNumber(ev.Pos)]
	if len(list) == 0 {
		return nil
	}

	id := envelope.CanonicalText(bson.RawValue{Type: bson.Type(ev.IDType), Value: ev.ID})
	ns := routing.NamespaceHash(string(ev.DB) + "." + string(ev.Coll))
	for _, o := range list {
		if o.Raw == nil && o.HeaderID().String() == id && bytes.Equal(o.NSHash, ns[:]) {
			found = append(found, o)
		}
	}
	return found
}

// refetchFromStream reads the missing envelopes from the stream again, from the position on: every one of them is unresolved, so
// its event comes after the position. The documents may be gone from their collections.
func (m *images) refetchFromStream(ctx context.Context, missing missingImages) error {
	floor, _ := m.resolver.Reached()
	left := 0
	for _, list := range missing {
		left += len(list)
	}
	var hit []*ledger.Outcome
	want := func(ev *changes.Event) bool {
		hit = missing.findOf(ev)
		return len(hit) > 0
	}

	return m.stream.Refetch(ctx, floor, want, func(ev *changes.Event, doc []byte) bool {
		raw := slices.Clone(doc)
		for _, o := range hit {
			o.Raw = raw
			o.NS = string(ev.DB) + "." + string(ev.Coll)
			o.Pos = string(ev.Pos)
		}
		left -= len(hit)
		return left > 0
	})
}

// namespaceOf returns the outbox whose records have the namespace header hash.
func (m *images) namespaceOf(hash []byte) string {
	ns := m.slot.scope.String()
	for _, o := range m.collections.WatchedOutboxes() {
		if computed := routing.NamespaceHash(o.NS()); bytes.Equal(computed[:], hash) {
			ns = o.NS()
		}
	}
	return ns
}

// findInCollections sets the envelope of outcome from its collection, if it is there. It is for a record
// whose event the stream can no longer supply. The position is made of the server timestamp.
func (m *images) findInCollections(ctx context.Context, outcome *ledger.Outcome) error {
	ids := []eventid.ID{outcome.HeaderID()}
	if text := eventid.New(string(outcome.ID)); text != ids[0] {
		ids = append(ids, text)
	}

	for _, o := range m.collections.WatchedOutboxes() {
		if hash := routing.NamespaceHash(o.NS()); !bytes.Equal(hash[:], outcome.NSHash) {
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

			outcome.NS = o.NS()
			outcome.Raw = raw
			outcome.Pos = m.plan.PositionOf(o.NS(), outboxes.Stamp(raw))
			return nil
		}
	}
	return nil
}
