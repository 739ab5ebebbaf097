package admin_test

import (
	"context"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/store"
)

// A command that is stopped inside its transaction, as by SIGSTOP, holds the watcher's document. The server would end that after
// a minute; the owner, or who takes over, does so when its write has timed out. The command's work is done once it goes on.
func TestN03_AStoppedForeignTransactionHoldsUpNobodyForLong(t *testing.T) {
	t.Parallel()
	const soon = 40 * time.Second // the server itself takes 60 s
	for _, owned := range []bool{true, false} {
		name := map[bool]string{true: "renewal", false: "take-over"}[owned]
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			state := stacktest.Database(t, stacktest.Client(t))
			cfg := lease.Config{
				Collection: stacktest.Client(t).Database(state.Name()).Collection("watchers"), ID: "orders/0of1", Node: "a",
				TTL: time.Hour, CallTimeout: time.Second, ReplicaSetID: "here",
			}
			l, err := lease.New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			held, err := l.Acquire(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if !owned {
				if err := held.Release(t.Context(), lease.Checkpoint{}); err != nil {
					t.Fatal(err)
				}
			}

			stopped, resume, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
			runs := 0
			go func() {
				done <- store.Foreign(t.Context(), state, "orders", []string{"shop.outbox"}, func(tx context.Context) error {
					if runs++; runs == 1 {
						close(stopped)
						<-resume
					}
					_, err := state.Collection("things").InsertOne(tx, bson.D{{Key: "_id", Value: "requeued"}})
					return err
				})
			}()
			<-stopped

			ctx, cancel := context.WithTimeout(t.Context(), soon)
			defer cancel()
			if owned {
				err = held.Save(ctx, lease.Update{})
			} else {
				_, err = l.Acquire(ctx)
			}
			if err != nil {
				t.Errorf("the %s waited for a stopped command: %v", name, err)
			}
			close(resume)
			if err := <-done; err != nil {
				t.Errorf("the stopped command's work: %v", err)
			}
		})
	}
}
