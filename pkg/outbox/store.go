package outbox

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb/cursor"
	"github.com/outrelay/outrelay/internal/mongodb/transaction"
	"github.com/outrelay/outrelay/internal/service/agenda"
	"github.com/outrelay/outrelay/internal/service/appending"
	"github.com/outrelay/outrelay/pkg/event"
)

// mongoStore is the store of a Box in a collection of MongoDB.
type mongoStore struct{ coll *mongo.Collection }

func (s mongoStore) Name() string { return s.coll.Name() }

func (s mongoStore) Transaction(ctx context.Context, snapshot bool, fn func(ctx context.Context) error) error {
	run := transaction.Run
	if snapshot {
		run = transaction.RunSnapshot
	}
	return run(ctx, s.coll.Database().Client(), fn)
}

func (s mongoStore) Insert(ctx context.Context, envelopes []appending.Envelope) error {
	docs := make([]any, len(envelopes))
	for i, e := range envelopes {
		docs[i] = e.Doc
	}
	_, err := s.coll.InsertMany(ctx, docs)
	return err
}

func (s mongoStore) Stored(ctx context.Context) ([]bson.Raw, error) {
	cur, err := cursor.Find(ctx, s.coll, bson.D{}, options.Find().SetSort(bson.D{{Key: "ts", Value: 1}}))
	return cursor.All[bson.Raw](ctx, "reading the events of "+s.coll.Name(), cur, err)
}

func (s mongoStore) Now(ctx context.Context) (time.Time, error) {
	return agenda.ServerTime(transaction.Outside(ctx), s.coll.Database())
}

func (s mongoStore) Cancel(ctx context.Context, id event.ID) (bool, error) {
	return agenda.Cancel(ctx, s.coll, id)
}

func (s mongoStore) Move(ctx context.Context, id event.ID, dueAt time.Time) (bool, error) {
	return agenda.Move(ctx, s.coll, id, dueAt)
}

func (s mongoStore) ReadPage(ctx context.Context, query agenda.Query, size int, after string) (agenda.Page, error) {
	return agenda.ReadPage(ctx, s.coll, query, size, after)
}

func (s mongoStore) CancelMatching(ctx context.Context, query agenda.Query) (int64, error) {
	return agenda.CancelMatching(ctx, s.coll, query)
}
