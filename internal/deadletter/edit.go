package deadletter

import (
	"context"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
)

// Editable are the fields of an envelope that an edit may set or remove.
func Editable() []string {
	return []string{
		"aggregatetype", "aggregateid", "type", "payload", "key", "topic", "partition", "headers",
		"contenttype", "schemaversion", "source", "subject", "time", "expiresAt",
	}
}

// Edit is a change to the envelope of a letter on its way back.
type Edit struct {
	Version int32  // of the letter that the edit was made from
	Set     bson.D // fields with their new values
	Unset   []string
}

// Fields names what is changed, in order and once.
func (e Edit) Fields() []string {
	out := slices.Clone(e.Unset)
	for _, f := range e.Set {
		out = append(out, f.Key)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func (e Edit) validateFields() error {
	names := e.Fields()
	if len(names) == 0 {
		return fmt.Errorf("the edit changes nothing; requeue the letter instead")
	}
	if len(names) != len(e.Set)+len(e.Unset) {
		return fmt.Errorf("the edit names a field twice")
	}
	for _, n := range names {
		if !slices.Contains(Editable(), n) {
			return fmt.Errorf("field %q of an envelope cannot be edited; those that can are %v", n, Editable())
		}
	}
	return nil
}

// applyTo is the envelope with the edit. Fields that are set stand where they stood, or at the end.
func (e Edit) applyTo(raw bson.Raw) (bson.Raw, error) {
	elems, err := raw.Elements()
	if err != nil {
		return nil, fmt.Errorf("reading the envelope: %w", err)
	}
	set := make(map[string]any, len(e.Set))
	for _, f := range e.Set {
		set[f.Key] = f.Value
	}
	doc := make(bson.D, 0, len(elems)+len(e.Set))
	written := map[string]bool{}
	for _, el := range elems {
		name := el.Key()
		value, changed := set[name]
		switch {
		case slices.Contains(e.Unset, name), changed && written[name]: // a malformed envelope may repeat a field
		case changed:
			doc = append(doc, bson.E{Key: name, Value: value})
			written[name] = true
		default:
			doc = append(doc, bson.E{Key: name, Value: el.Value()})
		}
	}
	for _, f := range e.Set {
		if !written[f.Key] {
			doc = append(doc, f)
		}
	}
	out, err := bson.Marshal(doc)
	if err != nil {
		return nil, fmt.Errorf("writing the edited envelope: %w", err)
	}
	return updateSlot(out)
}

// updateSlot makes the slot that of the ordering key (N28).
func updateSlot(raw bson.Raw) (bson.Raw, error) {
	var v event.View
	if err := event.Parse(raw, &v); err != nil {
		return raw, nil // what is wrong is told by who parses it next, with the letter's name
	}
	slot := event.Slot(v.OrderingKey())
	if v.Slot == slot {
		return raw, nil
	}
	elems, err := raw.Elements()
	if err != nil {
		return nil, fmt.Errorf("reading the edited envelope: %w", err)
	}
	doc := make(bson.D, 0, len(elems)+1)
	for _, e := range elems {
		if e.Key() != "slot" {
			doc = append(doc, bson.E{Key: e.Key(), Value: e.Value()})
		}
	}
	out, err := bson.Marshal(append(doc, bson.E{Key: "slot", Value: slot}))
	if err != nil {
		return nil, fmt.Errorf("writing the edited envelope: %w", err)
	}
	return out, nil
}

// EditAndRequeue gives one letter back to its outbox with a changed envelope, also one of which only the id was left. The
// letter keeps the envelope that died. It returns the delivery that the envelope became.
//
// The edited envelope is validated before anything is written: a [*RefusedError] says what is wrong with it or why it cannot
// go back. A letter that was changed since e.Version is a [*ConflictError], one that was requeued a [*ReplayedError], and
// one that is gone [store.ErrNotFound].
func (k Desk) EditAndRequeue(ctx context.Context, id ID, e Edit, o Options) (int32, error) {
	if err := e.validateFields(); err != nil {
		return 0, err
	}
	dead, err := deadCollection(k.client(), id.NS)
	if err != nil {
		return 0, err
	}
	d, err := Open(ctx, dead.Database(), id)
	if err != nil {
		return 0, err
	}
	if d.Replayed != nil {
		return 0, &ReplayedError{id, *d.Replayed}
	}
	if d.Version != e.Version {
		return 0, &ConflictError{id, e.Version, d.Version}
	}
	if d.Envelope, err = e.applyTo(d.Envelope); err != nil {
		return 0, &RefusedError{id, err.Error()}
	}
	a, err := k.newEnvelopeBuilder(ctx, o.Late)
	if err != nil {
		return 0, err
	}
	if o.DryRun {
		return k.requeueEdited(ctx, &d, e, a, true)
	}
	var became int32
	err = store.Foreign(ctx, k.State, k.Watcher, []string{id.NS}, func(tx context.Context) (err error) {
		became, err = k.requeueEdited(tx, &d, e, a, false)
		return err
	})
	return became, err
}

// requeueEdited is the body of the transaction.
func (k Desk) requeueEdited(tx context.Context, d *Dead, e Edit, a envelopeBuilder, dryRun bool) (int32, error) {
	dead, err := deadCollection(k.client(), d.ID.NS)
	if err != nil {
		return 0, err
	}
	outbox, err := k.outboxCollection(d.ID.NS)
	if err != nil {
		return 0, err
	}
	have, err := readOutboxEntries(tx, outbox, []bson.RawValue{d.ID.ID})
	if err != nil {
		return 0, err
	}
	delivery, err := have[valueKey(d.ID.ID)].nextDelivery(d)
	if err != nil {
		return k.findEarlierAttempt(tx, dead, d.ID, err)
	}
	doc, err := a.buildEnvelope(d, delivery)
	if err != nil || dryRun {
		return delivery, err
	}
	unchanged := bson.D{{Key: "_id", Value: d.ID}, {Key: "replayed", Value: nil}, {Key: "version", Value: e.Version}}
	if e.Version == 0 {
		unchanged[2].Value = nil
	}
	matched, err := k.markReplayed(tx, dead, unchanged, delivery, e.Fields())
	if err != nil {
		return 0, err
	}
	if matched == 0 {
		return k.findEarlierAttempt(tx, dead, d.ID, &ConflictError{d.ID, e.Version, e.Version + 1})
	}
	_, err = outbox.BulkWrite(tx, []mongo.WriteModel{
		mongo.NewReplaceOneModel().SetUpsert(true).SetFilter(bson.D{{Key: "_id", Value: d.ID.ID}}).SetReplacement(doc),
	})
	if err != nil {
		return 0, fmt.Errorf("giving an envelope back to %s: %w", d.ID.NS, err)
	}
	return delivery, nil
}

// findEarlierAttempt is why, unless this very action has requeued the letter in an attempt whose outcome was not known.
func (k Desk) findEarlierAttempt(tx context.Context, dead *mongo.Collection, id ID, why error) (int32, error) {
	var d Dead
	if err := dead.FindOne(tx, bson.D{{Key: "_id", Value: id}}).Decode(&d); err != nil || d.Replayed == nil {
		return 0, why
	}
	if d.Replayed.Run == k.Run {
		return d.Replayed.Delivery, nil
	}
	return 0, &ReplayedError{id, *d.Replayed}
}
