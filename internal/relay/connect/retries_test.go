package connect

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// A server that closes its connections at each command must not get a new one for each of thousands of attempts.
func TestACommandIsRepeatedAfterAPause(t *testing.T) {
	t.Parallel()
	node := stacktest.Name(t)
	var failed atomic.Int64
	given := options.Client().ApplyURI(stacktest.MongoURI(t)).SetMonitor(&event.CommandMonitor{
		Failed: func(context.Context, *event.CommandFailedEvent) { failed.Add(1) },
	})
	clients, err := NewClients(config.Default().MongoDB, MongoHost{Options: given}, node, 1, slog.New(slog.DiscardHandler), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { clients.Disconnect(context.Background()) })

	for name, client := range map[string]*mongo.Client{"outrelay state ": clients.State, "outrelay stream ": clients.Stream} {
		coll := stacktest.Database(t, client).Collection("c")
		if err := coll.FindOne(t.Context(), bson.D{}).Err(); err != nil && !errors.Is(err, mongo.ErrNoDocuments) {
			t.Fatal(err)
		}
		failed.Store(0)

		off := stacktest.FailCommand(t, name+node, "alwaysOn", bson.D{{Key: "failCommands", Value: bson.A{"find"}}, {Key: "closeConnection", Value: true}})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		err := coll.FindOne(ctx, bson.D{}).Err()
		cancel()
		off()
		if n := failed.Load(); err == nil || n < 2 || n > 11 {
			t.Errorf("%sclient: a read of a second failed %d times (%v), want about ten", name, n, err)
		}
	}
}
