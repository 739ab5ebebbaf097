package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
	"github.com/outrelay/outrelay/internal/service/inventory"
	"github.com/outrelay/outrelay/internal/service/sagas"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/saga"
)

// SagaType is one type of saga that a service has registered.
type SagaType struct {
	Database string `json:"database"`
	Name     string `json:"name"`
	Owner    string `json:"owner"` // the Go type of its state, unless the service sets another name
	IDKind   string `json:"id_kind"`
	Count    int64  `json:"count"` // instances and tombstones, from the collection's metadata
}

// Sagas are the sagas in [Operator.ServiceDatabases].
type Sagas struct{ op Operator }

// Types returns the registered saga types.
func (s Sagas) Types(ctx context.Context) ([]SagaType, error) {
	types := []SagaType{}
	databases, err := s.op.ServiceDatabases(ctx, "")
	if err != nil {
		return types, err
	}

	err = s.op.forEachService(ctx, databases, func(db string, found inventory.Inventory) error {
		if !found.Sagas {
			return nil
		}
		list, err := s.listTypes(ctx, db)
		types = append(types, list...)
		return err
	})
	return types, err
}

func (s Sagas) listTypes(ctx context.Context, database string) ([]SagaType, error) {
	db := s.op.database(database)
	registered, err := sagas.NewMongo(db).Types(ctx)
	if err != nil {
		return nil, err
	}

	types := make([]SagaType, len(registered))
	for i, t := range registered {
		types[i] = SagaType{Database: database, Name: t.Name, Owner: t.Owner, IDKind: string(t.ID)}
		if types[i].Count, err = db.Collection(t.Name).EstimatedDocumentCount(ctx); err != nil {
			return nil, wrapError("counting sagas of "+t.Name, err)
		}
	}
	return types, nil
}

// Saga is one instance. Its state is business data: only [Sagas.Show] returns it, on request.
type Saga struct {
	Database      string          `json:"database"`
	Saga          string          `json:"saga"`
	ID            string          `json:"id"`
	Version       int64           `json:"version"`
	CreatedAt     time.Time       `json:"created_at"`
	UpdatedAt     time.Time       `json:"updated_at"`
	CompletedAt   *time.Time      `json:"completed_at,omitempty"`
	ExpiresAt     *time.Time      `json:"expires_at,omitempty"`
	Timeouts      []string        `json:"timeouts,omitempty"`      // names of pending timeouts; not in lists
	Compensations int             `json:"compensations,omitempty"` // number of recorded compensations; not in lists
	Sequence      int64           `json:"sequence,omitempty"`
	Held          []int64         `json:"held,omitempty"` // numbers of messages that wait for their turn; not in lists
	State         json.RawMessage `json:"state,omitempty"`
}

// lastChangedFirst is the order of a list of instances.
var lastChangedFirst = listing.Order{Field: "updatedAt", Down: true}

// List returns a page of the instances of one type. It includes finished instances while their
// tombstones exist. A page reads the collection: there is no index by the last change, because
// every step of a saga would have to update it.
func (s Sagas) List(ctx context.Context, database, name string, limit int, after string) (Page[Saga], error) {
	page := newPage[Saga]()
	sagaType, err := s.findType(ctx, database, name)
	if err != nil {
		return page, err
	}
	// Counting would read the collection, so the total is the estimate of its metadata.
	page.Total = sagaType.Count

	coll := mongodb.Majority(s.op.database(database).Collection(name))
	type document struct {
		ID          bson.RawValue `bson:"_id"`
		Version     int64         `bson:"version"`
		CreatedAt   time.Time     `bson:"createdAt"`
		UpdatedAt   time.Time     `bson:"updatedAt"`
		CompletedAt *time.Time    `bson:"completedAt"`
		ExpiresAt   *time.Time    `bson:"expiresAt"`
	}
	docs, next, err := listing.ReadPage[document](ctx, coll, lastChangedFirst, bson.D{}, after, pageSize(limit), options.Find().
		SetAllowDiskUse(true).
		SetProjection(mongodb.Fields("version", "createdAt", "updatedAt", "completedAt", "expiresAt")))
	if err != nil {
		return page, mongodb.DescribeError(err, "listing sagas of "+name, "find", mongodb.Namespace(coll))
	}
	page.Next = next

	for _, d := range docs {
		page.Items = append(page.Items, Saga{
			Database:    database,
			Saga:        name,
			ID:          envelope.CanonicalText(d.ID),
			Version:     d.Version,
			CreatedAt:   d.CreatedAt.UTC(),
			UpdatedAt:   d.UpdatedAt.UTC(),
			CompletedAt: d.CompletedAt,
			ExpiresAt:   d.ExpiresAt,
		})
	}
	return page, nil
}

// findType returns the registered type with this name. A collection that is not registered as a
// saga type is never read.
func (s Sagas) findType(ctx context.Context, database, name string) (SagaType, error) {
	if _, err := s.op.ServiceDatabases(ctx, database); err != nil {
		return SagaType{}, err
	}
	if database == "" {
		return SagaType{}, invalidRequest("name the database of the saga")
	}

	types, err := s.listTypes(ctx, database)
	if err != nil {
		return SagaType{}, err
	}
	for _, t := range types {
		if t.Name == name {
			return t, nil
		}
	}
	return SagaType{}, fmt.Errorf("saga %q of database %s: %w", name, database, mongodb.ErrNotFound)
}

// Show returns one instance. It includes the state if payload is true. Before, it writes an entry to the audit log, and returns an
// error if that fails.
func (s Sagas) Show(ctx context.Context, database, name, id string, payload bool) (Saga, error) {
	if _, err := s.findType(ctx, database, name); err != nil {
		return Saga{}, err
	}
	// The desk reads an instance in the format of the library that stores it.
	box, err := outbox.New(s.op.database(database))
	if err != nil {
		return Saga{}, err
	}

	instance, err := saga.NewDesk(box).Get(ctx, saga.Ref{Saga: name, ID: id})
	switch {
	case errors.Is(err, saga.ErrNoID):
		return Saga{}, invalidRequest("%v", err)
	case errors.Is(err, saga.ErrNotFound):
		return Saga{}, fmt.Errorf("saga %s %s: %w", name, id, mongodb.ErrNotFound)
	case err != nil:
		return Saga{}, err
	}

	out := Saga{
		Database:      database,
		Saga:          name,
		ID:            instance.ID,
		Version:       instance.Version,
		CreatedAt:     instance.CreatedAt.UTC(),
		UpdatedAt:     instance.UpdatedAt.UTC(),
		CompletedAt:   nilIfZero(instance.CompletedAt),
		ExpiresAt:     nilIfZero(instance.ExpiresAt),
		Timeouts:      instance.Timeouts,
		Compensations: instance.Compensations,
		Sequence:      instance.Sequence,
		Held:          instance.Held,
	}
	if !payload {
		return out, nil
	}

	if err := logShown(ctx, s.op, bson.D{{Key: "collection", Value: database + "." + name}, {Key: "id", Value: id}}); err != nil {
		return Saga{}, err
	}
	out.State = s.op.Redact.redactJSON(instance.State)
	return out, nil
}

func nilIfZero(moment time.Time) *time.Time {
	if moment.IsZero() {
		return nil
	}
	moment = moment.UTC()
	return &moment
}
