package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/saga"
)

// SagaType is one kind of saga that a service has written down.
type SagaType struct {
	Database string `json:"database"`
	Name     string `json:"name"`
	Owner    string `json:"owner"` // the Go type of its state, unless the service says otherwise
	IDKind   string `json:"id_kind"`
	Count    int64  `json:"count"` // instances and tombstones, from the collection's metadata
}

// SagaTypes are those of all databases in which the watcher has an outbox, up to a hundred.
func (k Desk) SagaTypes(ctx context.Context) ([]SagaType, error) {
	out := []SagaType{}
	names, err := k.serviceDatabases(ctx, "")
	if err != nil {
		return out, err
	}
	for _, name := range names {
		there, err := k.services(ctx, name)
		if err != nil {
			return out, err
		}
		if !there.sagas {
			continue
		}
		list, err := k.sagaTypesOf(ctx, name)
		if err != nil {
			return out, err
		}
		out = append(out, list...)
	}
	return out, nil
}

func (k Desk) sagaTypesOf(ctx context.Context, database string) ([]SagaType, error) {
	db := k.database(database)
	s, err := saga.NewMongoStore(db)
	if err != nil {
		return nil, err
	}
	types, err := s.Types(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]SagaType, len(types))
	for i, t := range types {
		out[i] = SagaType{Database: database, Name: t.Name, Owner: t.Owner, IDKind: string(t.ID)}
		if out[i].Count, err = db.Collection(t.Name).EstimatedDocumentCount(ctx); err != nil {
			return nil, wrapped("counting sagas of "+t.Name, err)
		}
	}
	return out, nil
}

// Saga is one instance. Its state is business data: only [Desk.Saga] shows it, where it is asked for.
type Saga struct {
	Database      string          `json:"database"`
	Saga          string          `json:"saga"`
	ID            string          `json:"id"`
	Version       int64           `json:"version"`
	CreatedAt     time.Time       `json:"created_at"`
	UpdatedAt     time.Time       `json:"updated_at"`
	CompletedAt   *time.Time      `json:"completed_at,omitempty"`
	ExpiresAt     *time.Time      `json:"expires_at,omitempty"`
	Timeouts      []string        `json:"timeouts,omitempty"`      // names of those to come; not in lists
	Compensations int             `json:"compensations,omitempty"` // how many are remembered; not in lists
	Sequence      int64           `json:"sequence,omitempty"`
	Held          []int64         `json:"held,omitempty"` // numbers of messages that wait for their turn; not in lists
	State         json.RawMessage `json:"state,omitempty"`
}

// SagaPage is a page of instances, those that changed last first.
type SagaPage struct {
	Sagas []Saga `json:"sagas"`
	Total int64  `json:"total"` // of the type, from the collection's metadata
	Next  string `json:"next,omitempty"`
}

type sagaPlace struct {
	At bson.DateTime `bson:"a"`
	ID bson.RawValue `bson:"i"`
}

// Sagas reads a page of the instances of one type; finished ones are among them while their tombstones are there. There is
// no index by the last change, which each step of a saga would pay for: a page reads the collection.
func (k Desk) Sagas(ctx context.Context, database, name string, limit int, after string) (SagaPage, error) {
	page := SagaPage{Sagas: []Saga{}}
	t, err := k.sagaType(ctx, database, name)
	if err != nil {
		return page, err
	}
	query := bson.D{}
	if after != "" {
		var p sagaPlace
		if err := parseCursor(after, &p); err != nil {
			return page, err
		}
		query = behindPlace("updatedAt", p.At, p.ID)
	}
	limit = pageSize(limit)
	cur, err := store.Majority(k.database(database).Collection(name)).Find(ctx, query, options.Find().SetAllowDiskUse(true).SetLimit(int64(limit)).
		SetSort(bson.D{{Key: "updatedAt", Value: -1}, {Key: "_id", Value: -1}}).
		SetProjection(bson.D{{Key: "version", Value: 1}, {Key: "createdAt", Value: 1}, {Key: "updatedAt", Value: 1}, {Key: "completedAt", Value: 1}, {Key: "expiresAt", Value: 1}}))
	if err != nil {
		return page, wrapped("listing sagas of "+name, err)
	}
	var docs []struct {
		ID          bson.RawValue `bson:"_id"`
		Version     int64         `bson:"version"`
		CreatedAt   time.Time     `bson:"createdAt"`
		UpdatedAt   time.Time     `bson:"updatedAt"`
		CompletedAt *time.Time    `bson:"completedAt"`
		ExpiresAt   *time.Time    `bson:"expiresAt"`
	}
	if err := cur.All(ctx, &docs); err != nil {
		return page, wrapped("listing sagas of "+name, err)
	}
	for _, d := range docs {
		page.Sagas = append(page.Sagas, Saga{
			Database: database, Saga: name, ID: canonical(d.ID), Version: d.Version,
			CreatedAt: d.CreatedAt.UTC(), UpdatedAt: d.UpdatedAt.UTC(), CompletedAt: d.CompletedAt, ExpiresAt: d.ExpiresAt,
		})
	}
	page.Total = t.Count
	if n := len(docs); n == limit {
		page.Next, err = cursorText(sagaPlace{bson.NewDateTimeFromTime(docs[n-1].UpdatedAt), docs[n-1].ID})
	}
	return page, err
}

// sagaType finds a type by its name; one that is not written down is not looked into, whatever collection has its name.
func (k Desk) sagaType(ctx context.Context, database, name string) (SagaType, error) {
	if _, err := k.serviceDatabases(ctx, database); err != nil {
		return SagaType{}, err
	}
	if database == "" {
		return SagaType{}, invalid("name the database of the saga")
	}
	types, err := k.sagaTypesOf(ctx, database)
	if err != nil {
		return SagaType{}, err
	}
	for _, t := range types {
		if t.Name == name {
			return t, nil
		}
	}
	return SagaType{}, fmt.Errorf("saga %q of database %s: %w", name, database, store.ErrNotFound)
}

// Saga reads one instance, with its state if payload asks for it.
func (k Desk) Saga(ctx context.Context, database, name, id string, payload bool) (Saga, error) {
	if _, err := k.sagaType(ctx, database, name); err != nil {
		return Saga{}, err
	}
	s, err := saga.NewMongoStore(k.database(database))
	if err != nil {
		return Saga{}, err
	}
	got, found, err := saga.NewDesk(s).Read(ctx, name, id)
	var wrong *saga.IDError
	switch {
	case errors.As(err, &wrong):
		return Saga{}, invalid("%v", wrong)
	case err != nil:
		return Saga{}, err
	case !found:
		return Saga{}, fmt.Errorf("saga %s %s: %w", name, id, store.ErrNotFound)
	}
	out := Saga{
		Database: database, Saga: name, ID: got.ID, Version: got.Version, CreatedAt: got.CreatedAt.UTC(), UpdatedAt: got.UpdatedAt.UTC(),
		CompletedAt: unlessZero(got.CompletedAt), ExpiresAt: unlessZero(got.ExpiresAt),
		Timeouts: got.Timeouts, Compensations: got.Compensations, Sequence: got.Sequence, Held: got.Held,
	}
	if payload {
		out.State = k.d.Redact.json(got.State)
	}
	return out, nil
}

func unlessZero(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	t = t.UTC()
	return &t
}
