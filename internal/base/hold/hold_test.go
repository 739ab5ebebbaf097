package hold_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/outrelay/outrelay/internal/base/hold"
)

func TestOneHolderAtATime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var g hold.Guard
		inner, leave, ok, err := g.Enter(t.Context(), "a", true)
		if !ok || err != nil {
			t.Fatal(ok, err)
		}

		if _, _, ok, err := g.Enter(t.Context(), "a", false); ok || err != nil {
			t.Error("a second handler was admitted, or got an error:", ok, err)
		}
		if _, out, ok, err := g.Enter(t.Context(), "b", false); !ok || err != nil {
			t.Error("another id is not free:", ok, err)
		} else {
			out()
		}

		// The context of the holder lets it in a second time.
		if _, out, ok, err := g.Enter(inner, "a", true); !ok || err != nil {
			t.Error("who holds one is not let in:", ok, err)
		} else {
			out()
		}

		gone, cancel := context.WithCancelCause(t.Context())
		why := errors.New("gone")
		cancel(why)
		if _, _, ok, err := g.Enter(gone, "a", true); ok || !errors.Is(err, why) {
			t.Error("waiting does not end with the context:", ok, err)
		}

		entered := false
		go func() {
			_, out, ok, err := g.Enter(t.Context(), "a", true)
			entered = ok && err == nil
			out()
		}()

		synctest.Wait()
		if entered {
			t.Error("two hold the same id")
		}

		leave()
		synctest.Wait()
		if !entered {
			t.Error("who waits is not let in")
		}
	})
}

func TestALostLeaseEndsTheHandler(t *testing.T) {
	t.Parallel()
	gone, failed := errors.New("lost"), errors.New("failed")
	keep := func(context.Context) error { return gone }
	lost, err := hold.RunWhile(t.Context(), keep, func(ctx context.Context) error {
		<-ctx.Done()
		return errors.Join(failed, context.Cause(ctx))
	})
	if !errors.Is(lost, gone) || !errors.Is(err, failed) || !errors.Is(err, gone) {
		t.Error(lost, err)
	}
}

func TestNothingRunsOnBehindAHandler(t *testing.T) {
	t.Parallel()
	ended := false
	keep := func(ctx context.Context) error {
		<-ctx.Done()
		ended = true
		return nil
	}
	if lost, err := hold.RunWhile(t.Context(), keep, func(context.Context) error { return nil }); lost != nil || err != nil || !ended {
		t.Error(lost, err, ended)
	}

	ended = false
	func() {
		defer func() {
			if r := recover(); r != "x" || !ended {
				t.Error(r, ended)
			}
		}()
		_, _ = hold.RunWhile(t.Context(), keep, func(context.Context) error { panic("x") })
	}()
}
