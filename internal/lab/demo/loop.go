package demo

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/lab/demo/check"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
)

const (
	tickEvery   = 50 * time.Millisecond
	arriveTime  = 60 * time.Second // for the delivery of committed events after the last event
	hurryTime   = 20 * time.Second // the same, after a signal or q
	settleTime  = 500 * time.Millisecond
	holdTime    = 60 * time.Second // for two kills, in addition to three times their interval
	maxFailures = 5                // relays that ended unexpectedly
)

// phase is the state of the loop.
type phase struct {
	killDue  bool
	failures int
	stopped  time.Time // when the service was made to stop; zero while it runs
	ended    bool      // the service has ended
	arrived  time.Time // since when nothing is missing
	err      error
}

// runLoop runs the service and handles keys, kills and relays that end. It blocks until all events
// are delivered.
func (d *demo) runLoop(ctx context.Context) error {
	keys := d.openKeys()
	d.view.restartInterval()

	// The service ends by quit, so that its last transactions are committed.
	serveCtx, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	served := make(chan error, 1)
	go func() { served <- d.service.Run(serveCtx) }()

	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	var kill <-chan time.Time
	if d.options.KillEvery > 0 {
		ticker := time.NewTicker(d.options.KillEvery)
		defer ticker.Stop()
		kill = ticker.C
	}

	var phase phase
	quit := func() {
		if phase.stopped.IsZero() {
			phase.stopped = time.Now()
			stop()
			d.endPause(ctx)
		}
	}
	done := ctx.Done()
	for {
		select {
		// The first Ctrl-C only stops the service. Everything that was appended is still delivered.
		case <-done:
			done = nil
			quit()

		case phase.err = <-served:
			phase.ended = true
			phase.killDue = false
			served = nil
			kill = nil

		case key := <-keys:
			if d.handleKey(ctx, key) {
				quit()
			}

		case relay := <-d.relays.ended:
			if err := d.relayEnded(relay, &phase); err != nil {
				stop()
				return err
			}

		case <-kill:
			phase.killDue = phase.stopped.IsZero()

		case <-tick.C:
			// A kill that is due waits until there is a standby.
			if phase.killDue && d.killOwner(ctx) == nil {
				phase.killDue = false
			}
			d.reportTakeover(ctx)
			d.drawFigures()
			if over, err := d.isOver(&phase); over {
				return err
			}
		}
	}
}

// isOver reports whether the run is over: the service has ended, and its committed events are
// delivered or too late.
func (d *demo) isOver(phase *phase) (bool, error) {
	if !phase.ended {
		return false, nil
	}
	if phase.err != nil {
		return true, phase.err
	}

	now := time.Now()
	if phase.stopped.IsZero() {
		phase.stopped = now
	}
	limit := hurryTime
	if d.options.Events > 0 {
		limit = arriveTime
	}

	if d.check.Report().Waiting > 0 {
		phase.arrived = time.Time{}
		return now.Sub(phase.stopped) > limit, nil
	}
	if phase.arrived.IsZero() {
		phase.arrived = now
	}

	// A surplus record would arrive within the settle time.
	return now.Sub(phase.arrived) > settleTime, nil
}

func (d *demo) openKeys() <-chan byte {
	if d.options.Terminal == nil {
		return nil
	}

	keys, err := d.options.Terminal.Raw()
	if err != nil {
		d.view.printLine("  no keys: %v", err)
		return nil
	}
	d.view.printLine("  keys              k kill the owner · s stop it · b burst · p pause · q quit")
	return keys
}

// handleKey executes the command of a key, and reports whether the user wants to quit.
func (d *demo) handleKey(ctx context.Context, key byte) (quit bool) {
	var err error
	switch key {
	case ctrlC:
		d.options.Keep = false
		return true
	case 'q', 'Q':
		return true
	case 'k', 'K':
		err = d.killOwner(ctx)
	case 's', 'S':
		err = d.stopOwner(ctx)
	case 'b', 'B':
		d.service.requestBurst(burstSize)
		d.view.printEvent("burst of %d events", burstSize)
	case 'p', 'P':
		err = d.togglePause(ctx)
	}

	// A failed command does not end the demo.
	if err != nil {
		d.view.printEvent("%v", err)
	}
	return false
}

