package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// sweepGap requests a sweep of the backlog, as after lost history, and measures from the first to the last record.
func (r *reconcilerRun) sweepGap(ctx context.Context) (meterReading, error) {
	name := fmt.Sprintf("sweep%d", r.number)
	topic, err := r.newTopic(ctx, name)
	if err != nil {
		return meterReading{}, err
	}
	defer r.cluster.deleteTopic(context.WithoutCancel(ctx), topic)

	setting := setting{watch: backlog, topic: topic, state: r.newStateDB(name), start: "now", label: name}
	// A watcher that has never run would begin with the backlog, without a sweep.
	if err := r.createPosition(ctx, setting); err != nil {
		return meterReading{}, err
	}
	if _, err := r.runCommand(ctx, setting, "recover", "--yes"); err != nil {
		return meterReading{}, err
	}

	owner, err := r.startRelay(setting)
	if err != nil {
		return meterReading{}, err
	}
	// If the measurement succeeds, the error of the stop is returned below.
	defer func() { _ = owner.stopProcess() }()

	watching, stop := context.WithCancel(ctx)
	defer stop()
	used := make(chan float64, 1)
	go func() { used <- owner.watchBudget(watching) }()

	meter := startMeter(append(r.serverPIDs(), owner.pid())...)
	watcher := &watcher{bench: r.bench, relay: owner, topic: topic}
	if err := watcher.followDrain(ctx, r.Events); err != nil {
		return meterReading{}, err
	}
	stop()
	eps := float64(watcher.n-watcher.firstN) / watcher.at.Sub(watcher.first).Seconds()
	// All records arrived before the first check, so the rate is at least this.
	if watcher.n == watcher.firstN {
		eps = float64(watcher.n) / watcher.at.Sub(watcher.empty).Seconds()
	}

	budget := <-used / (1 << 20)
	r.got.addValue("sweep", eps)
	r.got.addValue("sweep_rss", watcher.after.hwm)
	r.got.addValue("sweep_budget", budget)
	return newReading(meter, "%8.0f/s  %.1f MB  %.1f MB of the budget", eps, watcher.after.hwm, budget), owner.stopProcess()
}

// createPosition starts and stops a relay, so that its watcher has a position.
func (r *reconcilerRun) createPosition(ctx context.Context, setting setting) error {
	setting.label = ""
	owner, _, err := r.startOwner(ctx, setting)
	if err != nil {
		return err
	}
	return owner.stopProcess()
}

// runCommand runs a command of the program for a watcher and returns its output.
func (b *bench) runCommand(ctx context.Context, setting setting, args ...string) ([]byte, error) {
	listen, err := devstack.FreeAddress()
	if err != nil {
		return nil, err
	}
	file, err := b.writeConfig(setting, listen, "")
	if err != nil {
		return nil, err
	}

	words := &tail{}
	cmd := exec.CommandContext(ctx, b.Program, append(args, "--config", file)...)
	cmd.Env, cmd.Stderr = b.childEnv(), words
	out, err := cmd.Output()
	if err != nil {
		return out, fmt.Errorf("%s: %w; end of its log: %s", args[0], err, words)
	}
	return out, nil
}

// watchBudget reads the use of the budget until ctx ends, and returns the maximum in bytes.
func (r *relay) watchBudget(ctx context.Context) (most float64) {
	for ctx.Err() == nil {
		if value, err := r.readMetric(ctx, "outrelay_budget_used_bytes"); err == nil {
			most = max(most, value)
		}

		select {
		case <-ctx.Done():
		case <-time.After(4 * slow):
		}
	}
	return most
}

// readMetric returns the value of a series without labels.
func (r *relay) readMetric(ctx context.Context, name string) (float64, error) {
	body, err := r.httpGet(ctx, "/metrics")
	if err != nil {
		return 0, fmt.Errorf("reading the relay's metrics: %w", err)
	}

	lines := bufio.NewScanner(bytes.NewReader(body))
	for lines.Scan() {
		if text, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			return strconv.ParseFloat(text, 64)
		}
	}
	return 0, fmt.Errorf("the relay has no metric %s", name)
}

// parkedEvents returns the number of events for the measurement of a missing topic.
func parkedEvents(options Options) int { return max(options.Events/parkedPart, 1) }

