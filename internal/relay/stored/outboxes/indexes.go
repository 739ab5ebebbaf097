package outboxes

import (
	"context"
	"errors"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// Indexes selects the indexes that the relay wants on an outbox. They are the services' collections, so the relay
// creates only those that it needs for a write of its own, and works without each of them.
type Indexes struct {
	// Purge is for {ts}: the purge finds the delivered envelopes by it. Without it, each purge reads the collection.
	Purge bool
	// Scheduled is for {dueAt, slot}: the relay finds due envelopes by it. Without it, each look reads the collection.
	Scheduled bool
	// SentTTL is purge.ttl: the server removes marked envelopes. Without it, they stay.
	SentTTL time.Duration
}

// List returns the selected indexes, without that of SentTTL.
func (x Indexes) List() []mongodb.Index {
	var list []mongodb.Index
	if x.Purge {
		list = append(list, mongodb.Index{Name: "ts_1", Keys: mongodb.Ascending("ts")})
	}
	if x.Scheduled {
		list = append(list, mongodb.Index{
			Name: "dueAt_1_slot_1", Keys: mongodb.Ascending("dueAt", "slot"),
			Partial: bson.D{{Key: "dueAt", Value: bson.D{{Key: "$exists", Value: true}}}},
		})
	}
	return list
}

// Missing returns the selected indexes that the collection lacks.
func (x Indexes) Missing(ctx context.Context, coll *mongo.Collection) ([]mongodb.Index, error) {
	list := x.List()
	if x.SentTTL > 0 {
		list = append(list, sentIndex(x.SentTTL))
	}
	// Without a selection, the privilege listIndexes is not needed.
	if len(list) == 0 {
		return nil, nil
	}
	return mongodb.MissingIndexes(ctx, coll, list)
}

// Ensure creates the selected indexes that the collection lacks, and returns the mongosh statements of those that it
// created, also with an error. It blocks until they are built. If the collection was dropped or renamed, the error is
// [mongodb.ErrCollectionGone] and nothing exists again. It is [mongodb.ErrIndexConflict] only if another attempt cannot
// succeed. The UUID of outbox must be known. For the first scheduled envelope of an outbox, call it with Scheduled only.
func (x Indexes) Ensure(ctx context.Context, client *mongo.Client, outbox Outbox) (created []string, err error) {
	list := x.List()
	if len(list) == 0 {
		return nil, nil
	}

	coll := mongodb.Database(client, outbox.DB).Collection(outbox.Coll)
	missing, err := mongodb.MissingIndexes(ctx, coll, list)
	if mongodb.HasCode(err, mongodb.CodeUnauthorized) {
		// A user who may not list indexes may still create them. The server skips indexes that exist.
		missing, err = list, nil
	}
	if err != nil || len(missing) == 0 {
		return nil, err
	}

	create := func(indexes ...mongodb.Index) error {
		if err := mongodb.CreateIndexesIn(ctx, coll, outbox.UUID, indexes); err != nil {
			return err
		}
		for _, i := range indexes {
			created = append(created, i.Statement(outbox.DB, outbox.Coll))
		}
		return nil
	}
	// Together, because each creation blocks the outbox for a moment.
	err = create(missing...)
	if !errors.Is(err, mongodb.ErrIndexConflict) {
		return created, err
	}

	// An index of the service that conflicts with one of them must not prevent the others.
	var conflicts, others []error
	for _, i := range missing {
		if err := create(i); errors.Is(err, mongodb.ErrIndexConflict) {
			conflicts = append(conflicts, err)
		} else if err != nil {
			others = append(others, err)
		}
	}
	// A conflict is final, but another attempt may create the others. It meets the conflicts again.
	if len(others) > 0 {
		return created, errors.Join(others...)
	}
	return created, errors.Join(conflicts...)
}

// EnsureIndexes creates the indexes for tests and benchmarks of the queries on outboxes, and the collection if it
// does not exist.
func EnsureIndexes(ctx context.Context, coll *mongo.Collection) error {
	return mongodb.EnsureIndexSet(ctx, coll, Indexes{Purge: true, Scheduled: true}.List())
}
