package consumer

import (
	"context"
	"slices"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/service/consuming"
)

// These functions are for packages of this module: others cannot name the types of their arguments.

// WithSurroundings replaces the surroundings of the consumer. Parts that are not replaced keep those of the options, which is
// the default.
func WithSurroundings(surroundings consuming.Surroundings) Option {
	return option(func(settings *settings) {
		if surroundings.Transport != nil {
			settings.transport = surroundings.Transport
		}
		if surroundings.Open != nil {
			settings.open = surroundings.Open
		}
		if surroundings.Inbox != nil {
			settings.inbox.replacement = surroundings.Inbox
		}
		if surroundings.Transact != nil {
			settings.transact = surroundings.Transact
		}
	})
}

// IsHeld reports whether the consumer is paused, or one of its handlers is suspended.
func (c *Consumer) IsHeld(module.Key) bool {
	isSuspended := func(registration *registration) bool { return registration.suspension.isSuspended() }
	return c.gate.isPaused() || slices.ContainsFunc(c.reg.snapshot().all, isSuspended)
}

// WaitFor is outboxtest.WaitFor, with a condition.
func (c *Consumer) WaitFor(ctx context.Context, _ module.Key, pattern string, cond func(message *Message) bool) (*Message, error) {
	return c.waitFor(ctx, pattern, cond)
}

// WithPreparation returns h with a function that creates what h needs. A consumer calls it before the first message, and again if
// it fails. It may be called more than once.
func (h Handler) WithPreparation(_ module.Key, prepare func(ctx context.Context) error) Handler {
	// A Handler is a value that services may share, so its list is copied.
	h.prepares = append(slices.Clone(h.prepares), prepare)
	return h
}

// AfterBatch lets a middleware of a batch handler observe the outcome of the batch. f is called once, before the transaction
// commits, with the outcome of the batch that contains the message. If the batch was not run, f gets an error of
// [Discard]. A middleware needs this because it runs for each message on the way into the batch: its next handler
// returns before the batch runs. AfterBatch returns false and never calls f if ctx is not the context of a batch handler.
func AfterBatch(ctx context.Context, _ module.Key, f func(err error)) bool {
	collector, ok := ctx.Value(collectorKey{}).(*batchCollector)
	if ok {
		collector.callbacks = append(collector.callbacks, f)
	}
	return ok
}
