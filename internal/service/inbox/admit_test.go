package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/inbox"
)

func newEntry(id string) inbox.Entry {
	return inbox.Entry{Key: inbox.Key{Consumer: "group/a", ID: id}}
}

func newEntryAt(id string, lane int32, offset int64) inbox.Entry {
	e := newEntry(id)
	e.Place = inbox.Place{Topic: "orders", Lane: lane, Offset: offset}
	return e
}

// newBatch returns n records in all lanes, beginning at an offset.
func newBatch(prefix string, n int, from int64) []inbox.Entry {
	list := make([]inbox.Entry, n)
	for i := range list {
		list[i] = newEntryAt(fmt.Sprintf("%s%d", prefix, from+int64(i)), int32(i%inbox.Lanes), from+int64(i))
	}
	return list
}

func TestHundredDuplicatesAtOnceHaveOneEffect(t *testing.T) {
	t.Parallel()
	b := setup(t)
	processes := []*inbox.Inbox{b.inbox, b.newInbox(t), b.newInbox(t), b.newInbox(t)}
	effects := b.db.Collection("effects")
	if err := b.db.CreateCollection(t.Context(), "effects"); err != nil {
		t.Fatal(err)
	}

	var duplicates atomic.Int64
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() {
			err := processes[i%len(processes)].Once(t.Context(), newEntry("1"), func(ctx context.Context) error {
				_, err := effects.InsertOne(ctx, bson.D{{Key: "caller", Value: i}})
				return err
			}, inbox.OnceConfig{})
			switch {
			case errors.Is(err, inbox.ErrDuplicate):
				duplicates.Add(1)
			case err != nil:
				t.Errorf("caller %d: %v", i, err)
			}
		})
	}

	wg.Wait()
	if n := b.countDocuments(t, "effects", bson.D{}); n != 1 || duplicates.Load() != 99 {
		t.Fatalf("%d effects and %d duplicates, want 1 and 99", n, duplicates.Load())
	}
}

func TestARolledBackTransactionLeavesNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	cause := errors.New("the handler fails")
	err := b.transaction(t.Context(), func(ctx context.Context) error {
		if _, err := b.inbox.Admit(ctx, newBatch("", 40, 0)); err != nil {
			return err
		}
		return cause
	})
	if !errors.Is(err, cause) {
		t.Fatal(err)
	}

	for _, coll := range []string{"inbox", "inbox_offsets", "inbox_claims"} {
		if n := b.countDocuments(t, coll, bson.D{}); n != 0 {
			t.Errorf("%s has %d documents", coll, n)
		}
	}
}

// TestAnErrorOfAdmitDoomsTheTransaction: a callback that ignores the error must not commit its
// other writes.
func TestAnErrorOfAdmitDoomsTheTransaction(t *testing.T) {
	t.Parallel()
	b := setup(t)
	held, err := b.inbox.Claim(t.Context(), newEntry("1"), 0)
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { _ = held.Release(context.WithoutCancel(t.Context())) })
	err = b.transaction(t.Context(), func(ctx context.Context) error {
		if _, err := b.db.Collection("effects").InsertOne(ctx, bson.D{}); err != nil {
			return err
		}

		_, err := b.inbox.Admit(ctx, []inbox.Entry{newEntry("1")})
		if !errors.Is(err, inbox.ErrInProgress) {
			t.Errorf("the error is %v", err)
		}

		return nil
	})
	if !errors.Is(err, inbox.ErrInProgress) || b.countDocuments(t, "effects", bson.D{}) != 0 {
		t.Fatalf("the transaction ended with %v", err)
	}
}

