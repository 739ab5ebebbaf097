package app

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/changestream"
)

// Oplog makes the function that reads the times of the oplog's ends, to the second: the stretch in which a position can be
// resumed. A server that does not tell, for want of a privilege, is an error.
func Oplog(client *mongo.Client) func(ctx context.Context) (oldest, newest time.Time, err error) {
	return func(ctx context.Context) (time.Time, time.Time, error) {
		first, last, err := changestream.OplogWindow(ctx, client)
		if err != nil {
			return time.Time{}, time.Time{}, err
		}
		return time.Unix(int64(first.T), 0).UTC(), time.Unix(int64(last.T), 0).UTC(), nil
	}
}
