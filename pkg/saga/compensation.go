package saga

import (
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/event"
)

// Compensation remembers events that undo what this step does, in the saga's document, until Compensate emits them. Their
// ids stay what they are now. The error is what Event.Validate says.
func (in *Instance[S, I]) Compensation(events ...event.Event) error {
	for _, ev := range events {
		envelope, err := ev.MarshalBSON()
		if err != nil {
			return fmt.Errorf("compensation of saga %s %s: %w", in.h.saga.name, in.out.id, err)
		}
		in.doc.Compensations = append(in.doc.Compensations, envelope)
	}
	return nil
}

// Compensate emits the events that Compensation has remembered, the last one first, and forgets them. It returns how many
// there were.
func (in *Instance[S, I]) Compensate() (int, error) {
	events := make([]event.Event, 0, len(in.doc.Compensations))
	for _, envelope := range slices.Backward(in.doc.Compensations) {
		ev, err := restore(envelope)
		if err != nil {
			return 0, fmt.Errorf("compensation of saga %s %s: %w", in.h.saga.name, in.out.id, err)
		}
		events = append(events, ev)
	}
	in.doc.Compensations = nil
	in.Emit(events...)
	return len(events), nil
}

// ForgetCompensations is for the point from which there is no way back. It returns how many there were.
func (in *Instance[S, I]) ForgetCompensations() int {
	n := len(in.doc.Compensations)
	in.doc.Compensations = nil
	return n
}

// restore makes the event again of which envelope is the stored form.
func restore(envelope bson.Raw) (event.Event, error) {
	var v event.View
	if err := event.Parse(envelope, &v); err != nil {
		return event.Event{}, err
	}
	var payload any
	switch t := bson.Type(v.PayloadType); t {
	case bson.TypeNull:
	case bson.TypeBinary:
		payload = append([]byte{}, v.Payload...)
	case bson.TypeString:
		payload = string(v.Payload)
	case bson.TypeEmbeddedDocument:
		payload = bson.Raw(v.Payload)
	default:
		payload = bson.RawValue{Type: t, Value: v.Payload}
	}
	return event.New(string(v.AggregateType), string(v.AggregateID), string(v.Type), payload, restoreOptions(envelope, &v)...), nil
}

func restoreOptions(envelope bson.Raw, v *event.View) []event.Option {
	var opts []event.Option
	switch id := envelope.Lookup("_id"); id.Type {
	case bson.TypeBinary:
		opts = append(opts, event.WithID(uuid.UUID(v.ID)))
	case bson.TypeObjectID:
		opts = append(opts, event.WithID(id.ObjectID()))
	default:
		opts = append(opts, event.WithID(string(v.ID)))
	}
	text := func(b []byte, option func(string) event.Option) {
		if len(b) > 0 {
			opts = append(opts, option(string(b)))
		}
	}
	text(v.Key, event.WithKey)
	text(v.Topic, event.WithTopic)
	text(v.ContentType, event.WithContentType)
	text(v.SchemaVersion, event.WithSchemaVersion)
	text(v.Source, event.WithSource)
	text(v.Subject, event.WithSubject)
	if v.Partition != event.AnyPartition {
		opts = append(opts, event.WithPartition(v.Partition))
	}
	for it := v.Headers.Iter(); it.Next(); {
		opts = append(opts, event.WithHeader(string(it.Key), it.Value))
	}
	date := func(has bool, ms int64, option func(time.Time) event.Option) {
		if has {
			opts = append(opts, option(time.UnixMilli(ms)))
		}
	}
	date(v.HasTime, v.Time, event.WithTime)
	date(v.HasDueAt, v.DueAt, event.WithDueAt)
	date(v.HasExpiresAt, v.ExpiresAt, event.WithExpiresAt)
	return opts
}