// togglePause pauses the watcher, or resumes it if it is paused.
func (d *demo) togglePause(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, cleanupTimeout)
	defer cancel()

	if d.follow.currentOwner().paused {
		d.view.printEvent("resumed")
		d.beginOutage(check.OmitSamples)
		return lease.Resume(ctx, d.follow.coll, watcherID)
	}
	d.view.printEvent("paused; press p again to resume")
	d.latency.Outage(time.Now(), check.OmitSamples)
	return lease.Pause(ctx, d.follow.coll, watcherID, "outrelay dev")
}

// endPause resumes a paused watcher, so that the events that were committed during the pause are
// delivered before the end.
func (d *demo) endPause(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()

	if d.follow.currentOwner().paused {
		if err := d.togglePause(ctx); err != nil {
			d.view.printEvent("%v", err)
		}
	}
}

// findVictim returns the owner if there is a standby that can take over.
func (d *demo) findVictim(ctx context.Context) (*relay, error) {
	node := d.follow.currentOwner().node
	owner := d.relays.findRelay(node)
	if node == "" || owner == nil || owner.isExpected() {
		return nil, errors.New("the watcher has no owner at the moment")
	}
	if d.relays.findStandby(ctx, node) == nil {
		return nil, errors.New("there is no standby yet, so the only relay continues")
	}
	return owner, nil
}

// killOwner ends the owner with SIGKILL and starts a new standby.
func (d *demo) killOwner(ctx context.Context) error {
	owner, err := d.findVictim(ctx)
	if err != nil {
		return err
	}

	// The watcher of the processes treats any other end of a relay as a failure of the demo.
	owner.markExpected()
	d.beginOutage(check.OmitSamples)
	if err := owner.prog.Kill(); err != nil {
		return err
	}
	d.view.printEvent("killed %s (-9)", owner.node)

	d.mu.Lock()
	d.kills++
	if d.kills == 2 {
		close(d.twoKills)
	}
	d.mu.Unlock()

	// The former standby becomes the owner, so the new process is the standby.
	_, err = d.relays.startRelay()
	return err
}

// stopOwner ends the owner with SIGTERM and starts a new standby.
func (d *demo) stopOwner(ctx context.Context) error {
	owner, err := d.findVictim(ctx)
	if err != nil {
		return err
	}

	d.beginOutage(check.KeepSamples)
	d.view.printEvent("stopping %s", owner.node)
	d.relays.stopRelay(owner, stopWithin)
	_, err = d.relays.startRelay()
	return err
}

// beginOutage starts measuring the time until the next owner delivers.
func (d *demo) beginOutage(samples check.Samples) {
	now := time.Now()
	d.latency.Outage(now, samples)

	d.mu.Lock()
	defer d.mu.Unlock()
	if d.outageSince.IsZero() {
		d.outageSince = now
	}
}

