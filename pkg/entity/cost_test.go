package entity_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	mongoevent "go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// TestCommandsOfACall checks the number of commands that a call sends, which is a part of its contract: it is
// the same for one entity and for hundreds.
func TestCommandsOfACall(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var sent []string
	w := setup(t, options.Client().SetMonitor(&mongoevent.CommandMonitor{Started: func(_ context.Context, e *mongoevent.CommandStartedEvent) {
		if coll, ok := e.Command.Lookup(e.CommandName).StringValueOK(); ok {
			mu.Lock()
			defer mu.Unlock()
			sent = append(sent, e.CommandName+" "+coll)
		}
	}}))

	for _, n := range []int{1, 300} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			r := w.newRecorded()
			// The first call also reads whether the collections belong to sagas.
			w.tx(func(ctx context.Context) error {
				return just(r.StoreMany(ctx, order{ID: orderID(fmt.Sprint("first-", n))}))
			})
			list := orders(n)
			ids := make([]orderID, n)
			for i := range list {
				list[i].ID += orderID(fmt.Sprintf("-of-%d", n))
				ids[i] = list[i].ID
			}

			cost := func(what string, want []string, do func(ctx context.Context) error) {
				t.Helper()
				w.tx(func(ctx context.Context) error {
					mu.Lock()
					sent = nil
					mu.Unlock()
					return do(ctx)
				})

				mu.Lock()
				defer mu.Unlock()
				if diff := cmp.Diff(want, sent); diff != "" {
					t.Errorf("%s: %s", what, strings.TrimSpace(diff))
				}
			}

			add := []string{"find orders", "find orders_deleted", "insert outbox", "update orders"}
			cost("insert", add, func(ctx context.Context) error { return just(r.InsertMany(ctx, list...)) })
			cost("update", []string{"find orders", "insert outbox", "update orders"}, func(ctx context.Context) error { return just(r.UpdateMany(ctx, list...)) })
			cost("delete", []string{"find orders", "insert outbox", "delete orders", "update orders_deleted"}, func(ctx context.Context) error { return just(r.DeleteMany(ctx, ids...)) })
			cost("insert again", append(add, "delete orders_deleted"), func(ctx context.Context) error { return just(r.StoreMany(ctx, list...)) })
		})
	}
}
