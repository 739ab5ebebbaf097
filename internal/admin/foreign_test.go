package admin_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/state/statetest"
)

// A command that is stopped inside its transaction, as by SIGSTOP, holds the watcher's document. The server would end that after
// a minute; the owner, or who takes over, does so when its write has timed out. The command's work is done once it goes on.
func TestN03_AStoppedForeignTransactionHoldsUpNobodyForLong(t *testing.T) {
	t.Parallel()
	// The server itself takes 60 s.
	const soon = 40 * time.Second
	for _, owned := range []bool{true, false} {
		name := map[bool]string{true: "renewal", false: "takeover"}[owned]
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			state := statetest.New(t, stacktest.Client(t))
			cfg := lease.Config{
				Collection: state.On(stacktest.Client(t)).Collection("watchers"), ID: "orders/0of1", Node: "a",
				TTL: time.Hour, CallTimeout: time.Second, ReplicaSetID: "here",
			}
			l := lease.New(cfg)
			held, err := l.Acquire(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if !owned {
				if err := held.Release(t.Context()); err != nil {
					t.Fatal(err)
				}
			}

			stopped, resume, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
			runs := 0
			go func() {
				done <- mongodb.Foreign(t.Context(), state.Collection("watchers"), "orders", []string{"shop.outbox"}, func(tx context.Context) error {
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

// A command takes the fence of all slots in one transaction, and the server aborts the transaction if any owner is inside a transaction.
// Owners that never pause would leave the command no chance, so each of them pauses while a command is waiting.
func TestN03_AForeignWriteNeedsFewAttemptsBesideBusySlots(t *testing.T) {
	t.Parallel()
	const slots, calls, most = 16, 4, 5 // attempts for each call
	client := stacktest.Client(t)
	db := statetest.New(t, client)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	var owners sync.WaitGroup
	defer owners.Wait()
	defer cancel()
	var work atomic.Int64
	for _, p := range slot.Ranges(slots) {
		l := lease.New(lease.Config{Collection: db.Collection("watchers"), ID: p.ID("orders"), Node: "a", TTL: time.Hour, ReplicaSetID: "here"})
		held, err := l.Acquire(ctx)
		if err != nil {
			t.Fatal(err)
		}
		owners.Go(func() {
			for ctx.Err() == nil {
				_ = held.Fenced(ctx, nil, func(tx context.Context) error {
					_, err := client.Database(db.Name()).Collection("things").InsertOne(tx, bson.D{})
					return err
				})
				work.Add(1)
			}
		})
	}

	var attempts atomic.Int64
	monitor := &event.CommandMonitor{Started: func(_ context.Context, e *event.CommandStartedEvent) {
		if begins, _ := e.Command.Lookup("startTransaction").BooleanOK(); begins {
			attempts.Add(1)
		}
	}}
	state := db.On(stacktest.Client(t, options.Client().SetMonitor(monitor)))
	for range calls {
		before := work.Load()
		err := mongodb.Foreign(ctx, state.Collection("watchers"), "orders", []string{"shop.outbox"}, func(tx context.Context) error {
			_, err := state.Collection("requeued").InsertOne(tx, bson.D{})
			return err
		})
		if err != nil {
			t.Fatalf("after %d attempts: %v", attempts.Load(), err)
		}
		t.Logf("%d attempts so far; %d transactions of owners in this time", attempts.Load(), work.Load()-before)
	}
	if n := attempts.Load(); n > calls*most {
		t.Errorf("%d attempts for %d commands next to %d busy slots, want at most %d for each", n, calls, slots, most)
	}
}
