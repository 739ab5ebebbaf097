package consumer

import (
	"context"
	"errors"
	"time"
)

// defaults are settings of the default policy and disposer.
type defaults struct{}

// defaultDecider is the policy of handlers that name none.
func defaultDecider() Decider { return plainDecider{} }

type plainDecider struct{}

func (plainDecider) Decide(_ error, _ *Message, a Attempts) Verdict {
	if a.Failed < 3 {
		return Verdict{Action: RetryInline, Delay: time.Duration(a.Failed) * 50 * time.Millisecond}
	}
	return Verdict{Action: DeadLetter, Reason: "attempts_exhausted"}
}

// defaultDisposer carries out verdicts where no Disposer was given.
func (c *Consumer) defaultDisposer() (Disposer, error) { return nowhere{}, nil }

type nowhere struct{}

func (nowhere) Dispose(_ context.Context, _ *Message, _ string, v Verdict, cause error) error {
	if v.Action == Discard {
		return nil
	}
	return errors.Join(errors.New("no disposer"), cause)
}
