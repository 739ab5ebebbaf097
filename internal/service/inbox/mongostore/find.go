package mongostore

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb/cursor"
	"github.com/outrelay/outrelay/internal/service/inbox"
)

// FoundMark is a marker as operators see it.
type FoundMark struct {
	ID    inbox.ID
	State string
	At    time.Time
	Place inbox.Place // of the message; without a topic if it is not stored
}

// FindMarks returns the markers of messages at all consumers that have a watermark. ids are the identities of the messages by their
// namespace. It reads the names of the consumers, and looks up each identity by the index of _id.
func (s *Store) FindMarks(ctx context.Context, ids map[string][]string) ([]FoundMark, error) {
	var consumers []string
	names := s.offsets.Distinct(ctx, "_id.c", bson.D{})
	err := names.Err()
	// Decode would hide why the server has rejected the command.
	if err == nil {
		err = names.Decode(&consumers)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the consumers: %w", err)
	}
	var wanted []inbox.ID
	for _, consumer := range consumers {
		for namespace, list := range ids {
			for _, id := range list {
				wanted = append(wanted, inbox.ID{Key: inbox.Key{Consumer: consumer, Namespace: namespace, ID: id}})
			}
		}
	}
	if len(wanted) == 0 {
		return nil, nil
	}

	cur, err := cursor.Find(ctx, s.markers, idsFilter(wanted))
	type stored struct {
		ID        storedID  `bson:"_id"`
		State     string    `bson:"s"`
		At        time.Time `bson:"at"`
		Topic     string    `bson:"t"`
		Partition int32     `bson:"p"`
		Offset    int64     `bson:"f"`
	}
	docs, err := cursor.All[stored](ctx, "finding markers", cur, err)
	found := make([]FoundMark, len(docs))
	for i, d := range docs {
		found[i] = FoundMark{ID: d.ID.id(), State: d.State, At: d.At, Place: inbox.Place{Topic: d.Topic, Partition: d.Partition, Offset: d.Offset}}
	}
	return found, err
}
