// Package unit tracks one attempt of a transaction whose callback may call Transaction again: who has joined,
// whether it can still commit, and whether it is over. internal/mongodb/transaction and internal/lab/memory share it, so that a test
// against the memory sees the same errors as the service in production.
//
// No call blocks. All methods are safe for concurrent use.
package unit

import (
	"errors"
	"fmt"
	"sync"
)

var (
	// ErrRollbackOnly means that the transaction cannot commit.
	ErrRollbackOnly = errors.New("transaction is rollback-only")

	// ErrEnded means that the callback of the transaction has returned, or has ended the transaction itself.
	ErrEnded = errors.New("transaction has ended")
)

// Work is one attempt of a transaction. A nil Work stands for a transaction that was started elsewhere: it
// accepts every operation, and ignores SetRollbackOnly. The zero value is ready to use.
type Work struct {
	mu            sync.Mutex
	rollbackCause error // why the transaction can only roll back
	joined        int   // joined callbacks that have not returned
	ended         bool
}

// Join runs fn as a part of w. If fn fails or panics, w can only roll back.
func (w *Work) Join(fn func() error) error {
	// The lock is not held during fn, which may join again.
	w.mu.Lock()
	err := w.checkLocked()
	if err == nil {
		w.joined++
	}
	w.mu.Unlock()
	if err != nil {
		return err
	}

	// If fn panics, this error stays.
	err = errors.New("a joined transaction panicked")
	defer func() {
		w.SetRollbackOnly(err)
		w.mu.Lock()
		w.joined--
		w.mu.Unlock()
	}()

	err = fn()
	return err
}

// Check returns ErrEnded or ErrRollbackOnly if no more operations can run in w. ErrRollbackOnly also wraps the
// cause with its labels, so that the driver retries as if the callback had returned the cause.
func (w *Work) Check() error {
	if w == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.checkLocked()
}

func (w *Work) checkLocked() error {
	switch {
	case w.ended:
		return ErrEnded
	case w.rollbackCause != nil:
		return fmt.Errorf("%w: %w", ErrRollbackOnly, w.rollbackCause)
	}
	return nil
}

// SetRollbackOnly makes w rollback-only if cause is not nil. If it is so already, the first cause stays.
func (w *Work) SetRollbackOnly(cause error) {
	if w == nil || cause == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.rollbackCause == nil {
		w.rollbackCause = cause
	}
}

// EndForCommit ends w before its commit: from now on nothing can join it. It returns an error if w must not
// commit. A joined callback that still runs in another goroutine would write into a transaction that may
// already be committed, so that is an error as well.
func (w *Work) EndForCommit() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.joined > 0 && w.rollbackCause == nil {
		w.rollbackCause = fmt.Errorf("%d joined transactions are still running: a transaction belongs to one goroutine", w.joined)
	}

	err := w.checkLocked()
	w.ended = true
	return err
}

// End makes all later operations in w fail.
func (w *Work) End() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended = true
}

// Ended reports whether w is over.
func (w *Work) Ended() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.ended
}
