package consumer_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// findKeyOf returns a key whose messages are in a partition of two.
func findKeyOf(partition int32) string {
	for i := 0; ; i++ {
		if key := fmt.Sprint("key", i); kafkawire.ChoosePartition([]byte(key), 2) == partition {
			return key
		}
	}
}

// A conflict shows that MongoDB responds, so it holds up its lane alone.
func TestAConflictInTheInboxIsNoOutage(t *testing.T) {
	t.Parallel()
	k := newKit(t, 2)
	stats := &counts{}
	c := k.newConsumer(consumer.WithTelemetry(stats))
	addHandler(t, c, "counted", k.insertInto("effects"))
	locked, free := findKeyOf(0), findKeyOf(1)
	k.publish(newMessage(locked, "counted", "0"), newMessage(free, "counted", "0"))
	k.start(c)
	k.waitCount("effects", 2)

	session, err := k.db.Client().StartSession()
	if err != nil {
		t.Fatal(err)
	}
	defer session.EndSession(context.WithoutCancel(t.Context()))
	if err := session.StartTransaction(); err != nil {
		t.Fatal(err)
	}
	ofLane := bson.D{{Key: "_id.p", Value: 0}, {Key: "_id.l", Value: bson.D{{Key: "$gte", Value: 0}}}}
	held, err := k.db.Collection("inbox"+inbox.OffsetsSuffix).UpdateMany(mongo.NewSessionContext(k.context(), session), ofLane,
		bson.D{{Key: "$set", Value: bson.D{{Key: "held", Value: true}}}})
	if err != nil || held.ModifiedCount != 1 {
		t.Fatalf("watermarks of the lane: got %+v (%v), want 1", held, err)
	}

	k.publish(newMessage(locked, "counted", "1"))
	handled := 1
	for began := time.Now(); time.Since(began) < 10*time.Second; handled++ {
		k.publish(newMessage(free, "counted", fmt.Sprint(handled)))
		k.waitCount("effects", 2+handled)
	}
	if err := session.AbortTransaction(k.context()); err != nil {
		t.Fatal(err)
	}
	k.waitCount("effects", 2+handled)
	k.checkOnce("effects", 2+handled)
	if stats.database.Load() > 0 {
		t.Error("the conflict was reported as an outage of the database")
	}
}

// After two minutes, the driver returns the conflict.
func TestAConflictThatTheDriverReturnsIsNoOutage(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	box, err := outbox.New(k.db)
	if err != nil {
		t.Fatal(err)
	}
	stats := &counts{}
	var conflicts atomic.Int64
	failing := consumer.Transactions(func(ctx context.Context, fn func(ctx context.Context) error) error {
		if conflicts.Add(1) <= 3 {
			return mongo.CommandError{Code: 112, Message: "as wanted", Labels: []string{"TransientTransactionError"}}
		}
		return box.Transaction(ctx, fn)
	})

	c := k.newConsumer(consumer.WithTelemetry(stats), failing)
	addHandler(t, c, "counted", k.insertInto("effects"))
	k.publish(newMessages(1, 3)...)
	k.start(c)
	k.waitCount("effects", 3)
	k.checkOnce("effects", 3)
	if stats.database.Load() > 0 {
		t.Error("the conflicts were reported as an outage of the database")
	}
}

// The database responded late, and then the handler takes long: that is no reason to fetch nothing.
func TestASlowHandlerAfterASlowDatabaseStopsNoFetch(t *testing.T) {
	t.Parallel()
	k := newKit(t, 2)
	box, err := outbox.New(k.db)
	if err != nil {
		t.Fatal(err)
	}
	stats := &counts{}
	var delayed atomic.Bool
	slow := consumer.Transactions(func(ctx context.Context, fn func(ctx context.Context) error) error {
		if delayed.CompareAndSwap(false, true) {
			k.waitUntil("the outage", func(context.Context) bool { return stats.database.Load() > 0 })
		}
		return box.Transaction(ctx, fn)
	})

	insert := k.insertInto("effects")
	other := make(chan struct{}, 1)
	first, second := findKeyOf(0), findKeyOf(1)
	c := k.newConsumer(consumer.WithTelemetry(stats), slow)
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		if string(m.Key) == second {
			other <- struct{}{}
			return insert(ctx, m)
		}
		// A fetch that had begun before the outage may bring the first one.
		for i := range 3 {
			k.publish(newMessage(second, "counted", fmt.Sprint(i)))
			select {
			case <-other:
			case <-time.After(10 * time.Second):
				t.Error("a message of the other partition was not fetched while the handler ran")
			}
		}
		return insert(ctx, m)
	}, consumer.WithTimeout(-1))
	k.publish(newMessage(first, "counted", "0"))
	k.start(c)
	k.waitCount("effects", 4)
}
