package process_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/process"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// tenants makes databases, each with an outbox that has one event.
func (b *bundle) tenants(n int) {
	b.t.Helper()
	b.t.Cleanup(func() { b.dropTenants(n) })
	for i := range n {
		box, err := outbox.New(b.tenant(i).Database(), outbox.WithoutTransaction())
		if err != nil {
			b.t.Fatal(err)
		}
		e := event.New(event.Aggregate{Type: "order", ID: "k"}, "Placed", event.Bytes("", []byte("x")), event.WithTopic(b.topic))
		if err := box.Append(b.t.Context(), e); err != nil {
			b.t.Fatal(err)
		}
	}
}

func (b *bundle) dropTenants(n int) {
	for i := range n {
		_ = b.tenant(i).Database().Drop(context.WithoutCancel(b.t.Context()))
	}
}

// A pattern such as tenant_*.outbox costs one call for each database. All of them together take longer than one call may.
func TestATakeoverListsMoreDatabasesThanFitIntoOneCall(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const n, call = 16, time.Second
	b.tenants(n)
	node := stacktest.Name(t)
	stacktest.FailCommand(t, "outrelay state "+node, "alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"listCollections"}},
		{Key: "blockConnection", Value: true},
		{Key: "blockTimeMS", Value: call.Milliseconds() / 2},
	})
	b.startAs(func(r *process.Relay) { r.Hasten(call) }, "watch="+b.db.Name()+"_*.outbox", "node="+node)
	b.waitOwned(node)
	b.consume(n)
}

// Tenants that are dropped leave neither a registration nor a database, whether the relay sees the drops or not.
func TestTenantsThatAreDroppedLeaveNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const n = 6
	watch := "watch=" + b.db.Name() + "_*.outbox"
	registered := func() (left int64) {
		left, err := b.state.Collection("collections").CountDocuments(t.Context(), bson.D{{Key: "watcher", Value: "default"}})
		if err != nil {
			t.Fatal(err)
		}
		return left
	}
	existing := func() []string {
		names, err := b.client.ListDatabaseNames(t.Context(), bson.D{{Key: "name", Value: bson.D{{Key: "$regex", Value: "^" + b.db.Name() + "_"}}}})
		if err != nil {
			t.Fatal(err)
		}
		return names
	}

	for round, seen := range []bool{true, false} {
		b.tenants(n)
		stop := b.start(watch)
		b.consume((round + 1) * n)
		stacktest.Eventually(t, "all are registered", func() bool { return registered() == n })
		if seen {
			b.dropTenants(n)
		} else {
			if err := stop(); err != nil {
				t.Fatal(err)
			}
			b.dropTenants(n)
			stop = b.start(watch)
		}

		stacktest.Eventually(t, fmt.Sprintf("the registrations are gone (seen: %v)", seen), func() bool { return registered() == 0 })
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		if names := existing(); len(names) > 0 {
			t.Errorf("databases exist again: %v", names)
		}
	}
}

func (b *bundle) tenant(i int) *mongo.Collection {
	return b.client.Database(fmt.Sprintf("%s_%d", b.db.Name(), i)).Collection("outbox")
}
