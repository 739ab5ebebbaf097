package readiness

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
)

// Calls repeats calls to the servers until they succeed. Their errors are problems of the state.
type Calls struct {
	Client  *mongo.Client
	State   *State
	Timeout time.Duration // of one attempt at a call that is cheap for the server

	// Ticks counts signs of life: the pump got a batch, also an empty one, or made progress with a
	// batch.
	Ticks atomic.Int64
}

// OperationTime returns the current cluster time of the server. It blocks until MongoDB responds or
// ctx ends.
func (c *Calls) OperationTime(ctx context.Context) (clusterTime bson.Timestamp, err error) {
	err = c.RetryCall(ctx, func(ctx context.Context) (err error) {
		clusterTime, err = mongodb.ClusterTime(ctx, c.Client)
		return err
	})
	return clusterTime, err
}

// RetryCall repeats op until it succeeds. Each attempt has a deadline, so op must be cheap for the
// server.
func (c *Calls) RetryCall(ctx context.Context, op func(context.Context) error) error {
	return c.Retry(ctx, "mongodb", func(ctx context.Context) error {
		call, cancel := context.WithTimeout(ctx, c.Timeout)
		defer cancel()
		return op(call)
	})
}

// RetryRead is like RetryCall, without deadlines. It is for reads of a collection: without an index
// they take time in proportion to its size, so an attempt after a deadline would only start from
// the beginning.
func (c *Calls) RetryRead(ctx context.Context, op func(context.Context) error) error {
	// The pump may be the caller. Without ticks the monitor would consider it hung.
	defer c.KeepTicking(ctx, time.Second)()
	return c.Retry(ctx, "mongodb", op)
}

// RetryFenced repeats a fenced write until it succeeds, the lease is lost, or ctx ends.
func (c *Calls) RetryFenced(ctx context.Context, op func() error) error {
	return c.Retry(ctx, "mongodb", func(context.Context) error {
		err := op()
		if errors.Is(err, lease.ErrLeaseLost) {
			return retry.Permanent(err)
		}
		return err
	})
}

// Retry repeats op until it succeeds or ctx ends, and reports its errors as a problem of part.
func (c *Calls) Retry(ctx context.Context, part string, op func(context.Context) error) error {
	err := retry.Do(ctx, retry.Reopen, op, func(err error, _ time.Duration) { c.State.ReportProblem(part, err) })
	if err == nil {
		c.State.ClearProblems(part)
	}
	return err
}

// KeepTicking counts ticks until stop is called or ctx ends. It is for work whose single steps have
// deadlines, but which may take longer than a stage may stand still.
func (c *Calls) KeepTicking(ctx context.Context, every time.Duration) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var ticking sync.WaitGroup
	ticking.Go(func() {
		for retry.Sleep(ctx, every) == nil {
			c.Ticks.Add(1)
		}
	})
	return func() {
		cancel()
		ticking.Wait()
	}
}
