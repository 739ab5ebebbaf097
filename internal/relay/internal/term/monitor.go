package term

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/relay/internal/changestream"
	"github.com/outrelay/outrelay/internal/relay/internal/gap"
	"github.com/outrelay/outrelay/internal/relay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/relay/internal/sink"
	"github.com/outrelay/outrelay/internal/relay/readiness"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

const (
	// stalledAfter is the time for which another node reaches Kafka and this owner does not, after which the owner
	// may step down (N6), and the time without a tick after which a stage counts as hung.
	stalledAfter = 30 * time.Second
	// stepDownEvery is the shortest time between two step-downs of an owner without progress (N6).
	stepDownEvery = 5 * time.Minute
)

// errStepDown ends a term in which the process releases the lease on purpose.
var errStepDown = errors.New("stepping down")

// monitor watches a term: it updates its status, and ends it when it has to.
type monitor struct {
	slot         *Runner
	held         *lease.Held
	calls        *readiness.Calls
	stream       *changestream.Stream
	resolver     *pipeline.Resolver
	plan         *gap.Plan
	start        *startPoint
	journal      *journal
	progress     *progress
	meter        *meter
	log          *slog.Logger
	stopRenewing func()

	brokersAway bool      // targets wait because their brokers cannot be reached
	outdone     idleTimer // of the acks, while another node reaches Kafka and the owner does not
	oldest      idleTimer // of the ticket of the oldest unresolved event
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

// watchTerm watches the term from its first moment until ctx ends. begun delivers its sink when the takeover is done. It calls end when an operator or the
// balancer requests the lease, when a stage hangs, or when another node can make more progress
// (N6).
func (m *monitor) watchTerm(ctx context.Context, begun <-chan *sink.Sink, end context.CancelCauseFunc) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var ticks idleTimer
	var opened *sink.Sink
	defer m.slot.State.EndPulse("monitor")
	m.journal.announcePinLapsed()

	for {
		m.slot.State.RecordPulse("monitor")
		select {
		case <-ctx.Done():
			return

		case opened = <-begun:

		case reason := <-m.held.Yield():
			end(fmt.Errorf("%w: %s", errStepDown, reason))
			return

		case reason := <-m.slot.yield:
			end(fmt.Errorf("%w: %s", errStepDown, reason))
			return

		case now := <-tick.C:
			m.journal.announcePinLapsed()
			m.updateStatus(ctx, now, opened)

			// The lease of a hung process must expire: the process may not be able to release it.
			if m.isHanging(now, &ticks) {
				m.log.Error("a stage does not move; stopping the renewal of the lease so that another process takes over",
					"for", stalledAfter)
				m.slot.State.SetHung(true)
				m.stopRenewing()
				end(fmt.Errorf("%w: a stage does not move", errStepDown))
				return
			}

			if m.shouldStepDown(ctx, now) {
				end(fmt.Errorf("%w: no ack for %s while another node reaches Kafka", errStepDown, stalledAfter))
				return
			}
		}
	}
}

// isHanging reports whether the pump or the reader makes no progress. It returns false if the
// memory budget is full or the stream is interrupted. A sweep waits for responses that have
// deadlines.
func (m *monitor) isHanging(now time.Time, timer *idleTimer) bool {
	if !m.progress.delivering.Load() || m.resolver.Waiting() || !m.held.Valid() || m.plan.IsSweeping() ||
		m.stream.State().Phase != changestream.Live {
		*timer = idleTimer{}
		return false
	}
	return timer.idleFor(m.calls.Ticks.Load(), now) > stalledAfter
}

// hasPendingWork reports whether Kafka has work to ack: unresolved events, or a takeover.
func (m *monitor) hasPendingWork() bool {
	n, _ := m.resolver.Unresolved()
	return n > 0 || !m.progress.delivering.Load()
}

// shouldStepDown implements N6: it reports true if for 30 s this owner had work pending and no ack, and could not reach
// Kafka while another live node did. A target that no node can write, such as a missing topic, is no reason: the nodes
// would pass the lease around without end.
func (m *monitor) shouldStepDown(ctx context.Context, now time.Time) bool {
	// After an outage of all nodes, the standbys may reach Kafka a moment before the owner: the time between counts, not the
	// time since the last ack.
	if !m.isOutdone(ctx) {
		m.outdone = idleTimer{}
		return false
	}
	if m.outdone.idleFor(m.meter.acked.Load(), now) < stalledAfter || now.Sub(m.slot.steppedDownAt) < stepDownEvery {
		return false
	}

	m.slot.steppedDownAt = now
	// Otherwise this node could acquire the lease again before the other node tries.
	m.slot.lease.HoldOff(stalledAfter)
	return true
}

