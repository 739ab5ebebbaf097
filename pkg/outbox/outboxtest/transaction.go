package outboxtest

import (
	"context"
	"errors"
	"sync"
	"testing"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/pkg/outbox"
)

func nestedJoins(t *testing.T, f Fixture) {
	if err := f.Transaction(t.Context(), func(ctx context.Context) error {
		if err := f.Box.Append(ctx, eventOf("outer")); err != nil {
			return err
		}
		if err := f.Transaction(ctx, func(ctx context.Context) error { return f.Box.Append(ctx, eventOf("inner")) }); err != nil {
			return err
		}

		if n := len(f.Stored(t)); n != 0 {
			t.Errorf("the inner one has committed: %d are stored", n)
		}

		return nil
	}); err != nil {
		t.Fatal(err)
	}

	f.want(t, "outer", "inner")
}

func rollbackOnly(t *testing.T, f Fixture) {
	inner := errors.New("inner")
	for name, fail := range map[string]func(ctx context.Context) error{
		"joined transaction fails": func(ctx context.Context) error {
			_ = f.Transaction(ctx, func(context.Context) error { return inner })
			return inner
		},
		"joined transaction panics": func(ctx context.Context) error {
			defer func() { _ = recover() }()
			_ = f.Transaction(ctx, func(context.Context) error { panic("x") })
			return nil
		},
		"the store refuses the event": func(ctx context.Context) error {
			e := eventOf("twice")
			_ = f.Box.Append(ctx, e)
			_ = f.Box.Append(ctx, e)
			return nil
		},
	} {
		runs := 0
		err := f.Transaction(t.Context(), func(ctx context.Context) error {
			runs++
			if err := f.Box.Append(ctx, eventOf("before")); err != nil {
				return err
			}

			want := fail(ctx)
			if err := f.Box.Append(ctx, eventOf("after")); !errors.Is(err, outbox.ErrRollbackOnly) || want != nil && !errors.Is(err, want) {
				t.Errorf("%s: Append afterwards: %v", name, err)
			}

			if _, err := f.Box.Scheduled(ctx, outbox.ScheduledQuery{}); !errors.Is(err, outbox.ErrRollbackOnly) {
				t.Errorf("%s: Scheduled afterwards: %v", name, err)
			}

			if err := f.Transaction(ctx, func(context.Context) error { return nil }); !errors.Is(err, outbox.ErrRollbackOnly) {
				t.Errorf("%s: a nested transaction afterwards: %v", name, err)
			}

			return nil // swallows it
		})

		if !errors.Is(err, outbox.ErrRollbackOnly) || runs != 1 {
			t.Errorf("%s: after %d runs: %v", name, runs, err)
		}
	}

	f.want(t)
}

func endedTransaction(t *testing.T, f Fixture) {
	var leaked context.Context
	if err := f.Transaction(t.Context(), func(ctx context.Context) error {
		leaked = ctx
		return f.Box.Append(ctx, eventOf("a"))
	}); err != nil {
		t.Fatal(err)
	}

	if err := f.Plain.Append(leaked, eventOf("late")); !errors.Is(err, outbox.ErrTransactionEnded) {
		t.Errorf("Append with a leaked context: %v", err)
	}

	if err := f.Transaction(leaked, func(context.Context) error { return nil }); !errors.Is(err, outbox.ErrTransactionEnded) {
		t.Errorf("a transaction with a leaked context: %v", err)
	}

	f.want(t, "a")
}

func transientRunsAgain(t *testing.T, f Fixture) {
	runs := 0
	if err := f.Transaction(t.Context(), func(ctx context.Context) error {
		runs++
		if err := f.Box.Append(ctx, eventOf("a")); err != nil {
			return err
		}
		if runs < 3 {
			return mongo.CommandError{Code: 112, Labels: []string{"TransientTransactionError"}}
		}

		return nil
	}); err != nil || runs != 3 {
		t.Errorf("after %d runs: %v", runs, err)
	}

	f.want(t, "a")
}

func contextEnds(t *testing.T, f Fixture) {
	ctx, cancel := context.WithCancel(t.Context())
	runs := 0
	err := f.Transaction(ctx, func(ctx context.Context) error {
		runs++
		if err := f.Box.Append(ctx, eventOf("a")); err != nil {
			return err
		}

		cancel()
		if runs == 1 {
			return mongo.CommandError{Code: 112, Labels: []string{"TransientTransactionError"}}
		}

		return nil
	})

	if !errors.Is(err, context.Canceled) || runs != 1 {
		t.Errorf("after %d runs: %v", runs, err)
	}

	f.want(t)
}

// Two that append the same id at the same time: one has it, whatever the other does in between.
func concurrentTransactions(t *testing.T, f Fixture) {
	const n = 8
	ev := eventOf("once")
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			errs[i] = f.Transaction(t.Context(), func(ctx context.Context) error { return f.Box.Append(ctx, ev, eventOf("with it")) })
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
		t.Errorf("%d of %d have appended it", done, n)
	}

	f.want(t, "once", "with it")
}
