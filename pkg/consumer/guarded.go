package consumer

import (
	"context"
	"errors"
	"runtime/debug"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

// errExited is the value of a *panicError of a function that has ended its goroutine.
var errExited = errors.New("the function ended its goroutine, as t.FailNow and runtime.Goexit do")

// runGuarded calls a function of the user in a separate goroutine. It returns a panic, or the end of that goroutine, as a
// *panicError: a lane whose goroutine ended would never free its slot and its messages.
func runGuarded(callback func() error) error {
	done := make(chan error, 1)
	go func() {
		var err error
		returned := false
		defer func() {
			if panicked := recover(); panicked != nil {
				err = &panicError{Value: panicked, Stack: debug.Stack()}
			} else if !returned {
				err = &panicError{Value: errExited, Stack: debug.Stack()}
			}
			done <- err
		}()

		err = callback()
		returned = true
	}()
	return <-done
}

// callLimited calls callback with a timeout, or without one if timeout is negative. An error of callback after the timeout is a *timeoutError with the name of the function. The
// driver ends a statement some milliseconds earlier.
func callLimited(ctx context.Context, timeout time.Duration, name string, callback func(ctx context.Context) error) error {
	if timeout < 0 {
		return callback(ctx)
	}

	limited, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err := callback(limited)
	end, _ := limited.Deadline()
	isLate := limited.Err() != nil || mongo.IsTimeout(err) && time.Until(end) < timeout/10
	if err != nil && isLate && ctx.Err() == nil {
		err = &timeoutError{Name: name, After: timeout, Err: err}
	}
	return err
}
