package unit

import (
	"errors"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A call that a goroutine makes between the check and the commit must not join.
func TestNothingJoinsBeforeTheCommit(t *testing.T) {
	t.Parallel()
	var w Work
	if err := w.EndForCommit(); err != nil {
		t.Fatalf("EndForCommit of an unused unit = %v, want nil", err)
	}

	ran := false
	err := w.Join(func() error { ran = true; return nil })
	if !errors.Is(err, ErrEnded) || ran {
		t.Errorf("Join before the commit = %v, ran %t; want %v, not run", err, ran, ErrEnded)
	}
}

func TestAUnitWithARunningCallbackDoesNotCommit(t *testing.T) {
	t.Parallel()
	var w Work
	_ = w.Join(func() error {
		if err := w.EndForCommit(); !errors.Is(err, ErrRollbackOnly) {
			t.Errorf("EndForCommit while a callback runs = %v, want %v", err, ErrRollbackOnly)
		}
		return nil
	})
}

func TestTheFirstCauseStays(t *testing.T) {
	t.Parallel()
	var w Work
	first := errors.New("first")
	w.SetRollbackOnly(first)
	w.SetRollbackOnly(errors.New("second"))
	if err := w.Check(); !errors.Is(err, ErrRollbackOnly) || !errors.Is(err, first) {
		t.Errorf("Check = %v, want %v with the first cause", err, ErrRollbackOnly)
	}
	w.End()
	if err := w.Check(); !errors.Is(err, ErrEnded) {
		t.Errorf("Check after End = %v, want %v", err, ErrEnded)
	}
}
