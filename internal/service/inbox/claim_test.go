package inbox_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/inbox"

	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// renewedSoon is a lease that is renewed after 3 s, so it survives a delay of the process of 6 s.
const renewedSoon = 9 * time.Second

// TestCrashBetweenClaimAndHandled: a process claims a message and dies. When the lease expires by
// the server's clock, another process can claim the message. If the first one continues, it cannot
// finish.
func TestCrashBetweenClaimAndHandled(t *testing.T) {
	t.Parallel()
	b := setup(t)
	effect := func(ctx context.Context) error {
		_, err := b.db.Collection("effects").InsertOne(ctx, bson.D{})
		return err
	}
	crashed, err := b.newInbox(t).Claim(t.Context(), newEntryAt("1", 0, 4), 300*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}

	stacktest.Eventually(t, "the lease to end", func() bool {
		err := b.inbox.Once(t.Context(), newEntryAt("1", 0, 4), effect, inbox.OnceConfig{Claim: true})
		if err != nil && !errors.Is(err, inbox.ErrInProgress) {
			t.Fatal(err)
		}

		return err == nil
	})

	err = b.transaction(t.Context(), func(ctx context.Context) error {
		if err := effect(ctx); err != nil {
			return err
		}
		return crashed.Handled(ctx)
	})
	if !errors.Is(err, inbox.ErrClaimLost) {
		t.Fatalf("the old holder's transaction ends with %v", err)
	}
	if n := b.countDocuments(t, "effects", bson.D{}); n != 1 {
		t.Fatalf("%d effects", n)
	}
}

// TestRenewalsDoNotDisturbTheHandlersTransaction: the transaction has read before and writes after
// several renewals.
func TestRenewalsDoNotDisturbTheHandlersTransaction(t *testing.T) {
	t.Parallel()
	w := new(watch)
	b := setup(t, w.options())
	renewed := make(chan struct{}, 100)
	w.seen = func(s sent) {
		if s.name == "update" && s.coll == "inbox_claims" {
			renewed <- struct{}{}
		}
	}

	c, err := b.inbox.Claim(t.Context(), newEntry("1"), renewedSoon)
	if err != nil {
		t.Fatal(err)
	}

	var attempts int
	err = c.Hold(t.Context(), func(ctx context.Context) error {
		return b.transaction(ctx, func(ctx context.Context) error {
			attempts++
			if _, err := b.inbox.Handled(ctx, newEntry("1").Key); err != nil { // begins the snapshot
				return err
			}

			for range 2 {
				select {
				case <-renewed:
				case <-ctx.Done():
					return context.Cause(ctx)
				}
			}

			return c.Handled(ctx)
		})
	})
	if err != nil || attempts != 1 || w.countConflicts() != 0 {
		t.Fatalf("%v after %d attempts and %d conflicts", err, attempts, w.countConflicts())
	}
	if err := c.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := b.countDocuments(t, "inbox_claims", bson.D{}); n != 0 {
		t.Fatalf("%d leases stay", n)
	}
}

// TestRunEndsWithTheLeaseWhenTheDatabaseIsAway: the clock of this process decides, because the
// server cannot be reached.
func TestRunEndsWithTheLeaseWhenTheDatabaseIsAway(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	b := setup(t, options.Client().SetAppName(app))
	c, err := b.inbox.Claim(t.Context(), newEntry("1"), 300*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}

	stacktest.FailCommand(t, app, "alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"update"}}, {Key: "closeConnection", Value: true},
	})
	err = c.Run(t.Context())
	if !errors.Is(err, inbox.ErrClaimLost) || !strings.Contains(err.Error(), "could not be renewed") {
		t.Fatalf("Run: got %v, want ErrClaimLost with the error of the renewal", err)
	}
}

func TestRunEndsWithItsContext(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c, err := b.inbox.Claim(t.Context(), newEntry("1"), 0)
	if err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Run(ctx); err != nil {
		t.Fatal(err)
	}
}

// TestRunEndsQuietlyOnceHandled: a lease that was deleted because its message is handled is not
// lost.
func TestRunEndsQuietlyOnceHandled(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c, err := b.inbox.Claim(t.Context(), newEntry("1"), inbox.MinLease)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(c.Handled(t.Context()), c.Release(t.Context())); err != nil {
		t.Fatal(err)
	}
	if err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestRunEndsQuietlyOnceHandledAlsoWhenTheDatabaseIsAway: after Handled, the owner and the epoch of
// the marker decide, so a lease that could not be renewed does not end the handler.
func TestRunEndsQuietlyOnceHandledAlsoWhenTheDatabaseIsAway(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	b := setup(t, options.Client().SetAppName(app))
	c, err := b.inbox.Claim(t.Context(), newEntry("1"), inbox.MinLease)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Handled(t.Context()); err != nil {
		t.Fatal(err)
	}

	stacktest.FailCommand(t, app, "alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"update"}}, {Key: "closeConnection", Value: true},
	})
	if err := c.Run(t.Context()); err != nil {
		t.Errorf("Run ends with %v", err)
	}

	if err := c.Hold(t.Context(), func(ctx context.Context) error { return ctx.Err() }); err != nil {
		t.Errorf("Hold ends with %v", err)
	}
}