func TestWatermarksRejectWhenMarkersAreGoneAtTheSizeOfLanes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	list := newBatch("", 400, 1000)
	b.admit(t, b.inbox, list...)

	if _, err := b.db.Collection("inbox").DeleteMany(t.Context(), bson.D{}); err != nil {
		t.Fatal(err)
	}
	if fresh := b.admit(t, b.newInbox(t), list...); slices.Contains(fresh, true) {
		t.Fatalf("fresh again: %v", fresh)
	}

	if n := b.countDocuments(t, "inbox_offsets", bson.D{}); n != inbox.Lanes {
		t.Fatalf("%d watermarks for one partition, want %d", n, inbox.Lanes)
	}
	if n := b.countDocuments(t, "inbox", bson.D{}); n != 0 {
		t.Fatalf("%d markers were written for messages below the watermark", n)
	}
}

// TestLanesDoNotConflict keeps a transaction open on each lane of one partition at the same time
// and counts the write conflicts of the server. There are none. On a single lane there are some.
func TestLanesDoNotConflict(t *testing.T) {
	t.Parallel()
	w := new(watch)
	b := setup(t, w.options())
	// The first round creates the watermarks, and the others move them.
	for round := range int64(3) {
		var all, wg sync.WaitGroup
		all.Add(inbox.Lanes)
		for lane := range int32(inbox.Lanes) {
			wg.Go(func() {
				once := sync.OnceFunc(all.Done)
				defer once()
				err := b.transaction(t.Context(), func(ctx context.Context) error {
					_, err := b.inbox.Admit(ctx, []inbox.Entry{newEntryAt(fmt.Sprintf("%d.%d", round, lane), lane, round)})
					once()
					all.Wait()
					return err
				})
				if err != nil {
					t.Error(err)
				}
			})
		}

		wg.Wait()
	}

	if n := w.countConflicts(); n != 0 {
		t.Fatalf("%d write conflicts between different lanes", n)
	}

	w.reset()
	first := make(chan struct{})
	begun := sync.OnceFunc(func() { close(first) })
	var wg sync.WaitGroup
	wg.Go(func() {
		err := b.transaction(t.Context(), func(ctx context.Context) error {
			_, err := b.inbox.Admit(ctx, []inbox.Entry{newEntryAt("x", 0, 10)})
			begun()
			stacktest.Eventually(t, "the other to conflict", func() bool { return w.countConflicts() > 0 })
			return err
		})
		if err != nil {
			t.Error(err)
		}
	})

	<-first
	if fresh := b.admit(t, b.inbox, newEntryAt("y", 0, 11)); !fresh[0] {
		t.Error("a record was rejected because of a conflict")
	}

	wg.Wait()
}

func TestAdmitSendsFourCommandsForABatch(t *testing.T) {
	t.Parallel()
	w := new(watch)
	b := setup(t, w.options())
	colls := []string{"inbox", "inbox_offsets", "inbox_claims"}

	for _, step := range []struct {
		list []inbox.Entry
		want []string
	}{
		{newBatch("", 300, 0), []string{"aggregate inbox_offsets", "aggregate inbox", "insert inbox", "update inbox_offsets"}},
		{newBatch("", 300, 0), []string{"aggregate inbox_offsets"}}, // delivered again
		{[]inbox.Entry{newEntry("from nowhere")}, []string{"aggregate inbox", "insert inbox"}},
		{[]inbox.Entry{newEntryAt("5", 1, 900)}, []string{"aggregate inbox_offsets", "aggregate inbox", "update inbox_offsets"}},
		{[]inbox.Entry{newEntryAt(inbox.PlaceID("orders", 0, 950), 2, 950)}, []string{"aggregate inbox_offsets", "update inbox_offsets"}},
	} {
		w.reset()
		b.admit(t, b.inbox, step.list...)
		if diff := cmp.Diff(step.want, w.commandNames(colls...)); diff != "" {
			t.Error(diff)
		}
	}
}

