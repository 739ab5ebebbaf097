package deadletter

import (
	"context"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/keyhash"
	"github.com/outrelay/outrelay/internal/mongodb"
)

// Editable returns the names of the envelope fields that an edit may set or remove.
func Editable() []string {
	return []string{
		"aggregatetype", "aggregateid", "type", "payload", "key", "topic", "partition", "headers",
		"contenttype", "schemaversion", "source", "subject", "time", "expiresAt",
	}
}

// Edit is a change that is made to the envelope of a letter when it is requeued.
type Edit struct {
	Version int32  // version of the letter from which the edit was made
	Set     bson.D // fields with their new values
	Unset   []string
}

// Fields returns the names of the changed fields, sorted and without duplicates.
func (e Edit) Fields() []string {
	names := slices.Clone(e.Unset)
	for _, f := range e.Set {
		names = append(names, f.Key)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// validateFields returns an error unless the edit changes at least one field, names each field
// once, and changes only fields that are editable.
func (e Edit) validateFields() error {
	names := e.Fields()
	if len(names) == 0 {
		return fmt.Errorf("the edit changes nothing; requeue the dead letter instead")
	}
	if len(names) != len(e.Set)+len(e.Unset) {
		return fmt.Errorf("the edit names a field twice")
	}

	for _, n := range names {
		if !slices.Contains(Editable(), n) {
			return fmt.Errorf("field %q of an envelope cannot be edited; the editable fields are %v", n, Editable())
		}
	}
	return nil
}

// rename returns the edit with the field names of the documents.
func (e Edit) rename(m *envelope.Mapping) (Edit, error) {
	renamed := Edit{Version: e.Version}
	for _, f := range e.Set {
		name := m.Name(f.Key)
		if name == "" {
			return e, fmt.Errorf("by the mapping, no field of the documents holds %s", f.Key)
		}
		renamed.Set = append(renamed.Set, bson.E{Key: name, Value: f.Value})
	}
	for _, f := range e.Unset {
		renamed.Unset = append(renamed.Unset, m.Name(f))
	}
	return renamed, nil
}

// applyTo returns the envelope raw with the edit. A changed field keeps its place, and a new field
// is added at the end. The slot follows the new ordering key.
func (e Edit) applyTo(raw bson.Raw, m *envelope.Mapping) (bson.Raw, error) {
	e, err := e.rename(m)
	if err != nil {
		return nil, err
	}
	elems, err := raw.Elements()
	if err != nil {
		return nil, fmt.Errorf("reading the envelope: %w", err)
	}

	newValues := make(map[string]any, len(e.Set))
	for _, f := range e.Set {
		newValues[f.Key] = f.Value
	}

	doc := make(bson.D, 0, len(elems)+len(e.Set))
	written := map[string]bool{}
	for _, el := range elems {
		name := el.Key()
		if slices.Contains(e.Unset, name) {
			continue
		}

		value, changed := newValues[name]
		if !changed {
			doc = append(doc, bson.E{Key: name, Value: el.Value()})
			continue
		}

		// A malformed envelope may repeat a field. The edit replaces all of them by one.
		if !written[name] {
			doc = append(doc, bson.E{Key: name, Value: value})
			written[name] = true
		}
	}
	for _, f := range e.Set {
		if !written[f.Key] {
			doc = append(doc, f)
		}
	}

	edited, err := bson.Marshal(doc)
	if err != nil {
		return nil, fmt.Errorf("writing the edited envelope: %w", err)
	}
	return updateSlot(edited, m)
}

// updateSlot returns the envelope with the slot of its ordering key (N28).
func updateSlot(raw bson.Raw, m *envelope.Mapping) (bson.Raw, error) {
	var v envelope.View
	if err := m.Parse(raw, &v); err != nil {
		// buildEnvelope parses the envelope again, and reports the error with the id of the letter.
		return raw, nil
	}
	slot := keyhash.Slot(v.OrderingKey())
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
	doc = append(doc, bson.E{Key: "slot", Value: slot})

	edited, err := bson.Marshal(doc)
	if err != nil {
		return nil, fmt.Errorf("writing the edited envelope: %w", err)
	}
	return edited, nil
}

// EditAndRequeue changes the envelope of one letter and puts it back into its outbox. It returns
// the number of the new delivery. It also works for a letter that contains only the id of its
// envelope. The letter keeps the envelope that died.
//
// EditAndRequeue validates the edited envelope before it writes anything. It returns
//   - a [*RefusedError] if the edited envelope is invalid or cannot be requeued,
//   - a [*ConflictError] if the letter was changed since e.Version,
//   - a [*ReplayedError] if the letter is already requeued,
//   - [mongodb.ErrNotFound] if the letter does not exist.
func (k Desk) EditAndRequeue(ctx context.Context, id ID, e Edit, o Options) (int32, error) {
	if err := e.validateFields(); err != nil {
		return 0, err
	}

	dead := deadCollection(k.client(), id.NS)
	d, err := Open(ctx, dead.Database(), id)
	if err != nil {
		return 0, err
	}
	// These checks make a clear error. The write repeats them, because the letter may change before it.
	if d.Replayed != nil {
		return 0, &ReplayedError{id, *d.Replayed}
	}
	if d.Version != e.Version {
		return 0, &ConflictError{id, e.Version, d.Version}
	}

	if d.Envelope, err = e.applyTo(d.Envelope, k.Mapping); err != nil {
		return 0, &RefusedError{id, err.Error()}
	}
	builder, err := k.newEnvelopeBuilder(ctx, o.IgnoreExpiry)
	if err != nil {
		return 0, err
	}
	if o.DryRun {
		return k.requeueEdited(ctx, &d, e, builder, true)
	}

	var delivery int32
	err = mongodb.Foreign(ctx, k.State, k.Watcher, []string{id.NS}, func(tx context.Context) (err error) {
		delivery, err = k.requeueEdited(tx, &d, e, builder, false)
		return err
	})
	return delivery, err
}

// requeueEdited is the body of the transaction: it writes the edited envelope of d and marks the
// letter. With dryRun it only validates.
func (k Desk) requeueEdited(tx context.Context, d *Dead, e Edit, builder envelopeBuilder, dryRun bool) (int32, error) {
	dead := deadCollection(k.client(), d.ID.NS)
	outbox := k.outboxCollection(d.ID.NS)

	// Read in the transaction: a delivery that is on its way must not be replaced.
	entries, err := readOutboxEntries(tx, outbox, []bson.RawValue{d.ID.ID})
	if err != nil {
		return 0, err
	}
	delivery, err := entries[mongodb.ValueKey(d.ID.ID)].nextDelivery(d)
	if err != nil {
		// The outbox may contain the delivery that an earlier attempt of this transaction wrote.
		return k.findEarlierAttempt(tx, dead, d.ID, err)
	}
	doc, err := builder.buildEnvelope(d, delivery)
	if err != nil || dryRun {
		return delivery, err
	}

	// The filter makes this the only one of several concurrent edits that succeeds.
	unchanged := bson.D{
		{Key: "_id", Value: d.ID},
		{Key: "replayed", Value: nil},
		{Key: "version", Value: e.Version},
	}
	if e.Version == 0 {
		// The field is missing until the first change.
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
		return 0, fmt.Errorf("writing an envelope back to %s: %w", d.ID.NS, err)
	}
	return delivery, nil
}

// findEarlierAttempt returns the delivery of the letter if this action requeued it in an earlier
// attempt whose outcome was unknown. It returns a [*ReplayedError] if another action requeued the
// letter, and otherwise failure.
func (k Desk) findEarlierAttempt(tx context.Context, dead *mongo.Collection, id ID, failure error) (int32, error) {
	var d Dead
	err := dead.FindOne(tx, bson.D{{Key: "_id", Value: id}}).Decode(&d)
	if err != nil || d.Replayed == nil {
		return 0, failure
	}

	if d.Replayed.Run == k.Run {
		return d.Replayed.Delivery, nil
	}
	return 0, &ReplayedError{id, *d.Replayed}
}