// isOutdone reports whether work is pending and another live node reaches Kafka while this node does not. It costs one read
// while this node does not reach Kafka, and nothing otherwise.
func (m *monitor) isOutdone(ctx context.Context) bool {
	reachable := m.slot.shared.KafkaReachable.Load() && !m.brokersAway
	// An idle stream has no acks, which must not count as missing progress.
	if reachable || !m.hasPendingWork() {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, nodes.BeatEvery)
	defer cancel()
	other, err := m.slot.shared.Nodes.AnotherReachesKafka(ctx, m.slot.cfg.Node, nodes.StaleAfter)
	return err == nil && other
}

// updateStatus updates health, metrics and the statistics that the next renewal saves. opened is nil before the takeover is done.
func (m *monitor) updateStatus(ctx context.Context, now time.Time, opened *sink.Sink) {
	m.progress.stats.setProblems(m.slot.State.Problems())
	if opened == nil {
		m.progress.stats.setAt(now)
		return
	}
	m.start.saveDescription(ctx)

	stream := m.stream.State()
	m.slot.metrics.StreamState.SetCurrent(string(stream.Phase))
	stream = m.reportStream(now, stream)

	// The position waits for the targets that are not parked. The first of them is the problem.
	unwritable := opened.State()
	m.brokersAway = false
	var stuck *sink.Unwritable
	for i := range unwritable {
		target := &unwritable[i]
		if target.Parked {
			continue
		}

		m.brokersAway = m.brokersAway || target.WaitsForBroker()

		// A topic that was just created has no leader for a moment.
		if stuck == nil && now.Sub(target.Since) >= stuckAfter {
			stuck = target
		}
	}

	m.reportStuck(stuck)
	m.reportStandstill(now, stuck != nil)

	unwritable = limitUnwritable(unwritable)
	m.slot.setUnwritableGauges(unwritable)
	m.journal.announceParked(unwritable)
	m.progress.stats.update(now, m, stream, unwritable)
}

// reportStuck reports the problem of the target for which the position waits, or its end for nil.
func (m *monitor) reportStuck(target *sink.Unwritable) {
	if target == nil {
		m.slot.State.SetProblem("stuck", "")
		return
	}
	if !m.slot.State.SetProblem("stuck", fmt.Sprintf("topic %q: %s", target.Topic, target.Reason())) {
		return
	}

	line := []any{"topic", target.Topic, "error", target.Cause}
	// With the error of the outage, the log counts this line to the outage and does not repeat it.
	if away := m.slot.shared.Kafka.Outage(); away != nil {
		line[3] = away
	}
	if target.Fix != "" {
		line = append(line, "fix", target.Fix)
	}
	m.log.Warn("cannot write a topic; the position waits for it", append(line, "records", target.Records)...)
}

// reportStream reports the problem of the stream. It returns the state for the status.
func (m *monitor) reportStream(now time.Time, stream changestream.State) changestream.State {
	standing := stream.StandingFor(now)
	isStuck := standing > 0 && standing >= m.slot.shared.Pace.Stuck
	switch {
	case stream.Phase == changestream.ConfigError:
		m.slot.State.SetFatalProblem("stream", stream.Reason)

	case isStuck:
		// Between two attempts it looks alive, so the phase is no sign.
		stream.Phase, stream.Reason = changestream.Reopening, "the change stream is reopened again and again and does not move: "+stream.Fault
		if m.slot.State.SetProblemSince("stream", stream.Reason, stream.StuckSince) {
			m.log.Error("the change stream does not move", "since", stream.StuckSince, "error", stream.Fault,
				"fix", "if the fault stays, outrelay recover --skip passes the event at which the stream stands")
		}

	case stream.Ready():
		m.slot.State.ClearProblems("stream")

	default:
		m.slot.State.SetProblem("stream", stream.Reason)
	}
	return stream
}

