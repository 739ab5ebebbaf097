package entity

import (
	"context"
	"errors"
	"fmt"
	"reflect"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/pkg/consumer"
)

// Projector is a consumer.Handler that mirrors the changes of a Recorded to a collection for reading. Register it for all
// of them:
//
//	c.Handle("order.*", projector)
//
// (Where the relay writes records by its debezium preset, which names no type, that takes a header for it in its
// configuration, or a consumer of this topic alone with the pattern "*".)
//
// An entity goes only forward: a change that is not newer than what the collection has is passed over, so duplicates,
// redeliveries, replays and a rebuild beside the running stream do no harm, with or without an inbox. A deletion leaves its
// version in "<collection>_deleted", so that an older change that comes late does not bring the entity back. Two changes of
// one entity must not be handled at the same moment in transactions that do not see each other; the consumer's lanes and
// its inbox see to that.
//
// What it does not know is an *UnknownChangeError (also a consumer.ErrValidation) and never passed over: another name,
// another kind of id, no version, a value that is no T. A field that T does not have is not mirrored, so a projector is
// deployed before the writer that adds one.
//
// The collection may be in any database. If it is that of the handler's transaction, the change is part of it. Otherwise it
// is written by itself, before the message is marked as handled.
//
// To rebuild: project to a new collection under a consumer group of its own, call RecordAll (or reset the group to the
// topic's beginning, where that still has everything), and let readers change over when it has caught up.
type Projector[T any, I ID] struct {
	config
	view    View
	name    string
	project func(T) (any, error)
}

// View is where a Projector writes. OnMongoView is the one for services.
type View interface {
	// Name is for errors.
	Name() string
	// Apply brings entities, each at most once in a call, to a state, unless it has them at that version or a later one,
	// deleted ones included.
	Apply(ctx context.Context, states []State) error
}

// State is what an entity is to be in a View.
type State struct {
	ID      bson.RawValue
	Version int64
	Doc     bson.Raw // with _id and version; nil: deleted
}

// NewProjector makes a Projector of the changes recorded under name to coll. It does no I/O.
func NewProjector[T any, I ID](coll *mongo.Collection, name string, opts ...Option) (*Projector[T, I], error) {
	if coll == nil {
		return nil, errors.New("entity: the collection is nil")
	}
	cfg, err := newConfig(opts)
	if err != nil {
		return nil, fmt.Errorf("entity: projector to %s: %w", coll.Name(), err)
	}
	v, err := OnMongoView(coll, cfg.versionField)
	if err != nil {
		return nil, err
	}
	return NewProjectorOn[T, I](v, name, opts...)
}

// NewProjectorOn is NewProjector to any View.
func NewProjectorOn[T any, I ID](v View, name string, opts ...Option) (*Projector[T, I], error) {
	if v == nil || name == "" {
		return nil, errors.New("entity: projector without a view or a name")
	}
	cfg, err := newConfig(opts)
	if err != nil {
		return nil, fmt.Errorf("entity: projector to %s: %w", v.Name(), err)
	}
	p := &Projector[T, I]{config: cfg, view: v, name: name}
	if cfg.project != nil {
		f, ok := cfg.project.(func(T) (any, error))
		if !ok || f == nil {
			return nil, fmt.Errorf("entity: projector to %s: ProjectAs has a %T, not a func(%s) (any, error)", v.Name(), cfg.project, reflect.TypeFor[T]())
		}
		p.project = f
	}
	return p, nil
}

// Handle mirrors one change.
func (p *Projector[T, I]) Handle(ctx context.Context, m *consumer.Message) error {
	return p.HandleBatch(ctx, []*consumer.Message{m})
}

// HandleBatch mirrors changes together: a consumer.BatchHandlerFunc. Of several of one entity only the newest is written.
// It costs two to four commands, however many there are.
func (p *Projector[T, I]) HandleBatch(ctx context.Context, ms []*consumer.Message) error {
	states := make([]State, 0, len(ms))
	place := make(map[string]int, len(ms))
	for _, m := range ms {
		s, err := p.state(m)
		if err != nil {
			return err
		}
		if i, ok := place[keyOf(s.ID)]; !ok {
			place[keyOf(s.ID)] = len(states)
			states = append(states, s)
		} else if states[i].Version < s.Version {
			states[i] = s
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

// state is what the message wants the entity to be.
func (p *Projector[T, I]) state(m *consumer.Message) (State, error) {
	unknown := func(reason string, err error) (State, error) {
		return State{}, &UnknownChangeError{Message: fmt.Sprintf("%s/%d/%d", m.Topic, m.Partition, m.Offset), ID: m.ID, Reason: reason, Err: err}
	}
	c, reason := readChange[I](m, p.name)
	if reason != "" {
		return unknown(reason, nil)
	}
	key, err := raw(c.id)
	if err != nil {
		return unknown("the id cannot be stored", err)
	}
	s := State{ID: key, Version: c.version}
	if c.deleted {
		return s, nil
	}
	var t T
	if err := decodeJSON(p.registry, m.Value, &t); err != nil {
		return unknown("the value is no "+reflect.TypeFor[T]().String(), err)
	}
	var doc any = t
	if p.project != nil {
		if doc, err = p.project(t); err != nil {
			return State{}, err
		}
	}
	body, err := marshal(p.registry, doc)
	if err == nil {
		s.Doc, err = compose(key, body, p.versionField, c.version)
	}
	if err != nil {
		return State{}, fmt.Errorf("projecting %s %s: encoding: %w", p.name, text(c.id), err)
	}
	return s, nil
}
