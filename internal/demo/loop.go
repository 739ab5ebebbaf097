package demo

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/lease"
)

const (
	tickEvery   = 50 * time.Millisecond
	arriveTime  = 60 * time.Second // for what was committed to arrive, after the last event
	hurryTime   = 20 * time.Second // the same, after a signal or q
	settleTime  = 500 * time.Millisecond
	holdTime    = 60 * time.Second // for two kills to happen, beyond three times their rhythm
	maxFailures = 5                // relays that ended by themselves
)

// state of the loop.
type phase struct {
	killDue  bool
	failures int
	stopped  time.Time // when the service was told to stop; zero while it runs
	ended    bool      // the service has ended
	arrived  time.Time // when nothing was missing any more
	err      error
}

// loop runs the service and does what keys, the clock and the relays ask for until all is through.
func (d *demo) loop(ctx context.Context) error {
	keys := d.keys()
	d.v.begin()
	serve, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	served := make(chan error, 1)
	go func() { served <- d.service.Run(serve) }()
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	var kill <-chan time.Time
	if d.o.KillEvery > 0 {
		t := time.NewTicker(d.o.KillEvery)
		defer t.Stop()
		kill = t.C
	}
	var p phase
	quit := func() {
		if p.stopped.IsZero() {
			p.stopped = time.Now()
			stop()
			d.unpause(ctx)
		}
	}
	done := ctx.Done()
	for {
		select {
		case <-done:
			done = nil
			quit()
		case p.err = <-served:
			p.ended, served, kill, p.killDue = true, nil, nil, false
		case key := <-keys:
			if d.press(ctx, key) {
				quit()
			}
		case x := <-d.relays.ended:
			if err := d.relayEnded(x, &p); err != nil {
				stop()
				return err
			}
		case <-kill:
			p.killDue = p.stopped.IsZero()
		case <-tick.C:
			if p.killDue && d.kill(ctx) == nil {
				p.killDue = false
			}
			d.tell(ctx)
			d.draw()
			if over, err := d.over(&p); over {
				return err
			}
		}
	}
}

// over reports whether the run is through: the service has ended, and what it committed has arrived or will not.
func (d *demo) over(p *phase) (bool, error) {
	if !p.ended {
		return false, nil
	}
	if p.err != nil {
		return true, p.err
	}
	now := time.Now()
	if p.stopped.IsZero() {
		p.stopped = now
	}
	limit := hurryTime
	if d.o.Events > 0 {
		limit = arriveTime
	}
	switch r := d.check.Report(); {
	case r.Waiting > 0:
		p.arrived = time.Time{}
		return now.Sub(p.stopped) > limit, nil
	case p.arrived.IsZero():
		p.arrived = now
	}
	return now.Sub(p.arrived) > settleTime, nil // time for a record too many to show up
}

func (d *demo) keys() <-chan byte {
	if d.o.Terminal == nil {
		return nil
	}
	keys, err := d.o.Terminal.Raw()
	if err != nil {
		d.v.line("  no keys: %v", err)
		return nil
	}
	d.v.line("  keys              k kill the owner · s stop it · b burst · p pause · q quit")
	return keys
}

// press does what a key stands for and reports whether to quit.
func (d *demo) press(ctx context.Context, key byte) (quit bool) {
	var err error
	switch key {
	case 'q', 'Q', ctrlC:
		return true
	case 'k', 'K':
		err = d.kill(ctx)
	case 's', 'S':
		err = d.stopOwner(ctx)
	case 'b', 'B':
		d.service.burst(burst)
		d.v.event("burst of %d events", burst)
	case 'p', 'P':
		err = d.pause(ctx)
	}
	if err != nil {
		d.v.event("%v", err)
	}
	return false
}

func (d *demo) pause(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stopTime)
	defer cancel()
	if d.follow.owner().paused {
		d.v.event("resumed")
		d.outage(true)
		return lease.Resume(ctx, d.follow.coll, watcherID)
	}
	d.v.event("paused; p again goes on")
	d.latency.Outage(time.Now(), true)
	return lease.Pause(ctx, d.follow.coll, watcherID)
}

// unpause lets what was committed during a pause arrive before the end.
func (d *demo) unpause(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTime)
	defer cancel()
	if d.follow.owner().paused {
		if err := d.pause(ctx); err != nil {
			d.v.event("%v", err)
		}
	}
}

// victim is the owner, if there is another relay to take over from it.
func (d *demo) victim(ctx context.Context) (*relay, error) {
	node := d.follow.owner().node
	owner := d.relays.named(node)
	if node == "" || owner == nil || owner.isExpected() {
		return nil, errors.New("nobody owns the watcher at the moment")
	}
	if d.relays.standby(ctx, node) == nil {
		return nil, errors.New("there is no standby yet; the only relay is left alone")
	}
	return owner, nil
}

