package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

func TestEveryErrorHasItsSentinelAndClass(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err      error
		sentinel error
		class    string
	}{
		{consumer.ErrNoHandler, consumer.ErrNoHandler, deadletter.ClassUnknown},
		{consumer.ErrMalformed, consumer.ErrMalformed, deadletter.ClassMalformed},
		{&consumer.TimeoutError{After: time.Second}, consumer.ErrTimeout, deadletter.ClassTimeout},
		{&consumer.LifetimeError{Ran: time.Second}, consumer.ErrTimeout, deadletter.ClassTimeout},
		{&consumer.ExpiredError{}, consumer.ErrExpired, deadletter.ClassExpired},
		{&consumer.NotDueError{}, nil, consumer.ClassNotDue},
		{&consumer.HandlerError{Message: &consumer.Message{}, Err: io.EOF}, nil, deadletter.ClassHandler},
		{&consumer.PanicError{Value: io.EOF}, consumer.ErrPanic, deadletter.ClassPanic},
		// As its letter has it, for every cause.
		{consumer.Reject(consumer.ErrMalformed), consumer.ErrMalformed, deadletter.ClassRejected},
	} {
		wrapped := fmt.Errorf("deep: %w", fmt.Errorf("deeper: %w", c.err))

		for _, sentinel := range []error{
			consumer.ErrNoHandler, consumer.ErrMalformed, consumer.ErrTimeout, consumer.ErrExpired, consumer.ErrPanic,
		} {
			if got := errors.Is(wrapped, sentinel); got != errors.Is(c.sentinel, sentinel) {
				t.Errorf("%T: is %v: %v", c.err, sentinel, got)
			}
		}

		if got := consumer.ClassOf(wrapped); got != c.class {
			t.Errorf("%T: class %q, want %q", c.err, got, c.class)
		}
		if c.err.Error() == "" || strings.Contains(c.err.Error(), "%!") {
			t.Errorf("%T: text %q", c.err, c.err)
		}
	}
}

func TestErrorsKeepTheirCauses(t *testing.T) {
	t.Parallel()
	for _, err := range []error{
		&consumer.HandlerError{Message: &consumer.Message{}, Err: io.EOF}, &consumer.PanicError{Value: io.EOF},
	} {
		if !errors.Is(err, io.EOF) {
			t.Errorf("%T hides its cause", err)
		}
	}

	if !errors.Is(&consumer.TimeoutError{}, context.DeadlineExceeded) {
		t.Error("a timeout is no exceeded deadline")
	}
	if got := consumer.ClassOf(&inbox.DuplicateError{}); got != consumer.ClassDuplicate {
		t.Errorf("class of a duplicate: %q", got)
	}
}
