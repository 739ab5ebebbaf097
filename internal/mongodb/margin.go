package mongodb

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// MinMargin is the least distance at which a stamp and a position in the stream can be compared. A
// transaction gets its stamp when it inserts, but the stream has the order of the commits.
const MinMargin = 5 * time.Minute

// marginCall bounds the command that reads the life of a transaction.
const marginCall = 5 * time.Second

// Margin returns the distance at which a stamp and a position in the stream can be compared on this server:
// twice the life of a transaction, at least [MinMargin]. If the server does not return the life of a
// transaction, Margin assumes the default.
func Margin(ctx context.Context, client *mongo.Client) time.Duration {
	if asked, err := AskMargin(ctx, client); err == nil {
		return asked
	}
	return MinMargin
}

// AskMargin is [Margin], but fails if it cannot reach the server. A caller that deletes documents by the
// result must use AskMargin. If the server responds without the life of a transaction, AskMargin returns
// [MinMargin].
func AskMargin(ctx context.Context, client *mongo.Client) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, marginCall)
	defer cancel()

	var response struct {
		Seconds int64 `bson:"transactionLifetimeLimitSeconds"`
	}
	err := client.Database("admin").RunCommand(ctx, bson.D{
		{Key: "getParameter", Value: 1},
		{Key: "transactionLifetimeLimitSeconds", Value: 1},
	}).Decode(&response)

	if se := mongo.ServerError(nil); errors.As(err, &se) && !mongo.IsNetworkError(err) && !mongo.IsTimeout(err) {
		// The user may not run the command, or the server is a router, which does not have the parameter.
		return MinMargin, nil
	}
	if err != nil {
		return 0, fmt.Errorf("reading the life of a transaction: %w", err)
	}

	return max(MinMargin, 2*time.Duration(response.Seconds)*time.Second), nil
}

// Earlier returns timestamp less duration, rounded up to whole seconds, or zero if duration is longer than timestamp.
func Earlier(timestamp bson.Timestamp, duration time.Duration) bson.Timestamp {
	if duration <= 0 {
		return timestamp
	}

	seconds := int64((duration + time.Second - 1) / time.Second)
	if seconds >= int64(timestamp.T) {
		return bson.Timestamp{}
	}
	return bson.Timestamp{T: timestamp.T - uint32(seconds), I: timestamp.I}
}

// Preceding returns the greatest timestamp less than timestamp, or zero if timestamp is zero.
func Preceding(timestamp bson.Timestamp) bson.Timestamp {
	switch {
	case timestamp.I > 0:
		return bson.Timestamp{T: timestamp.T, I: timestamp.I - 1}
	case timestamp.T == 0:
		return bson.Timestamp{}
	}
	return bson.Timestamp{T: timestamp.T - 1, I: 1<<32 - 1}
}
