package app

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/metrics"
)

const (
	// stalledAfter is the time without an ack after which an owner may step down (N6), and the time
	// without a tick after which a stage counts as hung.
	stalledAfter = 30 * time.Second
	// stepDownEvery is the shortest time between two step-downs of an owner without progress (N6).
	stepDownEvery = 5 * time.Minute
)

// progress contains the counters by which the monitor recognizes that the stages of a term move.
type progress struct {
	ticks atomic.Int64 // the pump got a batch, also an empty one, or made progress with a batch
	acked atomic.Int64 // records acked by Kafka
}

// idleTimer measures how long a counter has not changed.
type idleTimer struct {
	last  int64
	moved time.Time
}

// idleFor returns how long the counter has had the value n.
func (w *idleTimer) idleFor(n int64, now time.Time) time.Duration {
	if n != w.last || w.moved.IsZero() {
		w.last = n
		w.moved = now
	}
	return now.Sub(w.moved)
}

// monitor watches a term from its first moment until ctx ends. It calls end when an operator or the
// balancer requests the lease, when a stage hangs, or when another node can make more progress
// (N6).
func (t *term) monitor(ctx context.Context, end context.CancelCauseFunc) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var acked, ticks idleTimer
	defer t.slot.state.endPulse("monitor")
	t.announcePinLapsed()

	for {
		t.slot.state.recordPulse("monitor")
		select {
		case <-ctx.Done():
			return

		case c := <-t.held.Control():
			if c.Yield != "" {
				end(fmt.Errorf("%w: %s", errStepDown, c.Yield))
				return
			}

		case reason := <-t.slot.yield:
			end(fmt.Errorf("%w: %s", errStepDown, reason))
			return

		case now := <-tick.C:
			t.announcePinLapsed()
			t.updateStatus(ctx, now)

			// The lease of a hung process must expire: the process may not be able to release it.
			if t.isHanging(now, &ticks) {
				t.log.Error("a stage does not move; stopping the renewal of the lease so that another process takes over",
					"for", stalledAfter)
				t.slot.state.setHung()
				t.stopRenewing()
				end(fmt.Errorf("%w: a stage does not move", errStepDown))
				return
			}

			if !t.hasPendingWork() {
				acked = idleTimer{}
			}
			if t.shouldStepDown(ctx, acked.idleFor(t.progress.acked.Load(), now), now) {
				end(fmt.Errorf("%w: no ack for %s while another node reaches Kafka", errStepDown, stalledAfter))
				return
			}
		}
	}
}

// isHanging reports whether the pump or the reader does not move without a reason. Two reasons are
// valid: the memory budget is full, or the stream is interrupted. A sweep waits for replies that
// have deadlines.
func (t *term) isHanging(now time.Time, w *idleTimer) bool {
	disp := t.delivering.Load()
	if disp == nil || disp.Waiting() || !t.held.Valid() || t.sweeping.Load() != nil ||
		t.stream.State().Phase != changestream.Live {
		*w = idleTimer{}
		return false
	}
	return w.idleFor(t.progress.ticks.Load(), now) > stalledAfter
}

// hasPendingWork reports whether Kafka has work to ack: unresolved events, or a takeover.
func (t *term) hasPendingWork() bool {
	disp := t.delivering.Load()
	if disp == nil {
		return true
	}
	n, _ := disp.Unresolved()
	return n > 0
}

// shouldStepDown implements N6: it reports true if there was no progress for 30 s with work
// pending, while another live node reaches Kafka. A target that no node can write, such as a
// missing topic, is no reason: the nodes would pass the lease around without end.
func (t *term) shouldStepDown(ctx context.Context, idle time.Duration, now time.Time) bool {
	if idle < stalledAfter || now.Sub(t.slot.steppedDownAt) < stepDownEvery || t.slot.relay.kafkaReachable.Load() && !t.brokersAway {
		return false
	}
	other, err := t.slot.relay.nodes.AnotherReachesKafka(ctx, t.slot.cfg.Node, staleAfter)
	if err != nil || !other {
		return false
	}

	t.slot.steppedDownAt = now
	t.slot.lease.HoldOff(stalledAfter)
	return true
}

// updateStatus updates health, metrics and the statistics that the next renewal saves.
func (t *term) updateStatus(ctx context.Context, now time.Time) {
	disp := t.delivering.Load()
	if disp == nil {
		return
	}
	t.saveDescription(ctx)

	stream := t.stream.State()
	t.slot.metrics.StreamState.SetCurrent(string(stream.Phase))
	if stream.Ready() {
		t.slot.state.setProblem("stream", "", false)
	} else {
		t.slot.state.setProblem("stream", stream.Reason, stream.Phase == changestream.ConfigError)
	}

	// The watermark waits for the targets that are not parked. The first of them is the problem.
	var blocked []Blocked
	t.brokersAway = false
	text := ""
	for _, b := range t.sink.State() {
		if b.Records == 0 {
			continue
		}
		blocked = append(blocked, Blocked{
			Topic:  b.Topic,
			Reason: b.Reason,
			Since:  b.Since,
			Count:  b.Records,
			Kind:   b.Kind,
			Parked: b.Parked,
		})
		if b.Parked {
			continue
		}

		t.brokersAway = t.brokersAway || b.WaitsForBroker()
		if text == "" {
			text = fmt.Sprintf("topic %q: %s (%d envelopes wait)", b.Topic, b.Reason, b.Records)
		}
	}

	blocked = limitBlocked(blocked)
	t.slot.setBlockedGauges(blocked)
	t.announceParked(blocked)
	if t.slot.state.setProblem("stuck", text, false) && text != "" {
		t.log.Warn("a target cannot be written; the watermark waits for it", "waits", text)
	}
	t.stats.update(now, t, disp, stream, blocked)
}

// mostBlocked is the largest number of blocked targets that the watcher document, the metrics and
// the events log list one by one.
const mostBlocked = 100

// limitBlocked returns at most mostBlocked targets. It adds up the others for each kind, under the
// topic "other". Targets for which the watermark waits come first, then the targets that have
// waited longest, so that the list does not change while it grows.
func limitBlocked(list []Blocked) []Blocked {
	if len(list) <= mostBlocked {
		return list
	}
	slices.SortStableFunc(list, func(a, b Blocked) int {
		if a.Parked != b.Parked {
			return cmp.Compare(boolGauge(a.Parked), boolGauge(b.Parked))
		}
		return a.Since.Compare(b.Since)
	})

	out := slices.Clone(list[:mostBlocked])
	others := map[string]int{} // index in out, by kind
	for _, b := range list[mostBlocked:] {
		i, known := others[b.Kind]
		if !known {
			i = len(out)
			others[b.Kind] = i
			out = append(out, Blocked{
				Topic:  metrics.OtherTopics,
				Since:  b.Since,
				Parked: b.Parked,
				Kind:   b.Kind,
				Reason: "more topics wait: " + b.Kind,
			})
		}
		out[i].Count += b.Count
		out[i].Parked = out[i].Parked && b.Parked
	}
	return out
}

// setBlockedGauges sets the gauges of envelopes that wait for a target.
func (r *runner) setBlockedGauges(list []Blocked) {
	g := r.metrics.BlockedTargets
	g.Reset()
	for _, b := range list {
		g.WithLabelValues(b.Topic, b.Kind).Add(float64(b.Count))
	}
}