// kill ends the owner by SIGKILL and starts a new standby.
func (d *demo) kill(ctx context.Context) error {
	owner, err := d.victim(ctx)
	if err != nil {
		return err
	}
	owner.expect()
	d.outage(true)
	if err := owner.prog.Kill(); err != nil {
		return err
	}
	d.v.event("killed %s (-9)", owner.node)
	d.mu.Lock()
	if d.kills++; d.kills == 2 {
		close(d.twoKills)
	}
	d.mu.Unlock()
	_, err = d.relays.spawn()
	return err
}

// stopOwner ends the owner by SIGTERM and starts a new standby.
func (d *demo) stopOwner(ctx context.Context) error {
	owner, err := d.victim(ctx)
	if err != nil {
		return err
	}
	d.outage(false)
	d.v.event("stopping %s", owner.node)
	d.relays.end(owner, stopWithin)
	_, err = d.relays.spawn()
	return err
}

// outage begins to count the time until the next owner delivers.
func (d *demo) outage(leaveOut bool) {
	now := time.Now()
	d.latency.Outage(now, leaveOut)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.since.IsZero() {
		d.since = now
	}
}

// untilTwoKills holds the service up before its last events.
func (d *demo) untilTwoKills(ctx context.Context) {
	t := time.NewTimer(3*d.o.KillEvery + holdTime)
	defer t.Stop()
	select {
	case <-d.twoKills:
	case <-t.C:
	case <-ctx.Done():
	}
}

// relayEnded puts a new one in the place of a relay that ended by itself.
func (d *demo) relayEnded(x *relay, p *phase) error {
	if x.isExpected() || d.dying.Load() {
		return nil
	}
	d.v.event("relay %s ended by itself: %v; the end of its log:\n%s", x.node, x.prog.Err(), tail(x))
	if p.failures++; p.failures == maxFailures {
		return fmt.Errorf("%d relays ended by themselves; the last one: %w", p.failures, x.prog.Err())
	}
	if d.follow.owner().node == x.node {
		d.outage(true)
	}
	_, err := d.relays.spawn()
	return err
}

// acquired is told of each new epoch.
func (d *demo) acquired(o ownership) {
	d.latency.Acquired(o.acquiredAt)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.first == 0 {
		d.first, d.told = o.epoch, o.epoch
	}
	d.last = o
}

// tell says who took over, once it has delivered something.
func (d *demo) tell(ctx context.Context) {
	first, over := d.latency.Outside()
	d.mu.Lock()
	last, since := d.last, d.since
	if last.epoch == d.told || !since.IsZero() && !over {
		d.mu.Unlock()
		return
	}
	d.told, d.since = last.epoch, time.Time{}
	d.mu.Unlock()
	parts := []string{last.node + " took over", fmt.Sprintf("epoch %d", last.epoch)}
	if x := d.relays.named(last.node); x != nil {
		if n, err := d.relays.counter(ctx, x, "outrelay_read_back_records_total"); err == nil && n > 0 {
			parts = append(parts, fmt.Sprintf("read back %s events", thousands(int(n))))
		}
		if n, err := d.relays.counter(ctx, x, "outrelay_read_back_hits_total"); err == nil && n > 0 {
			parts = append(parts, fmt.Sprintf("%s sent already", thousands(int(n))))
		}
	}
	if !since.IsZero() {
		parts = append(parts, "first delivery after "+seconds(first.Sub(since)))
	}
	d.v.event("%s", strings.Join(parts, " · "))
}

// draw shows the figures.
func (d *demo) draw() {
	now := time.Now()
	since := now.Sub(d.drawnAt)
	if since < redrawEvery {
		return
	}
	r, f, o := d.check.Report(), d.latency.Figures(), d.follow.owner()
	if !d.drawnAt.IsZero() {
		share := min(since.Seconds()/2, 1) // smoothed over two seconds
		d.rate += share * (float64(r.Delivered-d.delivered)/since.Seconds() - d.rate)
	}
	d.drawnAt, d.delivered = now, r.Delivered
	lag := 0.0
	if !r.Oldest.IsZero() {
		lag = now.Sub(r.Oldest).Seconds()
	}
	text := fmt.Sprintf(" events %s · %.0f/s · commit→Kafka p50 %.1f ms p99 %.1f ms · lag %.1f s · lost %d · duplicate %d · out of order %d",
		thousands(r.Delivered), d.rate, f.P50, f.P99, lag, r.Overtaken, r.Duplicates, r.OutOfOrder+r.Strayed)
	if n := r.Phantoms + r.Altered; n > 0 {
		text += fmt.Sprintf(" · phantom %d", n)
	}
	switch {
	case o.paused:
		text += " · paused"
	case o.node == "":
		text += " · no owner"
	}
	d.v.figures(text)
}
