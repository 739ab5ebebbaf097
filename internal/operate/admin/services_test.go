package admin_test

import (
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/problems"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// A service that only consumes has no outbox: only consumers.databases names its database.
func TestADatabaseWithoutAnOutboxIsSearched(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	f.op.HandlerLetters = []string{deadletter.DefaultCollection}
	f.op.KafkaGroups = func(_ context.Context, query connect.GroupQuery) (found connect.Groups, err error) {
		for _, name := range query.Names {
			found.Groups = append(found.Groups, connect.Group{Name: name})
		}
		return found, nil
	}
	// The helpers take a collection only for its database.
	shipping := stacktest.Database(t, f.state.Client())
	f.setAside(shipping.Collection("none"), "g/ship", "key", 1, 3)
	f.giveUp(shipping.Collection("none"), deadletter.DefaultCollection, "ship", "m2")
	only := admin.HandlerWaitingFilter{Database: shipping.Name()}
	if _, err := f.op.HandlerWaiting().List(t.Context(), only, 0, ""); err == nil || !strings.Contains(err.Error(), "consumers.databases") {
		t.Errorf("without the key, the error does not name it: %v", err)
	}

	f.op.ConsumerDatabases = []string{shipping.Name()}
	page, err := f.op.HandlerWaiting().List(t.Context(), only, 0, "")
	if err != nil || page.Total != 1 || page.Items[0].Database != shipping.Name() {
		t.Errorf("messages: %+v, %v", page, err)
	}
	if n, err := f.op.Letters().Count(t.Context(), ofHandlers); err != nil || n != 1 {
		t.Errorf("letters: %d, %v", n, err)
	}
	noneUnread := func(context.Context, []setaside.Place) ([]setaside.Place, error) { return nil, nil }
	if _, err := setaside.New(shipping, setaside.DefaultCollection).Census(t.Context(), setaside.Member{Group: "g", ID: "member"}, noneUnread); err != nil {
		t.Fatal(err)
	}
	groups, err := f.op.Groups().List(t.Context(), false)
	if err != nil || len(groups.Groups) != 1 || groups.Groups[0].Group != "g" || len(groups.Groups[0].Handlers) != 1 {
		t.Errorf("groups: %+v, %v", groups, err)
	}
	overview, err := f.op.Overview(t.Context())
	if err != nil || overview.Counts.HandlerWaiting != 1 || overview.Counts.HandlerDead != 1 {
		t.Errorf("counts: %+v, %v", overview.Counts, err)
	}
	// The helper sets the message aside an hour after its first failure.
	isRetry := func(problem admin.Problem) bool {
		return problem.Kind == problems.HandlerRetries && problem.Count == 1 && strings.HasPrefix(problem.Detail, "handler ship of group g for 1h")
	}
	if !slices.ContainsFunc(overview.Problems, isRetry) {
		t.Errorf("no problem of the handler: %+v", overview.Problems)
	}
	markHandled(t, shipping, f.a, "g/notify", "m1", 1, time.Now())
	found, err := f.op.Lookup(t.Context(), admin.LookupQuery{ID: "m1"})
	if err != nil || len(found.Envelopes) != 1 || len(found.Envelopes[0].Handlers) != 2 {
		t.Errorf("lookup: %+v, %v", found, err)
	}
	databases, err := f.op.ForWatcher("another").ServiceDatabases(t.Context(), "")
	if err != nil || len(databases) != 0 {
		t.Errorf("databases of another watcher: %v, %v", databases, err)
	}
}

// markHandled stores the mark of a handler for an event of outbox, whose record is at orders/1@offset, in the inbox of db.
func markHandled(t *testing.T, db *mongo.Database, outbox *mongo.Collection, consumer, id string, offset int64, at time.Time) {
	t.Helper()
	digest := routing.NamespaceHash(mongodb.Namespace(outbox))
	mustInsert(t, db.Collection("inbox"), bson.D{
		{Key: "_id", Value: bson.D{{Key: "c", Value: consumer}, {Key: "n", Value: hex.EncodeToString(digest[:])}, {Key: "i", Value: id}}},
		{Key: "s", Value: "handled"},
		{Key: "at", Value: at},
		{Key: "t", Value: "orders"},
		{Key: "p", Value: 1},
		{Key: "f", Value: offset},
	})

	// Only an inbox has a collection of offsets.
	place := bson.D{{Key: "c", Value: consumer}, {Key: "t", Value: "orders"}, {Key: "p", Value: 1}, {Key: "l", Value: 2}}
	_, err := db.Collection("inbox_offsets").ReplaceOne(t.Context(), bson.D{{Key: "_id", Value: place}}, bson.D{}, options.Replace().SetUpsert(true))
	if err != nil {
		t.Fatal(err)
	}
}

// A list and an action reach the services of all tenants, also of a watcher with hundreds of them.
func TestTheLastOfManyDatabasesIsSearched(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	f.giveUp(f.b, deadletter.DefaultCollection, "billing", "m")
	f.setAside(f.b, "g/billing", "k", 7, 1)
	registry := outboxes.NewRegistry(f.state.Collection("collections"))
	for n := range 100 {
		// The databases come first in the order of the names, and need not exist.
		if _, err := registry.Register(t.Context(), [16]byte{1, byte(n)}, fmt.Sprintf("0%03d.outbox", n), "orders", bson.Timestamp{}); err != nil {
			t.Fatal(err)
		}
	}

	out, err := f.op.Letters().Requeue(t.Context(), admin.DeadFilter{Handler: "billing"}, admin.DeadOptions{}, nil)
	if err != nil || out.Requeued != 1 {
		t.Errorf("requeue: %+v, %v, want 1", out, err)
	}
	messages, err := f.op.HandlerWaiting().Retry(t.Context(), admin.HandlerWaitingFilter{Handler: "billing"}, admin.ForReal)
	if err != nil || messages.Retried == 0 {
		t.Errorf("retry: %+v, %v, want the message", messages, err)
	}
}