// drainParked writes events for a missing topic, and waits until all are stored as parked. Then it creates the topic and
// measures from its first to its last record.
func (r *reconcilerRun) drainParked(ctx context.Context) (meterReading, error) {
	name, n := fmt.Sprintf("parked%d", r.number), parkedEvents(r.Options)
	coll, err := r.newOutbox(ctx, name)
	if err != nil {
		return meterReading{}, err
	}
	defer func() { _ = coll.Drop(context.WithoutCancel(ctx)) }()

	topic := r.db + "." + name
	setting := setting{watch: name, topic: topic, state: r.newStateDB(name), start: "now", label: name}
	owner, _, err := r.startOwner(ctx, setting)
	if err != nil {
		return meterReading{}, err
	}
	// If the measurement succeeds, the error of the stop is returned below.
	defer func() { _ = owner.stopProcess() }()

	if err := r.writeDocuments(ctx, coll, n, func(i int) (bson.Raw, error) { return newEnvelope(i, r.Payload) }); err != nil {
		return meterReading{}, err
	}

	meter := startMeter(append(r.serverPIDs(), owner.pid())...)
	parkingEPS, err := r.awaitParked(ctx, owner, setting.state, n)
	if err != nil {
		return meterReading{}, err
	}

	if _, err := r.newTopic(ctx, name); err != nil {
		return meterReading{}, err
	}
	made := time.Now()
	defer r.cluster.deleteTopic(context.WithoutCancel(ctx), topic)

	watcher := &watcher{bench: r.bench, relay: owner, topic: topic}
	if err := watcher.followDrain(ctx, n); err != nil {
		return meterReading{}, err
	}

	eps := float64(watcher.n-watcher.firstN) / watcher.at.Sub(watcher.first).Seconds()
	if watcher.n == watcher.firstN {
		eps = float64(watcher.n) / watcher.at.Sub(watcher.empty).Seconds()
	}

	r.got.addValue("parking", parkingEPS)
	r.got.addValue("parked", eps)
	million := 1e6 / float64(watcher.n)
	return newReading(meter, "%8.0f/s, %.1f s after the topic was made; parked at %.0f/s; CPU-s per million: %.1f of the relay, %.1f of the servers",
		eps, watcher.first.Sub(made).Seconds(), parkingEPS,
		meter.measureUsed(owner.pid())*million, meter.measureUsed(r.servers...)*million), owner.stopProcess()
}

// awaitParked blocks until n events are parked, and returns the rate from the first to the last.
func (r *reconcilerRun) awaitParked(ctx context.Context, owner *relay, stateDB string, n int) (eps float64, err error) {
	coll := state.Of(r.client.Database(stateDB)).Collection("waiting")
	var first, progressed time.Time
	var firstN, last int64
	progressed = time.Now()
	for {
		// No other envelope waits. Reading them for a count would take more of the server than the parking.
		now, err := coll.EstimatedDocumentCount(ctx)
		if err != nil {
			return 0, fmt.Errorf("counting parked events: %w", err)
		}

		at := time.Now()
		if first.IsZero() && now > 0 {
			first, firstN = at, now
		}
		if now > last {
			last, progressed = now, at
		}

		if int(now) >= n {
			if now == firstN {
				// All were parked at the first check, so there is no rate.
				return 0, nil
			}
			return float64(now-firstN) / at.Sub(first).Seconds(), nil
		}

		if err := owner.checkRunning(); err != nil {
			return 0, err
		}
		if at.Sub(progressed) > stall {
			return 0, fmt.Errorf("%d of %d events are parked, and no more for %s; end of the relay's log: %s",
				now, n, stall, owner.words)
		}

		select {
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		case <-time.After(4 * slow):
		}
	}
}

// purgeDelivered removes envelopes with the purge command, without a limit of the rate. Their stamps are an hour old,
// which is more than the margin.
func (r *reconcilerRun) purgeDelivered(ctx context.Context) (meterReading, error) {
	name := fmt.Sprintf("purge%d", r.number)
	coll, err := r.newOutbox(ctx, name)
	if err != nil {
		return meterReading{}, err
	}
	defer func() { _ = coll.Drop(context.WithoutCancel(ctx)) }()

	old := uint32(time.Now().Add(-time.Hour).Unix())
	if err := r.writeDocuments(ctx, coll, r.Events, func(i int) (bson.Raw, error) {
		return newStampedEnvelope(i, r.Payload, bson.Timestamp{T: old, I: uint32(i + 1)})
	}); err != nil {
		return meterReading{}, err
	}

	setting := setting{watch: name, topic: r.db + "." + name, state: r.newStateDB(name), start: "now"}
	if err := r.createPosition(ctx, setting); err != nil {
		return meterReading{}, err
	}

	meter := startMeter(r.serverPIDs()...)
	out, err := r.runCommand(ctx, setting, "purge", "--older-than", "1m", "--rate", "-1", "--yes", "--json")
	if err != nil {
		return meterReading{}, err
	}

	var report struct {
		Removed int     `json:"removed"`
		Seconds float64 `json:"took_s"`
	}
	if err := json.Unmarshal(out, &report); err != nil {
		return meterReading{}, fmt.Errorf("parsing the output of purge: %w", err)
	}
	if report.Removed != r.Events || report.Seconds <= 0 {
		return meterReading{}, fmt.Errorf("%d of %d envelopes were purged in %.1f s",
			report.Removed, r.Events, report.Seconds)
	}

	r.got.addValue("purge", float64(report.Removed)/report.Seconds)
	return newReading(meter, "%8.0f/s", float64(report.Removed)/report.Seconds), nil
}

// newStampedEnvelope returns an envelope with the given stamp. The server replaces only empty stamps.
func newStampedEnvelope(i, size int, ts bson.Timestamp) (bson.Raw, error) {
	doc, err := newEnvelope(i, size)
	if err != nil {
		return nil, err
	}

	var fields bson.D
	if err := bson.Unmarshal(doc, &fields); err != nil {
		return nil, fmt.Errorf("reading an envelope: %w", err)
	}

	for j := range fields {
		if fields[j].Key == "ts" {
			fields[j].Value = ts
		}
	}
	return bson.Marshal(fields)
}
