package saga

import (
	"slices"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/pkg/event"
)

// OnCompensate stores events that undo the step in the document of the saga, until Compensate emits them. The events keep
// their ids. An invalid event makes the step fail.
func (in *Instance[S]) OnCompensate(events ...event.Event) {
	for _, ev := range events {
		raw, err := ev.MarshalBSON()
		if err != nil {
			in.addProblem("compensation: %w", err)
		}
		in.doc.Compensations = append(in.doc.Compensations, raw)
	}
}

// Compensate emits the events that OnCompensate has stored, the last one first, and discards them. It returns their number.
func (in *Instance[S]) Compensate() int {
	stored := in.doc.Compensations
	in.doc.Compensations = nil
	for _, raw := range slices.Backward(stored) {
		ev, err := restoreEvent(raw)
		if err != nil {
			in.addProblem("compensation: %w", err)
		}
		in.Emit(ev)
	}
	return len(stored)
}

// restoreEvent returns the event whose stored form is raw.
func restoreEvent(raw bson.Raw) (event.Event, error) {
	var view envelope.View
	if err := envelope.Parse(raw, &view); err != nil {
		return event.Event{}, err
	}

	var payload event.Payload
	switch bsonType := bson.Type(view.PayloadType); bsonType {
	case bson.TypeNull:
	case bson.TypeBinary, bson.TypeString:
		payload = event.Bytes(string(view.ContentType), view.Payload)
	default:
		payload = event.Document(bson.RawValue{Type: bsonType, Value: view.Payload})
	}

	return event.New(event.Aggregate{Type: string(view.AggregateType), ID: string(view.AggregateID)}, string(view.Type), payload, restoreOptions(raw, &view)...), nil
}

// restoreOptions returns the options for all fields of an event that New does not set.
func restoreOptions(raw bson.Raw, view *envelope.View) []event.Option {
	var opts []event.Option
	switch id := raw.Lookup("_id"); id.Type {
	case bson.TypeBinary:
		opts = append(opts, event.WithID(uuid.UUID(view.ID)))
	case bson.TypeObjectID:
		opts = append(opts, event.WithID(id.ObjectID()))
	default:
		opts = append(opts, event.WithID(string(view.ID)))
	}

	addText := func(value []byte, option func(string) event.Option) {
		if len(value) > 0 {
			opts = append(opts, option(string(value)))
		}
	}
	addText(view.Key, event.WithKey)
	addText(view.Topic, event.WithTopic)
	addText(view.SchemaVersion, event.WithSchemaVersion)
	addText(view.Source, event.WithSource)
	addText(view.Subject, event.WithSubject)

	if view.Partition != envelope.AnyPartition {
		opts = append(opts, event.WithPartition(view.Partition))
	}
	for it := view.Headers.Iter(); it.Next(); {
		opts = append(opts, event.WithHeader(string(it.Key), it.Value))
	}

	addDate := func(has bool, ms int64, option func(time.Time) event.Option) {
		if has {
			opts = append(opts, option(time.UnixMilli(ms)))
		}
	}
	addDate(view.HasTime, view.Time, event.WithTime)
	addDate(view.HasDueAt, view.DueAt, event.WithDueAt)
	addDate(view.HasExpiresAt, view.ExpiresAt, event.WithExpiry)
	return opts
}
