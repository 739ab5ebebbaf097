package entity

import (
	"context"
	"errors"
	"fmt"
	"reflect"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/service/entities"
	"github.com/outrelay/outrelay/pkg/consumer"
)

// Projector is a handler that copies the changes of a Recorded to a collection for
// reading. Register it for all changes:
//
//	c.Handle("orders", consumer.Batch(0, projector.HandleBatch, "order.*"))
//
// If the relay uses the preset debezium, records have no type. Then configure a header for the
// type, or use a separate consumer for this topic with the pattern "*".
//
// Order: a change that is not newer than the stored version is ignored. So duplicates,
// redeliveries, replays and a rebuild during normal operation are harmless, with or without an
// inbox. A deletion stores its version in "<collection>_deleted", so that a late older change does
// not restore the entity. Two changes of one entity must not be handled at the same time in
// transactions that do not see each other. The lanes and the inbox of the consumer ensure that.
//
// Errors: a message that the Projector does not understand is never ignored. It returns
// ErrUnknownChange, which is also consumer.ErrMalformed, for another name, another kind of
// id, a missing version, and a value that is not a T. Fields that T does not have are not copied,
// so deploy the projector before a writer that adds a field.
//
// Transactions: if the collection is in the database of the handler's transaction, the change is
// part of it. Otherwise it is written separately, before the message is marked as handled.
//
// To rebuild a collection, project to a new one with another consumer group and call RecordAll. If
// the topic still contains all changes, you can reset the group to its beginning instead. Switch
// the readers when the new collection has caught up.
type Projector[T any, I ID] struct {
	config
	view    entities.View
	name    string
	project func(T) (any, error)
}

// NewProjector returns a Projector that copies the changes recorded under name to coll. It does no
// I/O. The error reports a nil collection, an empty name or an invalid option.
func NewProjector[T any, I ID](coll *mongo.Collection, name string, opts ...Option) (*Projector[T, I], error) {
	cfg, err := newConfig(coll, opts)
	if err == nil && name == "" {
		err = errors.New("the name is empty")
	}
	if err != nil {
		return nil, fmt.Errorf("entity: projector to %s: %w", cfg.target, err)
	}

	view := cfg.storage.View
	if view == nil {
		view = onMongoView(coll, cfg.versionField)
	}

	projector := &Projector[T, I]{config: cfg, view: view, name: name}
	// An Option has no type parameter, so the type of the function is checked here.
	if cfg.project != nil {
		project, ok := cfg.project.(func(T) (any, error))
		if !ok || project == nil {
			return nil, fmt.Errorf("entity: projector to %s: WithProjection got a %T, want a func(%s) (any, error)",
				cfg.target, cfg.project, reflect.TypeFor[T]())
		}

		projector.project = project
	}

	return projector, nil
}

// Handle copies one change. It returns ErrUnknownChange, an error of WithProjection, or an error
// of MongoDB.
func (p *Projector[T, I]) Handle(ctx context.Context, message *consumer.Message) error {
	return p.HandleBatch(ctx, []*consumer.Message{message})
}

// HandleBatch copies several changes together. It is a function for consumer.Batch. If several
// changes are of one entity, only the newest is written. It needs two to four commands regardless
// of the number of changes.
func (p *Projector[T, I]) HandleBatch(ctx context.Context, ms []*consumer.Message) error {
	states := make([]entities.State, 0, len(ms))
	index := make(map[string]int, len(ms))
	for _, m := range ms {
		state, err := p.readState(m)
		if err != nil {
			return err
		}

		// A view gets each entity at most once.
		i, ok := index[mapKey(state.ID)]
		switch {
		case !ok:
			index[mapKey(state.ID)] = len(states)
			states = append(states, state)
		case states[i].Version < state.Version:
			states[i] = state
		}
	}

	if len(states) == 0 {
		return nil
	}
	if err := p.view.Apply(ctx, states); err != nil {
		return fmt.Errorf("projecting %s to %s: %w", p.name, p.view.Name(), err)
	}

	return nil
}

// readState returns the state that message describes.
func (p *Projector[T, I]) readState(message *consumer.Message) (entities.State, error) {
	unknown := func(reason string, err error) (entities.State, error) {
		place := record.FormatPlace(message.Topic, message.Partition, message.Offset)
		unknown := fmt.Errorf("message %s at %s: %w: %w: %s", message.ID, place, consumer.ErrMalformed, ErrUnknownChange, reason)
		if err != nil {
			unknown = fmt.Errorf("%w: %w", unknown, err)
		}
		return entities.State{}, unknown
	}

	change, reason := readChange[I](message, p.name)
	if reason != "" {
		return unknown(reason, nil)
	}

	key, err := idValue(change.id)
	if err != nil {
		return unknown("the id cannot be stored", err)
	}

	state := entities.State{ID: key, Version: change.version}
	// A state without a document is a deletion.
	if change.deleted {
		return state, nil
	}

	// The document is decoded as T before it is projected, so a change of T's form is detected here.
	var entity T
	if err := decodeJSON(p.registry, message.Value, &entity); err != nil {
		return unknown("the value is not a valid "+reflect.TypeFor[T]().String(), err)
	}

	var doc any = entity
	if p.project != nil {
		if doc, err = p.project(entity); err != nil {
			return entities.State{}, err
		}
	}

	body, err := marshalEntity(p.registry, doc)
	if err == nil {
		state.Doc, err = composeDocument(key, body, p.versionField, change.version)
	}
	if err != nil {
		return entities.State{}, fmt.Errorf("projecting %s %s: encoding: %w", p.name, formatID(change.id), err)
	}

	return state, nil
}
