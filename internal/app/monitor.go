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

// watch remembers when a counter last moved.
type watch struct {
	last  int64
	moved time.Time
}

// see is how long n has stood still.
func (w *watch) see(n int64, now time.Time) time.Duration {
	if n != w.last || w.moved.IsZero() {
		w.last, w.moved = n, now
	}
	return now.Sub(w.moved)
}

// monitor watches a term from its first moment: what operators want, and whether the stages move.
func (t *term) monitor(ctx context.Context, end context.CancelCauseFunc) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var acked, ticks watch
	defer t.state.rest("monitor")
	t.tellLapsed()
	for {
		t.state.pulse("monitor")
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
			t.tellLapsed()
			t.observe(ctx, now)
			if t.hangs(now, &ticks) {
				t.log.Error("a stage does not move; the lease is no longer renewed, so that another process takes over", "for", stalledAfter)
				t.state.hung()
				t.stopRenewing()
				end(fmt.Errorf("%w: a stage does not move", errStepDown))
				return
			}
			if !t.pending() {
				acked = watch{}
			}
			if t.outdone(ctx, acked.see(t.progress.acked.Load(), now), now) {
				end(fmt.Errorf("%w: no ack for %s while another node reaches Kafka", errStepDown, stalledAfter))
				return
			}
		}
	}
}

// hangs reports whether the pump or the reader stands still without a reason: not for room in the budget, and not because
// the stream is away and says so. A sweep waits for replies with deadlines of its own.
func (t *term) hangs(now time.Time, w *watch) bool {
	disp := t.delivering.Load()
	if disp == nil || disp.Waiting() || !t.held.Valid() || t.sweeping.Load() != nil || t.stream.State().Phase != changestream.Live {
		*w = watch{}
		return false
	}
	return w.see(t.progress.ticks.Load(), now) > stalledAfter
}

// pending reports whether there is work that Kafka should take: events that are not resolved, or a take-over.
func (t *term) pending() bool {
	disp := t.delivering.Load()
	if disp == nil {
		return true
	}
	n, _ := disp.Unresolved()
	return n > 0
}

// outdone is N6: no progress for 30 s with work pending, while another live node reports Kafka reachable. A target that no
// node could write, such as a missing topic, is no reason: they would hand the lease to each other for ever.
func (t *term) outdone(ctx context.Context, idle time.Duration, now time.Time) bool {
	if idle < stalledAfter || now.Sub(t.stepped) < stepDownEvery || t.reachable.Load() && !t.unreachable {
		return false
	}
	other, err := t.nodes.AnotherReachesKafka(ctx, t.cfg.Node, staleAfter)
	if err != nil || !other {
		return false
	}
	t.stepped = now
	t.lease.HoldOff(stalledAfter)
	return true
}

// observe brings what blocks into health, metrics and the statistics that the next renewal writes.
func (t *term) observe(ctx context.Context, now time.Time) {
	disp := t.delivering.Load()
	if disp == nil {
		return
	}
	t.describe(ctx)
	stream := t.stream.State()
	t.metrics.StreamState.Enter(string(stream.Phase))
	if stream.Ready() {
		t.state.set("stream", "", false)
	} else {
		t.state.set("stream", stream.Reason, stream.Phase == changestream.ConfigError)
	}
	var blocked []Blocked // the watermark waits for those that are not parked
	t.unreachable = false
	text := ""
	for _, b := range t.sink.State() {
		if b.Count == 0 {
			continue
		}
		blocked = append(blocked, Blocked{Topic: b.Topic, Reason: b.Reason, Since: b.Since, Count: b.Count, Kind: b.Kind, Parked: b.Parked})
		if b.Parked {
			continue
		}
		t.unreachable = t.unreachable || b.Away()
		if text == "" {
			text = fmt.Sprintf("topic %q: %s (%d envelopes wait)", b.Topic, b.Reason, b.Count)
		}
	}
	blocked = bounded(blocked)
	t.gaugeBlocked(blocked)
	t.tellParked(blocked)
	if t.state.set("stuck", text, false) && text != "" {
		t.log.Warn("a target cannot be written; the watermark waits for it", "waits", text)
	}
	t.stats.observe(now, t, disp, stream, blocked)
}

// mostBlocked is how many targets that wait are listed one by one: in the watcher document, the metrics and the events log.
const mostBlocked = 100

// bounded returns at most mostBlocked targets and adds up the others for each kind under the topic "other". It keeps those
// that hold up the watermark, and then those that have waited longest, so that the list does not change while it grows.
func bounded(list []Blocked) []Blocked {
	if len(list) <= mostBlocked {
		return list
	}
	slices.SortStableFunc(list, func(a, b Blocked) int {
		if a.Parked != b.Parked {
			return cmp.Compare(number(a.Parked), number(b.Parked))
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

// gaugeBlocked sets the gauges of what the sink holds for a target.
func (r *runner) gaugeBlocked(list []Blocked) {
	g := r.metrics.BlockedTargets
	g.Reset()
	for _, b := range list {
		g.WithLabelValues(b.Topic, b.Kind).Add(float64(b.Count))
	}
}
