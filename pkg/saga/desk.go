package saga

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// MaxRecent is the most that Desk.Recent returns.
const MaxRecent = 1000

// Desk looks into sagas, for people: which there are, and what they are at. It changes nothing.
type Desk struct {
	store Store
	types func(context.Context) ([]TypeInfo, error)
}

// NewDesk looks into the sagas that Registry.Prepare has written down in the store, by whatever program.
func NewDesk(store Store) *Desk { return &Desk{store: store, types: store.Types} }

// Snapshot is one saga as it is stored.
type Snapshot struct {
	Saga        string          `json:"saga"`
	ID          string          `json:"id"`
	Version     int64           `json:"version"`
	CreatedAt   time.Time       `json:"created_at"`
	UpdatedAt   time.Time       `json:"updated_at"`
	CompletedAt time.Time       `json:"completed_at,omitzero"`
	ExpiresAt   time.Time       `json:"expires_at,omitzero"`
	State       json.RawMessage `json:"state"` // as relaxed Extended JSON

	Timeouts      []string `json:"timeouts,omitempty"`      // names of those to come
	Compensations int      `json:"compensations,omitempty"` // how many are remembered
	Sequence      int64    `json:"sequence,omitempty"`      // number of the last message handled in sequence
	Held          []int64  `json:"held,omitempty"`          // numbers of those that wait
	Stuck         string   `json:"stuck,omitempty"`         // why the step of the first of them failed, if its turn has come
}

// Types are the sagas by name.
func (d *Desk) Types(ctx context.Context) ([]TypeInfo, error) { return d.types(ctx) }

// Read is the saga of that name with the id that the text says, and whether there is one; a name that is not known has
// none. A text that can be no id of the saga's kind is an *IDError.
func (d *Desk) Read(ctx context.Context, saga, id string) (Snapshot, bool, error) {
	t, known, err := d.known(ctx, saga)
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
	s, err := snapshot(saga, r)
	return s, err == nil, err
}

// Recent are the sagas of that name that were changed last, latest first, finished ones included while their tombstones
// are there. limit is taken as between 0 and MaxRecent; a name that is not known has none.
func (d *Desk) Recent(ctx context.Context, saga string, limit int) ([]Snapshot, error) {
	list := []Snapshot{}
	_, known, err := d.known(ctx, saga)
	if limit = min(max(limit, 0), MaxRecent); err != nil || !known || limit == 0 {
		return list, err
	}
	records, err := d.store.Recent(ctx, saga, limit)
	if err != nil {
		return list, err
	}
	for _, r := range records {
		s, err := snapshot(saga, r)
		if err != nil {
			return list, err
		}
		list = append(list, s)
	}
	return list, nil
}

func (d *Desk) known(ctx context.Context, saga string) (TypeInfo, bool, error) {
	types, err := d.types(ctx)
	for _, t := range types {
		if t.Name == saga {
			return t, true, err
		}
	}
	return TypeInfo{}, false, err
}

func snapshot(saga string, r Record) (Snapshot, error) {
	s := Snapshot{
		Saga: saga, ID: FormatID(r.ID), Version: r.Version,
		CreatedAt: r.CreatedAt, UpdatedAt: r.UpdatedAt, CompletedAt: r.CompletedAt, ExpiresAt: r.ExpiresAt,
	}
	var d document[bson.RawValue]
	if err := bson.Unmarshal(r.Body, &d); err != nil {
		return s, fmt.Errorf("reading saga %s %s: %w", saga, s.ID, err)
	}
	text, err := bson.MarshalExtJSON(bson.D{{Key: "state", Value: d.State}}, false, false)
	if err != nil {
		return s, fmt.Errorf("reading saga %s %s: %w", saga, s.ID, err)
	}
	var only struct {
		State json.RawMessage `json:"state"`
	}
	if err := json.Unmarshal(text, &only); err != nil {
		return s, fmt.Errorf("reading saga %s %s: %w", saga, s.ID, err)
	}
	s.State, s.Compensations, s.Sequence = only.State, len(d.Compensations), d.Sequence
	for _, t := range d.Timeouts {
		s.Timeouts = append(s.Timeouts, t.Name)
	}
	if d.Stuck != nil {
		s.Stuck = fmt.Sprintf("number %d, message %s: %s", d.Stuck.Number, d.Stuck.Message, d.Stuck.Reason)
	}
	for _, h := range d.Held {
		s.Held = append(s.Held, h.Number)
	}
	return s, nil
}
