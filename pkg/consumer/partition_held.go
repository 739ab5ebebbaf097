package consumer

import "github.com/outrelay/outrelay/internal/service/transport"

// heldCount counts the messages whose bodies are in memory.
type heldCount struct{ messages, bytes int }

// update runs a change of the entries with the lock, and then measures the messages in memory without it: a Sink of the user may
// call Consumer.Status.
func (p *partition) update(change func()) {
	var messages, bytes int
	func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		change()
		messages, bytes = p.held.messages-p.measured.messages, p.held.bytes-p.measured.bytes
		p.measured = p.held
	}()
	if messages != 0 || bytes != 0 {
		p.s.countHeld(int64(messages), int64(bytes))
	}
}

// dropUnstarted drops the bodies of all entries that no handler has started. They are fetched again.
func (p *partition) dropUnstarted() {
	p.update(func() {
		for _, t := range p.tracks {
			for _, x := range t.queue {
				x.share.state = shareWaiting
			}
			t.queue = nil
		}
		for _, e := range p.entries {
			p.dropBodyLocked(e)
		}
		p.refetch = true
	})
}

// dropBodyLocked frees the body of entry unless some share of entry is queued or started.
func (p *partition) dropBodyLocked(entry *entry) {
	if p.forgotten || entry.m == nil || !p.isIdleLocked(entry) {
		return
	}
	entry.rec, entry.m = transport.Record{}, nil
	p.held.messages--
	p.held.bytes -= entry.size
}

// releaseBuffers removes the partition from the counts of held messages. Later calls of
// dropBodyLocked have no effect.
func (p *partition) releaseBuffers() {
	p.update(func() { p.held, p.entries, p.forgotten = heldCount{}, nil, true })
}
