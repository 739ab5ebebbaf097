package admin

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/changes"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/letters"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/waiting"
)

// SkipOrder names the event that a stream passes over. Without a collection and an id, it is the event at which the stream stands.
type SkipOrder struct {
	Collection string `json:"collection,omitempty" maxLength:"255" doc:"The outbox, as database.collection."`
	ID         string `json:"id,omitempty" maxLength:"4096" doc:"The id of the envelope. Without collection and id: the event at which the stream stands."`
	DryRun     bool   `json:"dry_run,omitempty"`
}

// SkippedEvent is an event that a stream passes over.
type SkippedEvent struct {
	Collection string `json:"collection"`
	ID         string `json:"id"`
	Bytes      int    `json:"bytes"` // of the envelope; 0 if its document does not exist any more
	Letter     string `json:"letter,omitempty"`
	DryRun     bool   `json:"dry_run"`
}

// PassOver orders that the stream passes over one event, which it cannot read or deliver. The event becomes a dead letter of class
// skipped with the envelope, or with the id alone if its document is gone. The owner steps down, and the next one opens the stream
// without the event. A later event with the same id is read. If the event was delivered already, the order has no effect besides
// the letter.
func (r Recovery) PassOver(ctx context.Context, order SkipOrder) (SkippedEvent, error) {
	event, envelope, err := r.findSkipped(ctx, order)
	if err != nil {
		return SkippedEvent{}, err
	}
	ns := event.DB + "." + event.Coll
	if len(event.ID.Value) > maxSkippedID {
		return SkippedEvent{}, invalidRequest("the id has %d bytes, at most %d can be passed over by hand; the relay passes over such an event "+
			"itself, and with lost_history: halt, outrelay recover continues after it", len(event.ID.Value), maxSkippedID)
	}
	found := SkippedEvent{Collection: ns, ID: letters.IDText(event.ID), Bytes: len(envelope), DryRun: order.DryRun}
	if order.DryRun {
		return found, nil
	}

	if envelope == nil {
		if envelope, err = bson.Marshal(bson.D{{Key: "_id", Value: event.ID}}); err != nil {
			return found, fmt.Errorf("skipping an event: %w", err)
		}
	}
	prepared, err := letters.Prepare(letters.Letter{
		Watcher: r.op.Watcher, NS: ns, Mapping: r.op.Mapping, Raw: envelope, Slot: waiting.SlotOf(envelope), Class: record.Skipped,
		Reason: "the operator " + r.op.Actor + " passed over it", Partition: record.AnyPartition, Pos: outboxes.PosAt(event.Until),
		Origin: waiting.OriginStream, Source: letters.Source{Kind: "relay", Watcher: r.op.Watcher, Node: r.op.Node, Version: r.op.Version},
	})
	if err != nil {
		return found, err
	}
	found.Letter = prepared.ID()

	// The letter comes first: an event is never passed over without one.
	list := []*letters.Prepared{prepared}
	now, err := mongodb.ServerTime(ctx, r.op.State.Client())
	if err != nil {
		return found, err
	}
	err = mongodb.InTransaction(ctx, r.op.State.Client(), func(tx context.Context) error {
		if err := letters.WriteChunksIn(tx, r.op.letters(), list); err != nil {
			return err
		}
		return letters.Write(tx, r.op.letters(), now, list)
	})
	if err != nil {
		return found, err
	}

	fields := bson.D{{Key: "collection", Value: ns}, {Key: "id", Value: record.Clip(found.ID, maxLoggedID)}, {Key: "letter", Value: found.Letter}}
	return found, r.op.Lease().forEachSlot(ctx, "event_skipped", fields, func(id string) error {
		return lease.RequestSkip(ctx, r.op.watcherDocuments(), id, lease.Skip{NS: ns, ID: event.ID, At: event.Until}, briefHold)
	})
}

// maxSkippedID bounds the id in the watcher document, in bytes. An envelope with a longer id is malformed.
const maxSkippedID = 1024

// maxLoggedID bounds the text of an id in the events log, in bytes.
const maxLoggedID = 1024

// findSkipped returns the event of an order, up to the current cluster time, and its envelope, or nil if its document is gone.
func (r Recovery) findSkipped(ctx context.Context, order SkipOrder) (event changes.Skip, envelope bson.Raw, err error) {
	switch {
	case order.Collection == "" && order.ID == "":
		if event, err = r.findStanding(ctx); err != nil {
			return event, nil, err
		}
	case order.Collection == "" || order.ID == "":
		return event, nil, invalidRequest("name the collection and the id of the event, or none of them for the event at which the stream stands")
	default:
		if _, err := r.op.Collections(ctx, order.Collection); err != nil {
			return event, nil, err
		}
		ids, err := parseIDValues(order.ID)
		if err != nil {
			return event, nil, err
		}
		event.DB, event.Coll, _ = strings.Cut(order.Collection, ".")
		// A text may be the id of several types. The document decides; without one, the first type does.
		event.ID = ids[0]
		for _, id := range ids {
			raw, err := mongodb.Fetch(ctx, r.op.database(event.DB).Collection(event.Coll), id)
			if err == nil {
				event.ID, envelope = id, raw
				break
			}
			if !errors.Is(err, mongodb.ErrNotFound) {
				return event, nil, err
			}
		}
	}

	// Every event up to now with this id is passed over.
	if event.Until, err = mongodb.ClusterTime(ctx, r.op.State.Client()); err != nil || envelope != nil {
		return event, envelope, err
	}
	envelope, err = mongodb.Fetch(ctx, r.op.database(event.DB).Collection(event.Coll), event.ID)
	if errors.Is(err, mongodb.ErrNotFound) {
		return event, nil, nil
	}
	return event, envelope, err
}

// findStanding returns the event at which the stream of the slot stands.
func (r Recovery) findStanding(ctx context.Context) (changes.Skip, error) {
	if r.op.NextInsert == nil || !r.op.isConfigured() {
		return changes.Skip{}, ErrUnavailable
	}
	ids, err := r.op.Lease().watcherIDs(ctx)
	if err != nil {
		return changes.Skip{}, err
	}
	if len(ids) > 1 {
		return changes.Skip{}, invalidRequest("the watcher has %d slots, each with its own stream: name the slot, or the collection and the id of the event", len(ids))
	}

	doc, _, err := lease.Read(ctx, r.op.watcherDocuments(), ids[0])
	if err != nil {
		return changes.Skip{}, err
	}
	_, part, _ := slot.ParseID(ids[0])
	event, err := r.op.NextInsert(ctx, part, doc.Position())
	if errors.Is(err, changes.ErrNoEvent) {
		err = invalidRequest("%v; name the collection and the id of the event", err)
	}
	return event, err
}
