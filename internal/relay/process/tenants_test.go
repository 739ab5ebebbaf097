package process_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
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

// The validator of one tenant rejects the stamp of the purge. The outboxes of the others are purged, and the failure is in the list of
// problems under the name of the outbox. The process stays ready.
func TestAnOutboxThatRejectsThePurgeStopsNoOther(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const n = 4
	b.tenants(n)
	validate := func(validator bson.D) {
		command := bson.D{{Key: "collMod", Value: "outbox"}, {Key: "validator", Value: validator}}
		for i := 0; i < n; i += 2 {
			if err := b.tenant(i).Database().RunCommand(t.Context(), command).Err(); err != nil {
				t.Fatal(err)
			}
		}
	}
	validate(bson.D{{Key: "ts", Value: bson.D{{Key: "$exists", Value: false}}}})

	var r *process.Relay
	b.startAs(func(relay *process.Relay) { r = relay },
		"watch="+b.db.Name()+"_*.outbox", "node=a", "retention=1m", "purge.interval=100ms", "http.readiness=1s")
	b.waitOwned("a")
	for i := range n {
		timeless := bson.D{
			{Key: "_id", Value: "no-time"},
			{Key: "aggregatetype", Value: "order"},
			{Key: "aggregateid", Value: "k"},
			{Key: "type", Value: "Placed"},
			{Key: "payload", Value: "x"},
			{Key: "topic", Value: b.topic},
		}
		if _, err := b.tenant(i).InsertOne(t.Context(), timeless); err != nil {
			t.Fatal(err)
		}
	}
	b.consume(2 * n)

	unstamped := func() (left []int64) {
		for i := range n {
			count, err := b.tenant(i).CountDocuments(t.Context(), bson.D{{Key: "ts", Value: nil}})
			if err != nil {
				t.Fatal(err)
			}
			left = append(left, count)
		}
		return left
	}
	failing := func() (objects []string) {
		for _, problem := range r.Problems() {
			if problem.Kind == "purge_fails" && problem.Severity == "warn" && strings.Contains(problem.Detail, "Document failed validation") {
				objects = append(objects, problem.Object)
			}
		}
		return objects
	}
	stacktest.Eventually(t, "the other outboxes are purged", func() bool {
		return slices.Equal(unstamped(), []int64{1, 0, 1, 0})
	}, func() any { return unstamped() })
	stacktest.Eventually(t, "the list has the outboxes that are not purged", func() bool {
		return slices.Equal(failing(), []string{mongodb.Namespace(b.tenant(0)), mongodb.Namespace(b.tenant(2))})
	}, func() any { return r.Problems() })
	if ok, _, reasons := r.Ready(); !ok {
		t.Errorf("the process is not ready: %v", reasons)
	}
	if lines := b.log.countLines("cannot purge"); lines != 2 {
		t.Errorf("%d lines in the log, want one for each outbox", lines)
	}

	validate(bson.D{})
	stacktest.Eventually(t, "all outboxes are purged, and the problems end", func() bool {
		return slices.Equal(unstamped(), []int64{0, 0, 0, 0}) && failing() == nil
	}, func() any { return unstamped() })
}

func (b *bundle) tenant(i int) *mongo.Collection {
	return b.client.Database(fmt.Sprintf("%s_%d", b.db.Name(), i)).Collection("outbox")
}