// untilTwoKills blocks the service before its last events until two relays were killed.
func (d *demo) untilTwoKills(ctx context.Context) {
	timer := time.NewTimer(3*d.options.KillEvery + holdTime)
	defer timer.Stop()
	select {
	case <-d.twoKills:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// relayEnded replaces a relay that ended unexpectedly. It returns an error after too many of them.
func (d *demo) relayEnded(relay *relay, phase *phase) error {
	if relay.isExpected() || d.stopping.Load() {
		return nil
	}

	d.view.printEvent("relay %s ended unexpectedly: %v; the end of its log:\n%s", relay.node, relay.prog.Err(), lastLogLines(relay))
	phase.failures++
	if phase.failures == maxFailures {
		return fmt.Errorf("%d relays ended unexpectedly; the last one: %w", phase.failures, relay.prog.Err())
	}

	if d.follow.currentOwner().node == relay.node {
		d.beginOutage(check.OmitSamples)
	}
	_, err := d.relays.startRelay()
	return err
}

// recordAcquired is called for each new epoch.
func (d *demo) recordAcquired(ownership ownership) {
	d.latency.Acquired(ownership.acquiredAt)

	d.mu.Lock()
	defer d.mu.Unlock()
	if d.firstEpoch == 0 {
		d.firstEpoch = ownership.epoch
		d.reportedEpoch = ownership.epoch
	}
	d.lastOwnership = ownership
}

// reportTakeover prints a takeover after the new owner has delivered its first record.
func (d *demo) reportTakeover(ctx context.Context) {
	firstRecord, over := d.latency.Outside()

	d.mu.Lock()
	last, since := d.lastOwnership, d.outageSince
	// Without load, there may be no delivery to wait for.
	if last.epoch == d.reportedEpoch || !since.IsZero() && !over && !d.isIdle() {
		d.mu.Unlock()
		return
	}
	d.reportedEpoch = last.epoch
	d.outageSince = time.Time{}
	d.mu.Unlock()

	parts := []string{last.node + " took over", fmt.Sprintf("epoch %d", last.epoch)}
	if relay := d.relays.findRelay(last.node); relay != nil {
		n, err := d.relays.readCounter(ctx, relay, "outrelay_read_back_records_total")
		if err == nil && n > 0 {
			parts = append(parts, fmt.Sprintf("read back %s records", formatThousands(int(n))))
		}
		n, err = d.relays.readCounter(ctx, relay, "outrelay_read_back_hits_total")
		if err == nil && n > 0 {
			parts = append(parts, fmt.Sprintf("%s sent already", formatThousands(int(n))))
		}
	}
	if !since.IsZero() && over {
		parts = append(parts, "first delivery after "+formatDuration(firstRecord.Sub(since)))
	}
	d.view.printEvent("%s", strings.Join(parts, " · "))
}

// drawFigures shows the current figures, at most every redrawEvery.
func (d *demo) drawFigures() {
	now := time.Now()
	since := now.Sub(d.drawnAt)
	if since < redrawEvery {
		return
	}

	report, figures, owner := d.check.Report(), d.latency.Figures(), d.follow.currentOwner()
	if !d.drawnAt.IsZero() {
		// The rate is smoothed over two seconds.
		share := min(since.Seconds()/2, 1)
		d.rate += share * (float64(report.Delivered-d.drawnDelivered)/since.Seconds() - d.rate)
	}
	d.drawnAt = now
	d.drawnDelivered = report.Delivered

	lag := 0.0
	if !report.Oldest.IsZero() {
		lag = now.Sub(report.Oldest).Seconds()
	}
	text := fmt.Sprintf(" events %s · %.0f/s%s · commit→Kafka p50 %.1f ms p99 %.1f ms · lag %.1f s"+
		" · lost %d · duplicate %d · out of order %d",
		formatThousands(report.Delivered), d.rate, formatOwner(owner), figures.P50, figures.P99, lag, report.Overtaken, report.Duplicates, report.OutOfOrder+report.Strayed)
	if report.Foreign > 0 {
		text += fmt.Sprintf(" · of other services %s", formatThousands(report.Foreign))
	}
	if n := report.Phantoms + report.Altered; n > 0 {
		text += fmt.Sprintf(" · phantom %d", n)
	}
	if owner.paused {
		text += " · paused"
	}
	d.view.showFigures(text)
}

// formatOwner returns the owner of the moment, as a part of the figures.
func formatOwner(ownership ownership) string {
	switch {
	case ownership.node != "":
		return fmt.Sprintf(" · owner %s epoch %d", ownership.node, ownership.epoch)
	case ownership.paused:
		return ""
	}
	return " · no owner"
}
