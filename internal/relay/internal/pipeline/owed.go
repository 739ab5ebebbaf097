package pipeline

import (
	"math"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// An envelope of a sweep may wait for one topic while its record for another topic is not acked yet. A later owner that repeats the sweep finds
// the envelope in its outbox, and owes it to the other topic. So the waiting envelope must not be sent before: its end is recorded in the
// outbox, and removes the only image. Positions do not show this, because the resolved position may precede a sweep, or equal its end.

// HoldSwept keeps back the waiting envelopes of sweeps from now on, until everything that is delivered before ReleaseSwept is resolved. It is
// called before anything is sent, if the term has to sweep, and before each sweep that moves the resolved position back.
func (r *Resolver) HoldSwept() { r.oweBelow.Store(math.MaxUint64) }

// ReleaseSwept ends HoldSwept. It has no effect without it. The goroutine that delivers the swept envelopes calls it.
func (r *Resolver) ReleaseSwept() {
	_, next := r.tracker.Window()
	r.oweBelow.CompareAndSwap(math.MaxUint64, uint64(next))
}

// ReachedBySweep implements reconciler.Outlet.
func (o *Outlet) ReachedBySweep() string {
	low, _ := o.dispatcher.tracker.Window()
	if low < record.Ticket(o.dispatcher.oweBelow.Load()) {
		return ""
	}
	return o.Reached()
}
