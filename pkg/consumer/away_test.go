package consumer_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/franz"
)

// The tests of both transports are not subtests, which would begin after all other tests of the package: they take half a minute.
func TestAMemberThatCannotReachMongoDBLeavesItsGroup(t *testing.T) {
	t.Parallel()
	checkAwayMemberLeaves(t)
}

func TestAMemberThatCannotReachMongoDBLeavesItsGroupWithFranz(t *testing.T) {
	t.Parallel()
	checkAwayMemberLeaves(t, franz.Use())
}

// checkAwayMemberLeaves checks that a member with a broken network to MongoDB leaves its group. It would keep its membership in
// Kafka, so no other member would get its partitions.
func checkAwayMemberLeaves(t *testing.T, use ...consumer.Option) {
	t.Helper()
	// Its outage takes long, and other tests would wait for the fail point of the shared server.
	stack := stacktest.Own(t, devstack.Options{Mongods: 1, Quick: true})
	app, own := stacktest.Name(t), options.Client().ApplyURI(stack.MongoURI())
	k := newKit(t, 2, own)
	var connections atomic.Int64
	cut := newKitOf(k, own, options.Client().SetAppName(app).SetPoolMonitor(&event.PoolMonitor{Event: func(e *event.PoolEvent) {
		if e.Type == event.ConnectionCreated {
			connections.Add(1)
		}
	}}))
	left := make(chan struct{}, 10)
	hook := consumer.WithErrorHook(func(_ context.Context, err error) {
		k.logError(err)
		if strings.Contains(err.Error(), "leaving the group") {
			left <- struct{}{}
		}
	})
	healthy := k.newConsumer(use...)
	addHandler(t, healthy, "counted", k.insertInto("effects"))
	k.start(healthy)
	seen := &gauges{}
	lonely := cut.newConsumer(append(use[:len(use):len(use)], hook, consumer.WithTelemetry(seen), consumer.WithMaxOutage(2*time.Second), consumer.WithDrain(time.Second))...)
	addHandler(t, lonely, "counted", cut.insertInto("effects"), consumer.WithRate(consumer.Rate{PerSecond: 100}))
	k.start(lonely)
	each := func(n int) func(context.Context) bool {
		return func(context.Context) bool {
			return len(healthy.Status().Partitions) == n && len(lonely.Status().Partitions) == 2-n
		}
	}
	k.waitUntil("each member to have a partition", each(1))

	end := stacktest.FailCommandOn(t, k.db.Client(), app, "alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"find", "aggregate", "insert", "update", "delete", "findAndModify", "commitTransaction", "abortTransaction", "killSessions"}},
		{Key: "closeConnection", Value: true},
	})
	all := newMessages(8, 32)
	k.publish(all[:16]...)
	connections.Store(0)
	began := time.Now()
	k.waitFor("the member to leave", left)
	if n, took := connections.Load(), time.Since(began); float64(n) > 50+50*took.Seconds() {
		t.Errorf("the member opened %d connections to MongoDB in %v", n, took)
	}
	k.waitUntil("the other member to have both partitions", each(2))
	if n := seen.assigned.Load(); n != 0 {
		t.Errorf("the member outside of the group measures %d assigned partitions", n)
	}
	k.waitCount("effects", 16)

	end()
	k.waitUntil("the member to be back", each(1))
	k.publish(all[16:]...)
	k.waitCount("effects", 32)
	k.checkOnce("effects", 32)
}
