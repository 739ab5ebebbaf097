package mongodb

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// MinMargin is the least distance between a stamp and a place in the stream before one says anything about the other: a
// stamp is taken when a transaction inserts, the stream's order is that of commits.
const MinMargin = 5 * time.Minute

const marginCall = 5 * time.Second

// Margin is that distance on this server: twice the life of a transaction, at least [MinMargin]. A server that does not
// tell is taken for one with the default.
func Margin(ctx context.Context, client *mongo.Client) time.Duration {
	if m, err := AskMargin(ctx, client); err == nil {
		return m
	}
	return MinMargin
}

// AskMargin is [Margin] that tells a server which cannot be reached, an error, from one that does not say: whoever deletes
// by the answer had better know.
func AskMargin(ctx context.Context, client *mongo.Client) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, marginCall)
	defer cancel()
	var reply struct {
		Seconds int64 `bson:"transactionLifetimeLimitSeconds"`
	}
	err := client.Database("admin").RunCommand(ctx, bson.D{{Key: "getParameter", Value: 1}, {Key: "transactionLifetimeLimitSeconds", Value: 1}}).Decode(&reply)
	if se := mongo.ServerError(nil); errors.As(err, &se) && !mongo.IsNetworkError(err) && !mongo.IsTimeout(err) {
		return MinMargin, nil // may not be asked, or is a router that has no such parameter
	}
	if err != nil {
		return 0, fmt.Errorf("asking for the life of a transaction: %w", err)
	}
	return max(MinMargin, 2*time.Duration(reply.Seconds)*time.Second), nil
}
