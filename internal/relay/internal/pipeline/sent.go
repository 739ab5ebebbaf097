package pipeline

import (
	"slices"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
)

// Delivery is an envelope whose delivery is recorded on its document, because the configuration requires it.
type Delivery struct {
	Outcome ledger.Outcome // with a place for each target that has the envelope

	ticket record.Ticket
	void   bool // a target waits, which the ledger stores separately
}

// recordDeliveries passes resolved envelopes to the ledger. Their tickets are resolved when the deliveries are recorded, so a
// checkpoint never passes a delivery that is still to be recorded. A void delivery is not recorded: its ticket is
// resolved at once.
func (r *Resolver) recordDeliveries(list []*Delivery) {
	if len(list) == 0 {
		return
	}

	for _, s := range list {
		if s.void {
			r.tracker.Resolve(s.ticket)
		}
	}
	list = slices.DeleteFunc(list, func(delivery *Delivery) bool { return delivery.void })

	for _, s := range list {
		s.Outcome.End, s.Outcome.Recorded = ledger.Sent, true
		s.Outcome.Stored = func(*ledger.Outcome) {
			r.tracker.Resolve(s.ticket)
			// Deliver may be waiting for room in the window. The bytes were released by the acks.
			r.budget.wakeWaiters()
		}
		r.cfg.Ledger.Add(&s.Outcome)
	}
}
