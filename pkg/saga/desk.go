package saga

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// MaxRecent is the largest number of sagas that Desk.Recent returns.
const MaxRecent = 1000

// Desk reads types and states of sagas for operators. It changes nothing.
type Desk struct {
	store Store
	types func(context.Context) ([]TypeInfo, error)
}

// NewDesk returns a Desk for all sagas whose types are in the store. Registry.Prepare of any
// program has stored them.
func NewDesk(store Store) *Desk { return &Desk{store: store, types: store.Types} }

// Snapshot is the stored state of one saga. The times refer to the server's clock.
type Snapshot struct {
	Saga        string          `json:"saga"`
	ID          string          `json:"id"`
	Version     int64           `json:"version"`
	CreatedAt   time.Time       `json:"created_at"`
	UpdatedAt   time.Time       `json:"updated_at"`
	CompletedAt time.Time       `json:"completed_at,omitzero"`
	ExpiresAt   time.Time       `json:"expires_at,omitzero"`
	State       json.RawMessage `json:"state"` // in relaxed Extended JSON

	Timeouts      []string `json:"timeouts,omitempty"`      // names of the pending timeouts
	Compensations int      `json:"compensations,omitempty"` // number of stored compensations
	Sequence      int64    `json:"sequence,omitempty"`      // number of the last message handled in sequence
	Held          []int64  `json:"held,omitempty"`          // numbers of the held messages
	Stuck         string   `json:"stuck,omitempty"`         // error of the step for the first held message
}

// Types returns the types of sagas, sorted by name.
func (d *Desk) Types(ctx context.Context) ([]TypeInfo, error) { return d.types(ctx) }

// Read returns the saga with this name and id, and whether it exists. If the name is unknown, it
// does not exist. If the text cannot be an id of the saga, the error is an *IDError.
func (d *Desk) Read(ctx context.Context, saga, id string) (Snapshot, bool, error) {
	t, known, err := d.findType(ctx, saga)
	if err != nil || !known {
		return Snapshot{}, false, err
	}

	native, err := ParseID(t.ID, id)
	if err != nil {
		return Snapshot{}, false, fmt.Errorf("reading saga %s: %w", saga, err)
	}

	r, found, err := d.store.Load(ctx, saga, native)
	if err != nil || !found {
		return Snapshot{}, false, err
	}

	s, err := newSnapshot(saga, r)
	return s, err == nil, err
}

// Recent returns the sagas with this name that were changed last, the latest first. They include
// completed sagas that have a tombstone. limit is reduced to MaxRecent. If the name is unknown, the
// result is empty.
func (d *Desk) Recent(ctx context.Context, saga string, limit int) ([]Snapshot, error) {
	list := []Snapshot{}
	limit = min(max(limit, 0), MaxRecent)
	_, known, err := d.findType(ctx, saga)
	if err != nil || !known || limit == 0 {
		return list, err
	}

	records, err := d.store.Recent(ctx, saga, limit)
	if err != nil {
		return list, err
	}

	for _, r := range records {
		s, err := newSnapshot(saga, r)
		if err != nil {
			return list, err
		}
		list = append(list, s)
	}

	return list, nil
}

// findType returns the type with this name, and whether it exists.
func (d *Desk) findType(ctx context.Context, saga string) (TypeInfo, bool, error) {
	types, err := d.types(ctx)
	for _, t := range types {
		if t.Name == saga {
			return t, true, err
		}
	}
	return TypeInfo{}, false, err
}

// newSnapshot decodes the record of a saga.
func newSnapshot(saga string, r Record) (Snapshot, error) {
	s := Snapshot{
		Saga:        saga,
		ID:          FormatID(r.ID),
		Version:     r.Version,
		CreatedAt:   r.CreatedAt,
		UpdatedAt:   r.UpdatedAt,
		CompletedAt: r.CompletedAt,
		ExpiresAt:   r.ExpiresAt,
	}

	var d document[bson.RawValue]
	if err := bson.Unmarshal(r.Body, &d); err != nil {
		return s, fmt.Errorf("reading saga %s %s: %w", saga, s.ID, err)
	}

	// Only a document can be converted to JSON, so the state is wrapped in one.
	text, err := bson.MarshalExtJSON(bson.D{{Key: "state", Value: d.State}}, false, false)
	if err != nil {
		return s, fmt.Errorf("reading saga %s %s: %w", saga, s.ID, err)
	}

	var wrapped struct {
		State json.RawMessage `json:"state"`
	}
	if err := json.Unmarshal(text, &wrapped); err != nil {
		return s, fmt.Errorf("reading saga %s %s: %w", saga, s.ID, err)
	}

	s.State = wrapped.State
	s.Compensations = len(d.Compensations)
	s.Sequence = d.Sequence
	for _, t := range d.Timeouts {
		s.Timeouts = append(s.Timeouts, t.Name)
	}
	for _, h := range d.Held {
		s.Held = append(s.Held, h.Number)
	}
	if d.Stuck != nil {
		s.Stuck = fmt.Sprintf("number %d, message %s: %s", d.Stuck.Number, d.Stuck.Message, d.Stuck.Reason)
	}

	return s, nil
}
