package waiting

import (
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
)

// releaseBatch releases the offsets, gates and keys of deliveries whose fates are written, and calls
// Done.
func (f *Finisher) releaseBatch(batch []*decision) {
	tickets := make([]record.Ticket, 0, len(batch))
	var count [endCount]int
	for _, a := range batch {
		if a.hasTicket {
			tickets = append(tickets, a.ticket)
		}
		count[a.fate.End]++
	}

	// The offsets are released first: the fates are committed, so the watermark may pass them.
	if len(tickets) > 0 {
		f.config.Outlet.Settle(tickets)
	}

	for _, a := range batch {
		f.openGates(a)
		if a.Done != nil {
			a.Done(a.fate)
		}
		f.config.Count(a.fate.End, a.fate.Class)
	}
	f.config.Log.Debug("fates of envelopes are written",
		"finished", count[Finished], "retrying", count[Retrying], "waiting", count[Waiting],
		"dead", count[Dead], "dropped", count[Dropped])
}

// openGates opens the gates that an exception of the stream held, and resumes its key.
func (f *Finisher) openGates(a *decision) {
	if a.Origin == outboxes.OriginStream && a.Claim == "" {
		for _, topic := range a.gatesToOpen() {
			f.config.Outlet.OpenGate(a.NS, topic, a.Key)
		}
	}
	if a.CallerResumes {
		return
	}

	for _, topics := range [][]string{a.fate.Refused, a.fate.Held} {
		for _, topic := range topics {
			f.config.Outlet.ResumeKey(a.NS, topic, a.Key)
		}
	}
}

// gatesToOpen returns the topics for which the envelope is no longer an exception.
func (a *decision) gatesToOpen() []string {
	// Without a list of targets there was one gate, for the topic "". It opens as soon as there is a
	// list.
	if a.Pending == nil {
		if a.fate.End == Waiting && !a.changed {
			return nil
		}
		return []string{""}
	}

	if a.fate.End != Retrying && a.fate.End != Waiting {
		return a.Pending
	}

	open := make([]string, 0, len(a.acked))
	for _, s := range a.acked {
		open = append(open, s.Topic)
	}
	return open
}
