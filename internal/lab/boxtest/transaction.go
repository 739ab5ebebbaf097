package boxtest

import (
	"context"
	"errors"
	"sync"
	"testing"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/pkg/outbox"
)

func nestedJoins(t *testing.T, fixture Fixture) {
	if err := fixture.Transaction(t.Context(), func(ctx context.Context) error {
		if err := fixture.Box.Append(ctx, newEvent("outer")); err != nil {
			return err
		}
		err := fixture.Transaction(ctx, func(ctx context.Context) error { return fixture.Box.Append(ctx, newEvent("inner")) })
		if err != nil {
			return err
		}

		if n := len(fixture.Stored(t)); n != 0 {
			t.Errorf("the inner transaction has committed: %d envelopes are stored, want 0", n)
		}

		return nil
	}); err != nil {
		t.Fatal(err)
	}

	fixture.checkTypes(t, "outer", "inner")
}

// The callback returns while a goroutine of it still runs a joined transaction.
func joinedStillRuns(t *testing.T, fixture Fixture) {
	entered, release := make(chan struct{}), make(chan struct{})
	var joined sync.WaitGroup
	err := fixture.Transaction(t.Context(), func(ctx context.Context) error {
		if err := fixture.Box.Append(ctx, newEvent("outer")); err != nil {
			return err
		}
		joined.Go(func() {
			_ = fixture.Transaction(ctx, func(context.Context) error {
				close(entered)
				<-release
				return nil
			})
		})
		<-entered
		return nil
	})
	close(release)
	joined.Wait()

	if !errors.Is(err, outbox.ErrRollbackOnly) {
		t.Errorf("Transaction = %v, want %v", err, outbox.ErrRollbackOnly)
	}
	fixture.checkTypes(t)
}

func rollbackOnly(t *testing.T, fixture Fixture) {
	inner := errors.New("inner")
	for name, fail := range map[string]func(ctx context.Context) error{
		"joined transaction fails": func(ctx context.Context) error {
			_ = fixture.Transaction(ctx, func(context.Context) error { return inner })
			return inner
		},
		"joined transaction panics": func(ctx context.Context) error {
			defer func() { _ = recover() }()
			_ = fixture.Transaction(ctx, func(context.Context) error { panic("x") })
			return nil
		},
		"the store rejects the event": func(ctx context.Context) error {
			event := newEvent("twice")
			_ = fixture.Box.Append(ctx, event)
			_ = fixture.Box.Append(ctx, event)
			return nil
		},
	} {
		runs := 0
		err := fixture.Transaction(t.Context(), func(ctx context.Context) error {
			runs++
			if err := fixture.Box.Append(ctx, newEvent("before")); err != nil {
				return err
			}

			want := fail(ctx)
			err := fixture.Box.Append(ctx, newEvent("after"))
			if !errors.Is(err, outbox.ErrRollbackOnly) || want != nil && !errors.Is(err, want) {
				t.Errorf("%s: Append after the failure: %v", name, err)
			}

			for _, err := range fixture.Box.Scheduled(ctx, outbox.ScheduledQuery{}) {
				if !errors.Is(err, outbox.ErrRollbackOnly) {
					t.Errorf("%s: Scheduled after the failure: %v", name, err)
				}
			}

			err = fixture.Transaction(ctx, func(context.Context) error { return nil })
			if !errors.Is(err, outbox.ErrRollbackOnly) {
				t.Errorf("%s: a nested transaction after the failure: %v", name, err)
			}

			// The callback ignores the failure. It must not commit nevertheless.
			return nil
		})
		if !errors.Is(err, outbox.ErrRollbackOnly) || runs != 1 {
			t.Errorf("%s: got %v after %d runs, want ErrRollbackOnly after 1", name, err, runs)
		}
	}

	fixture.checkTypes(t)
}

func endedTransaction(t *testing.T, fixture Fixture) {
	var leaked context.Context
	if err := fixture.Transaction(t.Context(), func(ctx context.Context) error {
		leaked = ctx
		return fixture.Box.Append(ctx, newEvent("a"))
	}); err != nil {
		t.Fatal(err)
	}

	if err := fixture.Plain.Append(leaked, newEvent("late")); !errors.Is(err, outbox.ErrTransactionEnded) {
		t.Errorf("Append with a leaked context: %v", err)
	}

	if err := fixture.Transaction(leaked, func(context.Context) error { return nil }); !errors.Is(err, outbox.ErrTransactionEnded) {
		t.Errorf("a transaction with a leaked context: %v", err)
	}

	fixture.checkTypes(t, "a")
}

func transientRunsAgain(t *testing.T, fixture Fixture) {
	runs := 0
	if err := fixture.Transaction(t.Context(), func(ctx context.Context) error {
		runs++
		if err := fixture.Box.Append(ctx, newEvent("a")); err != nil {
			return err
		}
		if runs < 3 {
			return mongo.CommandError{Code: 112, Labels: []string{"TransientTransactionError"}}
		}

		return nil
	}); err != nil || runs != 3 {
		t.Errorf("got %v after %d runs, want success after 3", err, runs)
	}

	fixture.checkTypes(t, "a")
}

func contextEnds(t *testing.T, fixture Fixture) {
	ctx, cancel := context.WithCancel(t.Context())
	runs := 0
	err := fixture.Transaction(ctx, func(ctx context.Context) error {
		runs++
		if err := fixture.Box.Append(ctx, newEvent("a")); err != nil {
			return err
		}

		cancel()
		if runs == 1 {
			return mongo.CommandError{Code: 112, Labels: []string{"TransientTransactionError"}}
		}

		return nil
	})
	if !errors.Is(err, context.Canceled) || runs != 1 {
		t.Errorf("got %v after %d runs, want context.Canceled after 1", err, runs)
	}

	fixture.checkTypes(t)
}

// concurrentTransactions checks that only one of several transactions can append an id.
func concurrentTransactions(t *testing.T, fixture Fixture) {
	const n = 8
	ev := newEvent("once")
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			errs[i] = fixture.Transaction(t.Context(), func(ctx context.Context) error {
				return fixture.Box.Append(ctx, ev, newEvent("with it"))
			})
		})
	}
	wg.Wait()

	done := 0
	for _, err := range errs {
		if err == nil {
			done++
		} else if !mongo.IsDuplicateKeyError(err) {
			t.Error(err)
		}
	}

	if done != 1 {
		t.Errorf("%d of %d transactions have appended the event, want 1", done, n)
	}

	fixture.checkTypes(t, "once", "with it")
}
