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
	// stalledAfter is N6's time without an ack, and a stage's without a tick.
	stalledAfter = 30 * time.Second
	// stepDownEvery bounds how often an owner without progress gives the lease away (N6).
	stepDownEvery = 5 * time.Minute
)

// progress is what the stages of a term tell the monitor.
type progress struct {
	ticks atomic.Int64 // the pump took a batch, empty ones too, or made room for the next
	acked atomic.Int64 // records acked by Kafka
}

// idleTimer remembers when a counter last moved.
type idleTimer struct {
	last  int64
	moved time.Time
}

// idleFor is how long n has stood still.
func (w *idleTimer) idleFor(n int64, now time.Time) time.Duration {
	if n != w.last || w.moved.IsZero() {
		w.last, w.moved = n, now
	}
	return now.Sub(w.moved)
}

// monitor watches a term from its first moment: what operators want, and whether the stages move.
func (t *term) monitor(ctx context.Context, end context.CancelCauseFunc) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var acked, ticks idleTimer
	defer t.state.endPulse("monitor")
	t.announcePinLapsed()
	for {
		t.state.recordPulse("monitor")
		select {
		case <-ctx.Done():
			return
		case c := <-t.held.Control():
			if c.Yield != "" {
				end(fmt.Errorf("%w: %s", errStepDown, c.Yield))
				return
			}
		case why := <-t.yield:
			end(fmt.Errorf("%w: %s", errStepDown, why))
			return
		case now := <-tick.C:
			t.announcePinLapsed()
			t.updateStatus(ctx, now)
			if t.isHanging(now, &ticks) {
				t.log.Error("a stage does not move; the lease is no longer renewed, so that another process takes over", "for", stalledAfter)
				t.state.setHung()
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

// isHanging reports whether the pump or the reader stands still without a reason: not for room in the budget, and not because
// the stream is away and says so. A sweep waits for replies with deadlines of its own.
func (t *term) isHanging(now time.Time, w *idleTimer) bool {
	disp := t.delivering.Load()
	if disp == nil || disp.Waiting() || !t.held.Valid() || t.sweeping.Load() != nil || t.stream.State().Phase != changestream.Live {
		*w = idleTimer{}
		return false
	}
	return w.idleFor(t.progress.ticks.Load(), now) > stalledAfter
}

// hasPendingWork reports whether there is work that Kafka should take: events that are not resolved, or a take-over.
func (t *term) hasPendingWork() bool {
	disp := t.delivering.Load()
	if disp == nil {
		return true
	}
	n, _ := disp.Unresolved()
	return n > 0
}

// shouldStepDown is N6: no progress for 30 s with work pending, while another live node reports Kafka reachable. A target that no
// node could write, such as a missing topic, is no reason: they would hand the lease to each other for ever.
func (t *term) shouldStepDown(ctx context.Context, idle time.Duration, now time.Time) bool {
	if idle < stalledAfter || now.Sub(t.steppedDownAt) < stepDownEvery || t.kafkaReachable.Load() && !t.brokersAway {
		return false
	}
	other, err := t.nodes.AnotherReachesKafka(ctx, t.cfg.Node, staleAfter)
	if err != nil || !other {
		return false
	}
	t.steppedDownAt = now
	t.lease.HoldOff(stalledAfter)
	return true
}

// updateStatus brings what blocks into health, metrics and the statistics that the next renewal writes.
func (t *term) updateStatus(ctx context.Context, now time.Time) {
	disp := t.delivering.Load()
	if disp == nil {
		return
	}
	t.saveDescription(ctx)
	stream := t.stream.State()
	t.metrics.StreamState.Enter(string(stream.Phase))
	if stream.Ready() {
		t.state.setProblem("stream", "", false)
	} else {
		t.state.setProblem("stream", stream.Reason, stream.Phase == changestream.ConfigError)
	}
	var blocked []Blocked // the watermark waits for those that are not parked
	t.brokersAway = false
	text := ""
	for _, b := range t.sink.State() {
		if b.Count == 0 {
			continue
		}
		blocked = append(blocked, Blocked{Topic: b.Topic, Reason: b.Reason, Since: b.Since, Count: b.Count, Kind: b.Kind, Parked: b.Parked})
		if b.Parked {
			continue
		}
		t.brokersAway = t.brokersAway || b.Away()
		if text == "" {
			text = fmt.Sprintf("topic %q: %s (%d envelopes wait)", b.Topic, b.Reason, b.Count)
		}
	}
	blocked = limitBlocked(blocked)
	t.setBlockedGauges(blocked)
	t.announceParked(blocked)
	if t.state.setProblem("stuck", text, false) && text != "" {
		t.log.Warn("a target cannot be written; the watermark waits for it", "waits", text)
	}
	t.stats.update(now, t, disp, stream, blocked)
}

// mostBlocked is how many targets that wait are listed one by one: in the watcher document, the metrics and the events log.
const mostBlocked = 100

// limitBlocked returns at most mostBlocked targets and adds up the others for each kind under the topic "other". It keeps those
// that hold up the watermark, and then those that have waited longest, so that the list does not change while it grows.
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
	others := map[string]int{} // by kind: place in out
	for _, b := range list[mostBlocked:] {
		i, known := others[b.Kind]
		if !known {
			i = len(out)
			others[b.Kind] = i
			out = append(out, Blocked{Topic: metrics.OtherTopics, Since: b.Since, Parked: b.Parked, Kind: b.Kind, Reason: "more topics wait: " + b.Kind})
		}
		out[i].Count += b.Count
		out[i].Parked = out[i].Parked && b.Parked
	}
	return out
}

// setBlockedGauges sets the gauges of what the sink holds for a target.
func (r *runner) setBlockedGauges(list []Blocked) {
	g := r.metrics.BlockedTargets
	g.Reset()
	for _, b := range list {
		g.WithLabelValues(b.Topic, b.Kind).Add(float64(b.Count))
	}
}