func TestOneTransactionAsksForAnEntryOnce(t *testing.T) {
	t.Parallel()
	w := new(watch)
	b := setup(t, w.options())
	list := newBatch("", 3, 0)
	err := b.transaction(t.Context(), func(ctx context.Context) error {
		ctx = b.inbox.Remember(ctx)
		if _, err := b.inbox.Admit(ctx, list); err != nil {
			return err
		}

		w.reset()
		for range 2 {
			fresh, err := b.inbox.Admit(ctx, append(slices.Clone(list), newEntry("1")))
			if err != nil || slices.Contains(fresh, false) {
				return fmt.Errorf("%v, %w", fresh, err)
			}
		}

		if names := w.commandNames("inbox", "inbox_offsets"); names != nil {
			t.Errorf("sent again: %v", names)
		}

		// Another record with the same id is a duplicate too.
		fresh, err := b.inbox.Admit(ctx, []inbox.Entry{newEntryAt("1", 1, 77)})
		if err == nil && fresh[0] {
			t.Error("a second record of the same id is fresh in the same transaction")
		}

		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if fresh := b.admit(t, b.inbox, list...); slices.Contains(fresh, true) {
		t.Fatalf("fresh in the next transaction: %v", fresh)
	}
}

func TestARetriedAttemptAsksAnew(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var attempts int
	err := b.transaction(t.Context(), func(ctx context.Context) error {
		attempts++
		ctx = b.inbox.Remember(ctx)
		if _, err := b.inbox.Admit(ctx, []inbox.Entry{newEntry("1")}); err != nil {
			return err
		}
		if attempts == 1 {
			return mongo.CommandError{Code: 112, Labels: []string{"TransientTransactionError"}}
		}

		return nil
	})
	if err != nil || attempts != 2 {
		t.Fatalf("%v after %d attempts", err, attempts)
	}
	if ok, err := b.inbox.Handled(t.Context(), newEntry("1").Key); err != nil || !ok {
		t.Fatalf("the second attempt left no marker: %v", err)
	}
}

// TestAnotherErrorIsItself: only an existing identity is a duplicate, not every error of the
// server.
func TestAnotherErrorIsItself(t *testing.T) {
	t.Parallel()
	t.Run("unique index of somebody else", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		if _, err := b.db.Collection("inbox").Indexes().CreateOne(t.Context(), mongo.IndexModel{
			Keys: bson.D{{Key: "t", Value: 1}}, Options: options.Index().SetUnique(true),
		}); err != nil {
			t.Fatal(err)
		}

		err := b.tryAdmit(t.Context(), newBatch("", 2, 0))
		if !mongo.IsDuplicateKeyError(err) || errors.Is(err, inbox.ErrDuplicate) {
			t.Fatalf("the error is %v, want the server's", err)
		}
	})

	t.Run("validator", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		if err := b.db.RunCommand(t.Context(), bson.D{
			{Key: "collMod", Value: "inbox"}, {Key: "validator", Value: bson.D{{Key: "approved", Value: true}}},
		}).Err(); err != nil {
			t.Fatal(err)
		}

		err := b.tryAdmit(t.Context(), []inbox.Entry{newEntry("1")})
		var se mongo.ServerError
		if !errors.As(err, &se) || !se.HasErrorCode(121) || errors.Is(err, inbox.ErrDuplicate) {
			t.Fatalf("the error is %v, want code 121", err)
		}
	})
}

// TestAnUnreachableDatabaseDropsNothing: without a response, a message is neither fresh nor a
// duplicate.
func TestAnUnreachableDatabaseDropsNothing(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	b := setup(t, options.Client().SetAppName(app))
	off := stacktest.FailCommand(t, app, "alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"find", "aggregate", "insert"}}, {Key: "closeConnection", Value: true},
	})
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	err := b.inbox.Once(ctx, newEntry("1"), func(context.Context) error {
		t.Error("the handler runs without an inbox")
		return nil
	}, inbox.OnceConfig{})
	if err == nil || errors.Is(err, inbox.ErrDuplicate) {
		t.Fatalf("the error is %v", err)
	}

	off()
	if fresh := b.admit(t, b.inbox, newEntry("1")); !fresh[0] {
		t.Fatal("rejected afterwards")
	}
}
