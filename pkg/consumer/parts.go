package consumer

import (
	"context"
	"slices"

	"github.com/outrelay/outrelay/internal/consumerparts"
)

func init() {
	consumerparts.IsHeld = func(c any) bool {
		x := c.(*Consumer)
		isSuspended := func(r *registration) bool { return r.suspension.isSuspended() }
		return x.gate.isPaused() || slices.ContainsFunc(x.reg.snapshot().all, isSuspended)
	}
	consumerparts.AfterBatch = afterBatch
	consumerparts.WaitFor = func(ctx context.Context, c any, pattern string, cond func(m any) bool) (any, error) {
		return c.(*Consumer).waitFor(ctx, pattern, func(m *Message) bool { return cond(m) })
	}

	// A Handler is a value that services may share, so its list is copied.
	consumerparts.Prepared = func(h any, prepare func(ctx context.Context) error) any {
		x := h.(Handler)
		x.prepares = append(slices.Clone(x.prepares), prepare)
		return x
	}

	// Parts that are not replaced keep those of the options.
	consumerparts.Option = func(x consumerparts.Surroundings) any {
		return option(func(s *settings) {
			if x.Transport != nil {
				s.transport = x.Transport
			}
			if x.Open != nil {
				s.open = x.Open
			}
			if x.Inbox != nil {
				s.inbox.replacement = x.Inbox
			}
			if x.Transact != nil {
				s.transact = x.Transact
			}
		})
	}
}