// TestEpochsRiseAlsoWhenLeasesAreRemovedAndClocksGoBack: the epoch of the marker is far above the
// clock.
func TestEpochsRiseAlsoWhenLeasesAreRemovedAndClocksGoBack(t *testing.T) {
	t.Parallel()
	b := setup(t)
	old, err := b.inbox.Claim(t.Context(), newEntry("1"), 0)
	if err != nil {
		t.Fatal(err)
	}

	future := time.Now().Add(100 * time.Hour).UnixMilli()
	if _, err := b.db.Collection("inbox").UpdateOne(t.Context(), bson.D{}, bson.D{{Key: "$set", Value: bson.D{{Key: "e", Value: future}}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.db.Collection("inbox_claims").DeleteMany(t.Context(), bson.D{}); err != nil {
		t.Fatal(err)
	}

	c, err := b.newInbox(t).Claim(t.Context(), newEntry("1"), 0)
	if err != nil || c.Attempt() != 2 {
		t.Fatalf("%v", err)
	}
	if err := old.Handled(t.Context()); !errors.Is(err, inbox.ErrClaimLost) {
		t.Fatalf("the old holder ends with %v", err)
	}
	if err := c.Handled(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestReleaseOfAPartition(t *testing.T) {
	t.Parallel()
	b := setup(t)
	elsewhere := newEntryAt("2", 0, 2)
	elsewhere.Place.Partition = 1
	for _, e := range []inbox.Entry{newEntryAt("1", 0, 1), elsewhere} {
		if _, err := b.inbox.Claim(t.Context(), e, 0); err != nil {
			t.Fatal(err)
		}
	}

	if err := b.inbox.Release(t.Context(), inbox.Partition{Consumer: "group/a", Topic: "orders"}); err != nil {
		t.Fatal(err)
	}

	other := b.newInbox(t)
	if _, err := other.Claim(t.Context(), newEntryAt("1", 0, 1), 0); err != nil {
		t.Error(err)
	}

	if _, err := other.Claim(t.Context(), elsewhere, 0); !errors.Is(err, inbox.ErrInProgress) {
		t.Errorf("a claim of another partition: %v", err)
	}
}

// TestEagerHandlersBeginOnce: of many simultaneous handlers of one message, only one begins.
func TestEagerHandlersBeginOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var begun atomic.Int64
	held, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- b.inbox.Once(t.Context(), newEntry("1"), func(context.Context) error {
			if begun.Add(1) == 1 {
				close(held)
			}
			return nil
		}, inbox.OnceConfig{Claim: true})
	}()
	<-held
	for range 10 {
		err := b.newInbox(t).Once(t.Context(), newEntry("1"), func(context.Context) error {
			begun.Add(1)
			return nil
		}, inbox.OnceConfig{Claim: true})
		if !errors.Is(err, inbox.ErrInProgress) && !errors.Is(err, inbox.ErrDuplicate) {
			t.Errorf("the error is %v", err)
		}
	}

	if err := <-done; err != nil || begun.Load() != 1 {
		t.Fatalf("%v, begun %d times", err, begun.Load())
	}
}

// TestNoClockButTheServers: the commands of a claim, a renewal, a release and a sweep contain no
// date. The dates of new markers come from the responses of the server.
func TestNoClockButTheServers(t *testing.T) {
	t.Parallel()
	w := new(watch)
	b := setup(t, w.options())
	w.reset()
	c, err := b.inbox.Claim(t.Context(), newEntryAt("1", 0, 1), renewedSoon)
	if err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	w.seen = func(s sent) {
		if s.name == "update" && s.coll == "inbox_claims" {
			cancel()
		}
	}
	if err := c.Run(ctx); err != nil {
		t.Fatal(err)
	}

	w.seen = nil
	if err := c.Handled(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.Defer(t.Context(), time.Hour); err != nil {
		t.Fatal(err)
	}

	b.admit(t, b.inbox, newEntryAt("2", 0, 2), newEntry("3"))
	if _, err := b.inbox.Sweep(t.Context(), 0); err != nil {
		t.Fatal(err)
	}

	all := append(append(w.commandsOn("inbox"), w.commandsOn("inbox_claims")...), w.commandsOn("inbox_offsets")...)
	if len(all) < 8 {
		t.Fatalf("only %d commands were seen", len(all))
	}

	for _, s := range all {
		for _, d := range findDates(s.raw) {
			at := time.Unix(int64(s.time), 0)
			switch {
			case d.UnixMilli() == 0: // "never", in a comparison
			case s.name == "insert" && (d.Equal(at) || d.Equal(at.Add(inbox.DefaultRetention))):
			default:
				t.Errorf("%s of %s sends %s; the server's time was %s", s.name, s.coll, d, at)
			}
		}
	}
}

// TestTheLeaseOfOneCall: the lease applies to that call, with the same limits as the lease of the
// Inbox.
func TestTheLeaseOfOneCall(t *testing.T) {
	t.Parallel()
	b := setup(t)
	never := func(context.Context) error { t.Error("it was handled"); return nil }
	for _, d := range []time.Duration{inbox.MinLease - 1, inbox.DefaultRetention + 1} {
		if err := b.inbox.Once(t.Context(), newEntry("1"), never, inbox.OnceConfig{Claim: true, Lease: d}); !errors.Is(err, inbox.ErrInvalid) {
			t.Errorf("a lease of %s: %v", d, err)
		}
	}

	err := b.inbox.Once(t.Context(), newEntry("1"), func(context.Context) error {
		if _, err := b.newInbox(t).Claim(t.Context(), inbox.Entry{Key: inbox.Key{Consumer: "group/a", ID: "1"}}, 0); !errors.Is(err, inbox.ErrInProgress) {
			t.Errorf("claimed twice: %v", err)
		}
		return nil
	}, inbox.OnceConfig{Claim: true, Lease: time.Minute})
	if err != nil {
		t.Error(err)
	}
}
