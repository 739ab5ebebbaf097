package pipeline

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/resume"
)

// Acked implements record.Acks.
func (d *Dispatcher) Acked(tp record.TopicPartition, base int64, tickets []record.Ticket, bytes int) {
	crash.At("after-ack-before-watermark")

	// The tracker takes over tickets, so everything that needs them comes first.
	d.reportAcked(tp, base, tickets, bytes)
	sideAcks := d.collectSideAcks(base, tickets)
	delivered := d.followers.notifyAcked(tp, base, tickets)
	d.tracker.Acked(tp, base, tickets)

	// Side deliveries reserved their bytes in the reconciler's budget.
	bytes -= d.resolveSideAcks(tp, sideAcks)
	d.recordDeliveries(delivered)
	d.releaseBytes(d.budget, int64(bytes))
}

// reportAcked reports an acked batch, with the commit times of the stream's events in tickets.
func (d *Dispatcher) reportAcked(tp record.TopicPartition, base int64, tickets []record.Ticket, bytes int) {
	d.ackedMu.Lock()
	defer d.ackedMu.Unlock()

	d.acked = record.AckedBatch{
		TP:       tp,
		Base:     base,
		Records:  len(tickets),
		Bytes:    bytes,
		At:       d.cfg.Now(),
		CommitMS: d.tracker.AppendCommitMS(d.acked.CommitMS[:0], tickets),
	}
	d.cfg.Metrics.Acked(&d.acked)
}

// Restore implements record.Acks.
func (d *Dispatcher) Restore(tp record.TopicPartition, offset int64) { d.tracker.Restore(tp, offset) }

// Idle implements record.Acks.
func (d *Dispatcher) Idle(tp record.TopicPartition, offset int64) { d.tracker.Idle(tp, offset) }

// Drain blocks until everything delivered so far is resolved, or ctx ends. Then it returns
// the cause of ctx.
func (d *Dispatcher) Drain(ctx context.Context) error {
	d.sink.Flush()
	// A reservation of no bytes always fits, so only the condition blocks. Each ack makes reserve check
	// it again.
	return d.budget.reserve(ctx, 0, func() bool { return d.tracker.Unresolved() == 0 }, func() {})
}

// Snapshot returns the watermark and the stored offsets at one moment: the content of a
// checkpoint. The result is false until the first position is reached.
func (d *Dispatcher) Snapshot() (resume.Position, bool, map[string][]int64) {
	return d.tracker.Snapshot()
}

// Reached returns the watermark. It is false until the first position is reached.
func (d *Dispatcher) Reached() (resume.Position, bool) { return d.tracker.Reached() }

// Unresolved returns the number of events above the watermark, and the bytes that they
// have reserved.
func (d *Dispatcher) Unresolved() (events int, bytes int64) {
	return d.tracker.Unresolved(), d.budget.inUse()
}

// Oldest returns the ticket of the oldest unresolved event, and the number of envelopes that are still to be recorded
// as waiting or dead. The ticket means nothing if there is no such event.
func (d *Dispatcher) Oldest() (ticket record.Ticket, unrecorded int64) {
	low, _ := d.tracker.Window()
	return low, d.unrecorded.Load()
}

// Lag returns now minus the commit time of the oldest unresolved event; 0 if there is none.
func (d *Dispatcher) Lag(now time.Time) time.Duration {
	ms, ok := d.tracker.OldestCommitMS()
	if !ok {
		return 0
	}
	return max(now.Sub(time.UnixMilli(ms)), 0)
}

// Waiting reports whether Deliver is blocked because there is no room.
func (d *Dispatcher) Waiting() bool { return d.budget.hasWaiters() }
