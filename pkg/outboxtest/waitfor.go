package outboxtest

import (
	"context"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/pkg/consumer"
)

// WaitFor blocks until the consumer, which may also be one on real servers, has finished a message whose type matches the pattern and
// for which cond, if not nil, is true. It returns a copy of the message as it was read. WaitFor only observes: it does not count as a
// handler. Messages that were finished before the call do not match. If ctx ends first, the error has its cause.
func WaitFor(
	ctx context.Context, c *consumer.Consumer, pattern string, cond func(message *consumer.Message) bool,
) (*consumer.Message, error) {
	if cond == nil {
		cond = func(*consumer.Message) bool { return true }
	}
	return c.WaitFor(ctx, module.Key{}, pattern, cond)
}
