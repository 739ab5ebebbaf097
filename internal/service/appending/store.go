package appending

import (
	"context"
	"log/slog"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/service/agenda"
	"github.com/outrelay/outrelay/pkg/event"
)

// Parts are the parts of an outbox.Box that other packages of this module use: see outbox.Box.Parts.
type Parts struct {
	Store      Store
	Collection *mongo.Collection // with majority concerns on the primary; nil if the Store is not MongoDB
	Log        *slog.Logger
}

// Store stores the envelopes of an outbox.Box: see outbox.NewOver. Its methods join the transaction of their context: see internal/mongodb/transaction.
type Store interface {
	// Name returns the name of the collection.
	Name() string

	// Transaction runs fn as one unit of work. See outbox.Box.Transaction. With snapshot, all reads see one point in time.
	Transaction(ctx context.Context, snapshot bool, fn func(ctx context.Context) error) error

	// Insert stores the envelopes in this order.
	Insert(ctx context.Context, envelopes []Envelope) error

	// Stored returns the stored envelopes in the order of their inserts.
	Stored(ctx context.Context) ([]bson.Raw, error)

	// Now returns the time by the clock that decides when scheduled events are due. It does not join the transaction.
	Now(ctx context.Context) (time.Time, error)

	// The methods for scheduled events are the functions of package agenda.

	Cancel(ctx context.Context, id event.ID) (bool, error)
	Move(ctx context.Context, id event.ID, at time.Time) (bool, error)
	ReadPage(ctx context.Context, q agenda.Query, size int, after string) (agenda.Page, error)
	CancelMatching(ctx context.Context, q agenda.Query) (int64, error)
}
