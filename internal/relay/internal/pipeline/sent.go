package pipeline

import (
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
)

// Delivery is an envelope whose delivery is recorded on its document, because the configuration requires it.
type Delivery struct {
	Outcome ledger.Outcome // with a place for each target that has the envelope

	ticket record.Ticket
}

// recordDeliveries passes resolved envelopes to the ledger. Their tickets are resolved when the deliveries are recorded, so a
// checkpoint never passes a delivery that is still to be recorded. An envelope that waits for all of its topics has nothing to record: its
// ticket is resolved at once.
func (r *Resolver) recordDeliveries(list []*Delivery) {
	for _, s := range list {
		if s.Outcome.Partial && len(s.Outcome.Sent) == 0 {
			r.tracker.Resolve(s.ticket)
			continue
		}

		s.Outcome.End, s.Outcome.Recorded = ledger.Sent, true
		s.Outcome.Stored = func(*ledger.Outcome) {
			r.tracker.Resolve(s.ticket)
			// Deliver may be waiting for room in the window. The bytes were released by the acks.
			r.budget.wakeWaiters()
		}
		r.cfg.Ledger.Add(&s.Outcome)
	}
}
