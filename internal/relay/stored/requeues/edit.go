package requeues

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/keyhash"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
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

// DropSame returns the edit without the fields that have their new values already.
func (e Edit) DropSame(raw bson.Raw, mapping *envelope.Mapping) Edit {
	kept := Edit{Version: e.Version}
	for _, field := range e.Set {
		kind, value, err := bson.MarshalValue(field.Value)
		stored, storedErr := raw.LookupErr(cmp.Or(mapping.Name(field.Key), field.Key))
		if err == nil && storedErr == nil && stored.Type == kind && bytes.Equal(stored.Value, value) {
			continue
		}
		kept.Set = append(kept.Set, field)
	}
	for _, name := range e.Unset {
		if _, err := raw.LookupErr(cmp.Or(mapping.Name(name), name)); err == nil {
			kept.Unset = append(kept.Unset, name)
		}
	}
	return kept
}

// validateFields returns an error unless the edit changes at least one field, names each field
// once, and changes only fields that are editable.
func (e Edit) validateFields() error {
	names := e.Fields()
	if len(names) == 0 {
		return fmt.Errorf("the edit changes nothing: change a field, a header or the payload, or requeue the dead letter as it is")
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
func (e Edit) rename(mapping *envelope.Mapping) (Edit, error) {
	renamed := Edit{Version: e.Version}
	for _, f := range e.Set {
		name := mapping.Name(f.Key)
		if name == "" {
			return e, fmt.Errorf("the mapping has no field for %s; change a field that it maps", f.Key)
		}
		renamed.Set = append(renamed.Set, bson.E{Key: name, Value: f.Value})
	}
	for _, f := range e.Unset {
		renamed.Unset = append(renamed.Unset, mapping.Name(f))
	}
	return renamed, nil
}

// applyTo returns the envelope raw with the edit. A changed field keeps its place, and a new field
// is added at the end. The slot follows the new ordering key.
func (e Edit) applyTo(raw bson.Raw, mapping *envelope.Mapping) (bson.Raw, error) {
	e, err := e.rename(mapping)
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
	return updateSlot(edited, mapping)
}

// updateSlot returns the envelope with the slot of its ordering key (N28). An envelope without a slot gets none.
func updateSlot(raw bson.Raw, mapping *envelope.Mapping) (bson.Raw, error) {
	var view envelope.View
	if err := mapping.Parse(raw, &view); err != nil {
		// newEntry parses the envelope again, and reports the error with the id of the letter.
		return raw, nil
	}
	slot := keyhash.Slot(view.OrderingKey())
	if view.Slot < 0 || view.Slot == slot {
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

// EditAndRequeue changes the envelope of one letter and requeues it. It returns
// the number of the new delivery. It also works for a letter that contains only the id of its
// envelope. The letter keeps the envelope that died.
//
// EditAndRequeue validates the edited envelope before it writes anything. It returns
//   - a [*letters.RejectedError] if the edited envelope is invalid or cannot be requeued,
//   - [ErrOtherVersion] if the edit was made from another version of the letter,
//   - [ErrRequeued] if the letter is already requeued,
//   - [mongodb.ErrNotFound] if the letter does not exist.
func (k Desk) EditAndRequeue(ctx context.Context, id string, edit Edit, options Options) (int32, error) {
	if err := edit.validateFields(); err != nil {
		return 0, err
	}

	letter, err := k.openNotRequeued(ctx, id)
	if err != nil {
		return 0, err
	}
	if letter.Version() != edit.Version {
		return 0, fmt.Errorf("%s: %w: it is at version %d, but the edit was made from version %d; "+
			"show it again and edit that version", id, ErrOtherVersion, letter.Version(), edit.Version)
	}
	if letter.Envelope, err = edit.applyTo(letter.Envelope, k.Mapping); err != nil {
		return 0, &letters.RejectedError{Letter: &letter, Reason: err.Error()}
	}

	plan, err := k.requeueList(ctx, []*letters.Dead{&letter}, options, edit.Fields())
	switch {
	case err != nil && isRejected(err):
		return 0, newRejection(&letter, err)
	case err != nil:
		return 0, err
	case plan.outcome.Rejected > 0:
		return 0, plan.outcome.Why[0]
	case plan.outcome.Requeued > 0:
		return plan.delivery, nil
	}

	// Since the check above, another action has requeued or discarded the letter.
	if _, err := k.openNotRequeued(ctx, id); err != nil {
		return 0, err
	}
	return 0, fmt.Errorf("%s: %w: it has changed; show it again", id, ErrOtherVersion)
}

var (
	// ErrOtherVersion is returned for an edit that was made from another version of the letter.
	ErrOtherVersion = errors.New("the edit was made from another version")
	// ErrRequeued is returned for an edit of a letter that is already requeued.
	ErrRequeued = errors.New("it is already requeued")
)

// openNotRequeued is [letters.Open] for a letter that is not requeued yet. Otherwise it returns [ErrRequeued].
func (k Desk) openNotRequeued(ctx context.Context, id string) (letters.Dead, error) {
	letter, err := letters.Open(ctx, k.Letters, id)
	if requeue := letter.Requeued; err == nil && requeue != nil {
		err = fmt.Errorf("%s: %w: %s requeued it at %s as delivery %d; if that delivery died too, requeue its dead letter",
			id, ErrRequeued, requeue.Actor, requeue.At.UTC().Format(time.RFC3339), requeue.Delivery)
	}
	return letter, err
}