// reportStandstill reports the oldest unresolved event if it stays the oldest for long and no unwritable target explains that:
// whatever it waits for, the wait shows in the log.
func (m *monitor) reportStandstill(now time.Time, explained bool) {
	oldest, unrecorded := m.resolver.Oldest()
	unresolved, _ := m.resolver.Unresolved()
	// An outage has its own line.
	away := !m.held.Valid() || m.slot.shared.Kafka.Outage() != nil
	if explained || away || unresolved == 0 {
		m.oldest = idleTimer{}
	}

	text := ""
	if limit := m.slot.shared.Pace.Standstill; m.oldest.idleFor(int64(oldest), now) >= limit {
		text = fmt.Sprintf("Kafka has not acknowledged the oldest event for %s", limit)
		if unrecorded > 0 {
			text = fmt.Sprintf("MongoDB has not stored the oldest waiting or dead event for %s", limit)
		}
	}
	if m.slot.State.SetProblem("standstill", text) && text != "" {
		m.log.Warn("the position does not move", "error", text, "unresolved", unresolved, "to_store", unrecorded)
	}
}

// stuckAfter is how long a target may be unwritable before it counts as a problem.
const stuckAfter = 2 * time.Second

// mostUnwritable is the largest number of unwritable targets that the watcher document, the metrics and
// the audit log list one by one.
const mostUnwritable = 100

// limitUnwritable returns at most mostUnwritable targets. It adds up the others for each kind, under the
// topic "other". Targets for which the position waits come first, then the targets that have
// waited longest, so that the list does not change while it grows.
func limitUnwritable(list []sink.Unwritable) []sink.Unwritable {
	if len(list) <= mostUnwritable {
		return list
	}
	slices.SortStableFunc(list, func(a, b sink.Unwritable) int {
		if a.Parked != b.Parked {
			return cmp.Compare(metrics.Bool(a.Parked), metrics.Bool(b.Parked))
		}
		return a.Since.Compare(b.Since)
	})

	out := slices.Clone(list[:mostUnwritable])
	others := map[string]int{} // index in out, by kind
	for _, b := range list[mostUnwritable:] {
		i, known := others[b.Kind]
		if !known {
			i = len(out)
			others[b.Kind] = i
			out = append(out, sink.Unwritable{
				Topic:  metrics.OtherTopics,
				Since:  b.Since,
				Parked: b.Parked,
				Kind:   b.Kind,
				Cause:  "more topics wait: " + b.Kind,
			})
		}
		out[i].Records += b.Records
		// The position waits as soon as one of them is not parked.
		out[i].Parked = out[i].Parked && b.Parked
	}
	return out
}

// setUnwritableGauges sets the gauges of envelopes that wait for a target.
func (r *Runner) setUnwritableGauges(list []sink.Unwritable) {
	gauges := r.metrics.UnwritableRecords
	gauges.Reset()
	for _, b := range list {
		gauges.WithLabelValues(b.Topic, b.Kind).Add(float64(b.Records))
	}
}

// ownerStats are saved by the owner with each renewal, so that `outrelay status` needs no connection to
// the process.
type ownerStats struct {
	At         time.Time          `bson:"at"`    // when they were taken, by the owner's clock
	State      string             `bson:"state"` // taking-over, live, sweeping, reopening, config_error, waiting, halted …
	Reason     string             `bson:"reason,omitempty"`
	LagMS      *int64             `bson:"lagMs,omitempty"` // nil before the takeover is done, and while the term is halted
	Rate       float64            `bson:"rate"`            // acked records per second
	TokenAgeMS int64              `bson:"tokenAgeMs"`
	Unresolved int                `bson:"unresolved"` // events after the position
	Bytes      int64              `bson:"bytes"`      // of the memory budget in use
	Acked      int64              `bson:"acked"`      // records since the term began
	Unwritable []unwritableTarget `bson:"unwritable"`
	Problems   []storedProblem    `bson:"problems"` // what /readyz reports
}

// storedProblem is a [readiness.Problem] as it is stored.
type storedProblem struct {
	Part   string    `bson:"part"`
	Object string    `bson:"object,omitempty"`
	Text   string    `bson:"text"`
	Since  time.Time `bson:"since"`
}

// mostProblemText bounds the text of a problem in the watcher document, in bytes.
const mostProblemText = 1000

// unwritableTarget is a [sink.Unwritable] as it is stored.
type unwritableTarget struct {
	Topic   string    `bson:"topic"`
	Kind    string    `bson:"kind"`
	Reason  string    `bson:"reason"`
	Since   time.Time `bson:"since"`
	Records int       `bson:"count"`
	Parked  bool      `bson:"parked,omitempty"`

	Partitions int `bson:"partitions,omitempty"`
}

// termStats contains the last Stats of a term. It is safe for concurrent use.
type termStats struct {
	mu      sync.Mutex
	current ownerStats
	halted  string // why the term is halted, or ""
}

func newTermStats() *termStats {
	return &termStats{current: ownerStats{State: string(readiness.PhaseTakeOver), At: time.Now()}}
}

