package pipeline

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/base/crash"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/resume"
)

// Acked implements record.Acks.
func (r *Resolver) Acked(tp record.TopicPartition, base int64, tickets []record.Ticket, bytes int) {
	crash.At("after-ack-before-position")

	// The tracker takes over tickets, so everything that needs them comes first.
	r.reportAcked(tp, base, tickets, bytes)
	sideAcks := r.collectSideAcks(base, tickets)
	delivered := r.followers.notifyAcked(tp, base, tickets)
	r.tracker.Acked(tp, base, tickets)

	// Side deliveries reserved their bytes in the reconciler's budget.
	bytes -= r.resolveSideAcks(tp, sideAcks)
	r.recordDeliveries(delivered)
	r.releaseBytes(r.budget, int64(bytes))
}

// reportAcked reports an acked batch, with the commit times of the stream's events in tickets.
func (r *Resolver) reportAcked(tp record.TopicPartition, base int64, tickets []record.Ticket, bytes int) {
	r.ackedMu.Lock()
	defer r.ackedMu.Unlock()

	r.acked = record.AckedBatch{
		TP:       tp,
		Base:     base,
		Records:  len(tickets),
		Bytes:    bytes,
		At:       r.cfg.Now(),
		CommitMS: r.tracker.AppendCommitMS(r.acked.CommitMS[:0], tickets),
	}
	r.cfg.Metrics.Acked(&r.acked)
}

// Restore implements record.Acks.
func (r *Resolver) Restore(tp record.TopicPartition, offset int64) { r.tracker.Restore(tp, offset) }

// Idle implements record.Acks.
func (r *Resolver) Idle(tp record.TopicPartition, offset int64) { r.tracker.Idle(tp, offset) }

// Drain blocks until everything delivered so far is resolved, or ctx ends. Then it returns
// the cause of ctx.
func (d *Dispatcher) Drain(ctx context.Context) error {
	d.sink.Flush()
	// A reservation of no bytes always fits, so only the condition blocks. Each ack makes reserve check
	// it again.
	return d.budget.reserve(ctx, 0, func() bool { return d.tracker.Unresolved() == 0 }, func() {})
}

// Snapshot returns the resolved position and the stored offsets at one moment: the content of a
// checkpoint. The result is false until the first position is reached.
func (r *Resolver) Snapshot() (resume.Position, bool, map[string][]int64) {
	return r.tracker.Snapshot()
}

// Reached returns the resolved position. It is false until the first position is reached.
func (r *Resolver) Reached() (resume.Position, bool) { return r.tracker.Reached() }

// Unresolved returns the number of events above the resolved position, and the bytes that they
// have reserved.
func (r *Resolver) Unresolved() (events int, bytes int64) {
	return r.tracker.Unresolved(), r.budget.inUse()
}

// Oldest returns the ticket of the oldest unresolved event, and the number of envelopes that are still to be recorded
// as waiting or dead. The ticket means nothing if there is no such event.
func (r *Resolver) Oldest() (ticket record.Ticket, unrecorded int64) {
	low, _ := r.tracker.Window()
	return low, r.unrecorded.Load()
}

// Lag returns now minus the commit time of the oldest unresolved event; 0 if there is none.
func (r *Resolver) Lag(now time.Time) time.Duration {
	ms, ok := r.tracker.OldestCommitMS()
	if !ok {
		return 0
	}
	return max(now.Sub(time.UnixMilli(ms)), 0)
}

// Waiting reports whether Deliver is blocked because there is no room.
func (r *Resolver) Waiting() bool { return r.budget.hasWaiters() }
