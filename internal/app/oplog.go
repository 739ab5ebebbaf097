package app

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/changestream"
)

// Oplog returns a function that reads the times of the oldest and the newest oplog entry, in
// seconds. Positions between them can be resumed. The function fails if the user lacks the
// privilege.
func Oplog(client *mongo.Client) func(ctx context.Context) (oldest, newest time.Time, err error) {
	return func(ctx context.Context) (time.Time, time.Time, error) {
		first, last, err := changestream.OplogWindow(ctx, client)
		if err != nil {
			return time.Time{}, time.Time{}, err
		}
		return time.Unix(int64(first.T), 0).UTC(), time.Unix(int64(last.T), 0).UTC(), nil
	}
}