// setHalted sets the state to halted until the term ends.
func (v *termStats) setHalted(reason string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.halted = reason
	v.current.State = string(readiness.PhaseHalted)
	v.current.Reason = reason
	// Nothing is read, so the age of the events that wait is unknown.
	v.current.LagMS = nil
	v.current.At = time.Now()
}

// isHalted reports whether the term is halted.
func (v *termStats) isHalted() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.halted != ""
}

// setProblems takes the problems of the slot.
func (v *termStats) setProblems(list []readiness.Problem) {
	// A new list: the last one may be in use by a renewal.
	problems := make([]storedProblem, len(list))
	for i, p := range list {
		text := p.Text
		if len(text) > mostProblemText {
			text = strings.ToValidUTF8(text[:mostProblemText], "") + " …"
		}
		problems[i] = storedProblem{p.Part, p.Object, text, p.Since}
	}

	v.mu.Lock()
	defer v.mu.Unlock()
	v.current.Problems = problems
}

// setAt sets the time of the stats. Once the term delivers, update does that.
func (v *termStats) setAt(now time.Time) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.current.At = now
}

// rateWindow is the time over which the rate is smoothed.
const rateWindow = 5 * time.Second

// lagOf returns the age of the oldest event that was read and is not resolved. While the stream stands, events wait unread behind it,
// so the lag is at least as long as it stands. The server's time is now.
func lagOf(resolver *pipeline.Resolver, stream changestream.State, now time.Time) time.Duration {
	return max(resolver.Lag(now), stream.StandingFor(time.Now()))
}

// measureLag returns the lag of the term in seconds, or NaN if the term is nil or halted: events may wait, and nothing measures their age.
func (t *term) measureLag(now time.Time) float64 {
	if t == nil || t.progress.stats.isHalted() {
		return math.NaN()
	}
	return lagOf(t.resolver, t.stream.State(), now).Seconds()
}

// update takes the stats of the term that monitor watches.
func (v *termStats) update(now time.Time, monitor *monitor, stream changestream.State, unwritable []sink.Unwritable) {
	v.mu.Lock()
	defer v.mu.Unlock()

	acked := monitor.meter.acked.Load()
	if elapsed := now.Sub(v.current.At); elapsed > 0 {
		share := min(float64(elapsed)/float64(rateWindow), 1)
		v.current.Rate += share * (float64(acked-v.current.Acked)/elapsed.Seconds() - v.current.Rate)
	}

	v.current.At = now
	v.current.Acked = acked
	// A new list: the last one may be in use by a renewal.
	v.current.Unwritable = make([]unwritableTarget, len(unwritable))
	for i, target := range unwritable {
		v.current.Unwritable[i] = unwritableTarget{target.Topic, target.Kind, target.Reason(), target.Since, target.Records, target.Parked, target.Partitions}
	}
	lag := lagOf(monitor.resolver, stream, monitor.slot.shared.Clock.Now()).Milliseconds()
	v.current.LagMS = &lag
	v.current.Unresolved, v.current.Bytes = monitor.resolver.Unresolved()
	v.current.TokenAgeMS = tokenAge(monitor.resolver, monitor.slot.shared.Clock.Now()).Milliseconds()

	// The most important state is set last.
	v.current.State, v.current.Reason = string(stream.Phase), stream.Reason
	if i := slices.IndexFunc(unwritable, func(target sink.Unwritable) bool { return !target.Parked }); i >= 0 {
		v.current.State, v.current.Reason = "unwritable", unwritable[i].Reason()
	} else if monitor.resolver.Waiting() {
		v.current.State = "waiting"
		v.current.Reason = "the memory budget is full: Kafka is slower than the change stream"
	}
	if sweep := monitor.plan.DescribeSweep(v.current.Reason); sweep != "" {
		v.current.State, v.current.Reason = "sweeping", sweep
	}
	if v.halted != "" {
		v.current.State, v.current.Reason = string(readiness.PhaseHalted), v.halted
	}
}

// tokenAge returns the age of the position at now, which is a time of the server's clock. It
// returns 0 if the position has no time.
func tokenAge(resolver *pipeline.Resolver, now time.Time) time.Duration {
	pos, _ := resolver.Reached()
	ts, ok := pos.Time()
	if !ok {
		return 0
	}
	return max(now.Sub(time.Unix(int64(ts.T), 0)), 0)
}

// report returns the stats in the form that the watcher document stores.
func (v *termStats) report() ownerStats {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.current
}
