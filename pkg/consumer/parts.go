package consumer

import (
	"slices"

	"github.com/outrelay/outrelay/internal/consumerparts"
)

func init() {
	consumerparts.IsHeld = func(c any) bool {
		x := c.(*Consumer)
		isSuspended := func(r *registration) bool { return r.suspension.isSuspended() }
		return x.gate.isPaused() || slices.ContainsFunc(x.reg.snapshot().all, isSuspended)
	}
}
