package admin

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
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
	if len(event.ID.Value) > changes.MaxSkippedID && event.At.IsZero() {
		return SkippedEvent{}, invalidRequest("the id has %d bytes: an event with an id above %d bytes can be passed over only if the stream "+
			"stands at it", len(event.ID.Value), changes.MaxSkippedID)
	}
	found := SkippedEvent{Collection: ns, ID: skippedIDText(event.ID), Bytes: len(envelope), DryRun: order.DryRun}
	if order.DryRun {
		return found, nil
	}

	if envelope == nil {
		if envelope, err = bson.Marshal(bson.D{{Key: "_id", Value: event.ID}}); err != nil {
			return found, fmt.Errorf("skipping an event: %w", err)
		}
	}
	skip := lease.Skip{NS: ns, ID: event.ID, At: event.Until, EventAt: event.At, Size: event.Size}
	if skip.Size > 0 {
		skip.ID = bson.RawValue{}
	}
	pos, err := r.findSkippedPos(ctx, skip, event.ID, envelope)
	if err != nil {
		return found, err
	}
	prepared, err := letters.Prepare(letters.Letter{
		Watcher: r.op.Watcher, NS: ns, Mapping: r.op.Mapping, Raw: envelope, Slot: waiting.SlotOf(envelope), Class: record.Skipped,
		Reason: "the operator " + r.op.Actor + " passed over it", Partition: record.AnyPartition, Pos: pos,
		Origin: waiting.OriginStream, Source: letters.Source{Kind: "relay", Watcher: r.op.Watcher, Node: r.op.Node, Version: r.op.Version},
		Expire: r.op.LetterExpiry,
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
		return lease.RequestSkip(ctx, r.op.watcherDocuments(), id, skip, briefHold)
	})
}

// findSkippedPos returns the position for the letter of an order: that of a letter which an earlier try of the same order has stored,
// so that a repetition stores no other one, or the time of the order. It returns an error if the watcher does not accept the order.
func (r Recovery) findSkippedPos(ctx context.Context, skip lease.Skip, eventID bson.RawValue, envelope bson.Raw) (string, error) {
	ids, err := r.op.Lease().watcherIDs(ctx)
	if err != nil {
		return "", err
	}

	pos := outboxes.PosAt(skip.At)
	passed := pos
	for _, id := range ids {
		doc, err := lease.CheckSkip(ctx, r.op.watcherDocuments(), id, skip)
		if errors.Is(err, lease.ErrManySkips) {
			return "", invalidRequest("%v", err)
		}
		if err != nil {
			return "", err
		}
		passed = min(passed, outboxes.PosOf(doc.Position()))
	}

	// If all streams have passed the letter, it belongs to an earlier event with this id.
	digest := letters.DigestOf(envelope)
	err = letters.Known(ctx, r.op.letters(), r.op.Watcher, skip.NS, []bson.RawValue{eventID}, func(mark letters.Mark) error {
		if mark.Delivery == 0 && mark.Topic == "" && !mark.Requeued && mark.Pos > passed && bytes.Equal(mark.Digest, digest) {
			pos = mark.Pos
		}
		return nil
	})
	return pos, err
}

// skippedIDText returns the text that names an event, which is that of its dead letter: of an id above 1 KiB, it has a digest.
func skippedIDText(id bson.RawValue) string { return letters.IDText(letters.ShortID(id)) }

// maxLoggedID bounds the text of an id in the audit log, in bytes.
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
		if event, envelope, err = r.findNamed(ctx, event, order.ID, ids); err != nil {
			return event, nil, err
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

// findNamed returns the event of a collection that a text names, and its envelope, or nil if there is no such document. A text may be
// the id of several types, or have the digest of a long id. The document decides, then the event at which the stream stands, then
// the first type.
func (r Recovery) findNamed(
	ctx context.Context, named changes.Skip, text string, ids []bson.RawValue,
) (event changes.Skip, envelope bson.Raw, err error) {
	coll := r.op.database(named.DB).Collection(named.Coll)
	named.ID = ids[0]
	for _, id := range ids {
		envelope, err = mongodb.Fetch(ctx, coll, id)
		if err == nil {
			named.ID = id
			break
		}
		if !errors.Is(err, mongodb.ErrNotFound) {
			return named, nil, err
		}
	}

	if envelope != nil && len(named.ID.Value) <= changes.MaxSkippedID {
		return named, envelope, nil
	}
	standing, err := r.findStanding(ctx)
	if err == nil && standing.DB == named.DB && standing.Coll == named.Coll && (standing.ID.Equal(named.ID) || skippedIDText(standing.ID) == text) {
		return standing, envelope, nil
	}
	return named, envelope, ctx.Err()
}

// findStanding returns the event at which the stream of the slot stands.
func (r Recovery) findStanding(ctx context.Context) (changes.Skip, error) {
	if !r.op.isConfigured() {
		return changes.Skip{}, invalidRequest("this process is configured for another watcher, so it cannot read the stream: name the collection and the id of the event")
	}
	if r.op.NextInsert == nil {
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
		err = invalidRequest("%v", err)
	}
	return event, err
}
