package saga

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/service/sagas"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// maxRecent is the largest number of sagas that Desk.Recent yields.
const maxRecent = 1000

// Desk reads the states of sagas for operators and tests. It changes nothing.
type Desk struct{ store sagas.Store }

// NewDesk returns a Desk for all sagas in the database of box. It does no I/O.
func NewDesk(box *outbox.Box) *Desk { return &Desk{storeOf(box)} }

// Ref names one saga by the name of its definition and the text of its id.
type Ref struct{ Saga, ID string }

// Snapshot is the stored state of one saga. The times refer to the server's clock.
type Snapshot struct {
	Ref
	Version                                      int64 // 1 after the start, and one more with each change
	CreatedAt, UpdatedAt, CompletedAt, ExpiresAt time.Time
	State                                        json.RawMessage // in relaxed Extended JSON

	Timeouts      []string // names of the pending timeouts
	Compensations int      // number of stored compensations
	Sequence      int64    // number of the last message handled in sequence
	Held          []int64  // numbers of the held messages
	Stuck         string   // error of the step for the first held message
}

// Get returns one saga. It returns ErrNotFound if there is none, or if the name is unknown, and ErrNoID if the text cannot be
// an id of the saga.
func (d *Desk) Get(ctx context.Context, ref Ref) (Snapshot, error) {
	types, err := d.store.Types(ctx)
	if err != nil {
		return Snapshot{}, err
	}

	// The type defines how the text of the id is read.
	for _, t := range types {
		if t.Name != ref.Saga {
			continue
		}

		id, err := sagas.ParseID(t.ID, ref.ID)
		if err != nil {
			return Snapshot{}, fmt.Errorf("reading saga %s: %w", ref.Saga, err)
		}
		record, found, err := d.store.Load(ctx, ref.Saga, id)
		if err != nil {
			return Snapshot{}, err
		}
		if found {
			return newSnapshot(ref.Saga, record)
		}
	}
	return Snapshot{}, fmt.Errorf("%w: %s %s", ErrNotFound, ref.Saga, ref.ID)
}

// Recent iterates over the sagas with this name, the last changed first, at most 1,000. They include completed sagas that have
// a tombstone. If the name is unknown, there are none. The iteration ends after an error.
func (d *Desk) Recent(ctx context.Context, saga string) iter.Seq2[Snapshot, error] {
	return func(yield func(Snapshot, error) bool) {
		for record, err := range d.store.Recent(ctx, saga, maxRecent) {
			var snapshot Snapshot
			if err == nil {
				snapshot, err = newSnapshot(saga, record)
			}
			if !yield(snapshot, err) || err != nil {
				return
			}
		}
	}
}

// newSnapshot decodes the record of a saga.
func newSnapshot(saga string, record sagas.Record) (Snapshot, error) {
	snapshot := Snapshot{
		Ref:         Ref{Saga: saga, ID: sagas.FormatID(record.ID)},
		Version:     record.Version,
		CreatedAt:   record.CreatedAt,
		UpdatedAt:   record.UpdatedAt,
		CompletedAt: record.CompletedAt,
		ExpiresAt:   record.ExpiresAt,
	}

	var document document[bson.RawValue]
	if err := bson.Unmarshal(record.Body, &document); err != nil {
		return snapshot, fmt.Errorf("reading saga %s %s: %w", saga, snapshot.ID, err)
	}

	// Only a document can be converted to JSON, so the state is wrapped in one.
	text, err := bson.MarshalExtJSON(bson.D{{Key: "state", Value: document.State}}, false, false)
	if err != nil {
		return snapshot, fmt.Errorf("reading saga %s %s: %w", saga, snapshot.ID, err)
	}

	var wrapped struct {
		State json.RawMessage `json:"state"`
	}
	if err := json.Unmarshal(text, &wrapped); err != nil {
		return snapshot, fmt.Errorf("reading saga %s %s: %w", saga, snapshot.ID, err)
	}

	snapshot.State = wrapped.State
	snapshot.Compensations = len(document.Compensations)
	snapshot.Sequence = document.Sequence
	for _, t := range document.Timeouts {
		snapshot.Timeouts = append(snapshot.Timeouts, t.Name)
	}
	for _, h := range document.Held {
		snapshot.Held = append(snapshot.Held, h.Number)
	}
	if document.Stuck != nil {
		snapshot.Stuck = fmt.Sprintf("number %d, message %s: %s", document.Stuck.Number, document.Stuck.Message, document.Stuck.Reason)
	}

	return snapshot, nil
}
