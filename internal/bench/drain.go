package bench

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	fast = 3 * time.Millisecond  // between looks at the topic where the moment counts
	slow = 25 * time.Millisecond // and where it does not
	// settled is the part of the backlog after which memory should not grow any more.
	settled = 50_000
	// stall is how long a measurement may go without progress.
	stall = 60 * time.Second
)

// drained is one drain of the backlog through the relay.
type drained struct {
	eps, cpuPerMillion, allocs float64
	peak, early, end           float64 // MiB: VmHWM, resident after the first 50,000, greatest after that
	foreign                    float64
	known                      bool // foreign is
}

// drainBacklog starts a relay on the backlog and follows its topic from outside. The clock runs from the first records in the topic
// to the last: start and take-over are not part of it, as connecting is none of the raw drain.
func (b *bench) drainBacklog(ctx context.Context, run int) (drained, error) {
	return b.drainBeside(ctx, fmt.Sprintf("drain%d", run), setting{}, func(*relay) {}, func() error { return nil })
}

// drainBeside is drain with something beside it: begin is called when the process was started, and end, in any case, when the
// records are all there and before the process is asked to stop.
func (b *bench) drainBeside(ctx context.Context, name string, s setting, begin func(*relay), end func() error) (d drained, err error) {
	topic, err := b.newTopic(ctx, name)
	if err != nil {
		return d, err
	}
	defer b.cluster.deleteTopic(context.WithoutCancel(ctx), topic)
	s.watch, s.topic, s.state, s.start, s.label = backlog, topic, b.newStateDB(name), "backlog", name
	r, err := b.startRelay(ctx, s)
	if err != nil {
		return d, err
	}
	defer func() { _ = r.stopProcess() }() // asked below where its answer counts
	begin(r)
	w := &watcher{bench: b, relay: r, topic: topic}
	if err = w.followDrain(ctx, b.Events); err == nil {
		d, err = w.drainResult(ctx)
	}
	if err := errors.Join(err, end()); err != nil {
		return d, err
	}
	return d, r.stopProcess()
}

// watcher follows a drain.
type watcher struct {
	*bench
	relay *relay
	topic string

	n      int // records in the topic
	at     time.Time
	empty  time.Time // the last look that found none
	firstN int
	first  time.Time

	meter         *meter
	before, after usage
	start         counters
	early, most   float64
	foreign       float64
	known         bool
}

func (w *watcher) followDrain(ctx context.Context, events int) error {
	progressed := time.Now()
	for w.n < events {
		if err := w.relay.checkRunning(); err != nil {
			return err
		}
		if w.n == 0 {
			w.before, _ = processUsage(w.relay.pid())
		}
		n, err := w.cluster.countRecords(ctx, w.topic)
		if err != nil {
			return err
		}
		w.at = time.Now()
		if n > w.n {
			progressed = w.at
		}
		w.n = n
		if err := w.recordSample(ctx); err != nil {
			return err
		}
		if time.Since(progressed) > stall {
			return fmt.Errorf("the relay has delivered %d of %d events and nothing for %s; its last words: %s", n, events, stall, w.relay.words)
		}
		// A look costs the broker something, so there are few where the moment does not count.
		wait := min(max(w.estimateRest(events)/8, slow), 4*slow)
		if w.n == 0 || w.estimateRest(events) < 3*slow {
			wait = fast
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(wait):
		}
	}
	w.after, _ = processUsage(w.relay.pid())
	w.foreign, w.known = w.meter.foreign()
	return nil
}

// recordSample notes what is due at this count.
func (w *watcher) recordSample(ctx context.Context) (err error) {
	if w.n == 0 {
		w.empty = w.at
		return nil
	}
	if w.meter == nil {
		w.first, w.firstN = w.at, w.n
		w.meter = startMeter(append(w.serverPIDs(), w.relay.pid())...)
		if w.start, err = w.relay.readCounters(ctx); err != nil {
			return err
		}
	}
	if w.n >= settled {
		u, _ := processUsage(w.relay.pid())
		if w.early == 0 {
			w.early = u.rss
		}
		w.most = max(w.most, u.rss)
	}
	return nil
}

// estimateRest estimates how long the rest takes.
func (w *watcher) estimateRest(events int) time.Duration {
	took := w.at.Sub(w.first)
	if w.n <= w.firstN {
		return time.Hour
	}
	return time.Duration(float64(took) * float64(events-w.n) / float64(w.n-w.firstN))
}

func (w *watcher) drainResult(ctx context.Context) (drained, error) {
	d := drained{peak: w.after.hwm, early: w.early, end: w.most, foreign: w.foreign, known: w.known}
	if w.n > w.firstN {
		d.eps = float64(w.n-w.firstN) / w.at.Sub(w.first).Seconds()
	} else { // so few events that all were there at the first look: at least this
		d.eps = float64(w.n) / w.at.Sub(w.empty).Seconds()
	}
	end, err := w.relay.readCounters(ctx)
	if err != nil {
		return d, err
	}
	again, err := w.relay.readCounters(ctx)
	if err != nil {
		return d, err
	}
	if int(end.read) < w.Events {
		return d, fmt.Errorf("the relay has read %.0f events, of %d", end.read, w.Events)
	}
	scrape := again.mallocs - end.mallocs
	if n := end.read - w.start.read; n >= end.read/2 {
		d.allocs = max(end.mallocs-w.start.mallocs-scrape, 0) / n
	} else { // so few events that they were read before the first look
		d.allocs = end.mallocs / end.read
	}
	cpu := w.after.cpu - w.before.cpu
	if cpu <= 0 {
		cpu = end.cpu
	}
	d.cpuPerMillion = cpu * 1e6 / float64(w.n)
	return d, nil
}
