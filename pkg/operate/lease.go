package operate

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// Pause stops the watcher on all nodes until [Operator.Resume] is called. The owner sends what it has read, and releases the
// lease at its next renewal, usually within a second. Events stay in the outbox.
func (o *Operator) Pause(ctx context.Context) error {
	return o.changeLease(ctx, "pause the watcher", admin.Lease.Pause)
}

// Resume ends a pause.
func (o *Operator) Resume(ctx context.Context) error {
	return o.changeLease(ctx, "resume the watcher", admin.Lease.Resume)
}

// StepDownOptions change a step-down. The zero value is the default.
type StepDownOptions struct {
	Force bool // also if no other live node can take over; nothing is sent for that time
}

// StepDown makes the owner release the lease, and keeps it from acquiring the lease for the duration hold, which must be
// positive. A standby takes over at once. Without a live standby, StepDown returns [ErrConflict] unless options.Force is set.
func (o *Operator) StepDown(ctx context.Context, hold time.Duration, options StepDownOptions) error {
	order := admin.StepDownOrder{Hold: hold, Force: options.Force}
	return o.changeLease(ctx, "make the owner step down", func(lease admin.Lease, ctx context.Context) error { return lease.StepDown(ctx, order) })
}

// changeLease calls change for the lease of the watcher, or of one slot.
func (o *Operator) changeLease(ctx context.Context, doing string, change func(lease admin.Lease, ctx context.Context) error) error {
	use, err := o.prepare(ctx)
	if err == nil {
		err = change(use.Lease(), ctx)
	}
	return explain(doing, err)
}
