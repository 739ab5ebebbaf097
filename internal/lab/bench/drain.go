package bench

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	fast = 3 * time.Millisecond  // between two checks of the topic if the exact time matters
	slow = 25 * time.Millisecond // and otherwise
	// settled is the number of events after which the memory should no longer grow.
	settled = 50_000
	// stall is how long a measurement may make no progress.
	stall = 60 * time.Second
)

// drained has the figures of one drain of the backlog through the relay.
type drained struct {
	eps, cpuPerMillion, allocs float64
	mongodPerMillion           float64 // CPU seconds; -1 if it is unknown
	peak, early, end           float64 // MiB: VmHWM, resident after the first 50,000, maximum after that
	otherCPU                   float64
	known                      bool // whether otherCPU is known
}

// drainBacklog starts a relay on the backlog and follows its topic from outside. The time is measured from
// the first to the last record in the topic. It excludes the start and the takeover, as the raw drain
// excludes connecting.
func (b *bench) drainBacklog(ctx context.Context, run int) (drained, error) {
	return b.drainBeside(ctx, fmt.Sprintf("drain%d", run), setting{}, func(*relay) {}, func() error { return nil })
}

// drainForeign is drainBacklog for the documents of another writer. They have no stamp to begin a stream at, so the
// relay gets the time at which they were written.
func (b *bench) drainForeign(ctx context.Context, run int) (drained, error) {
	start := time.Unix(int64(b.start.T), 0).UTC().Format(time.RFC3339)
	setting := setting{watch: foreignBacklog, start: start}
	return b.drainBeside(ctx, fmt.Sprintf("foreign%d", run), setting, func(*relay) {}, func() error { return nil })
}

// drainBeside is drainBacklog with a concurrent activity. It calls begin after the start of the process. It
// always calls end when all records are there or the drain has failed, and before it stops the process.
func (b *bench) drainBeside(ctx context.Context, name string, setting setting, begin func(*relay), end func() error) (drained drained, err error) {
	topic, err := b.newTopic(ctx, name)
	if err != nil {
		return drained, err
	}
	defer b.cluster.deleteTopic(context.WithoutCancel(ctx), topic)

	if setting.watch == "" {
		setting.watch, setting.start = backlog, "backlog"
	}
	setting.topic, setting.state, setting.label = topic, b.newStateDB(name), name
	relay, err := b.startRelay(setting)
	if err != nil {
		return drained, err
	}
	// If the drain succeeds, the error of the stop is returned below.
	defer func() { _ = relay.stopProcess() }()

	begin(relay)

	watcher := &watcher{bench: b, relay: relay, topic: topic}
	if err = watcher.followDrain(ctx, b.Events); err == nil {
		drained, err = watcher.drainResult(ctx)
	}

	if err := errors.Join(err, end()); err != nil {
		return drained, err
	}
	return drained, relay.stopProcess()
}

// watcher follows a drain.
type watcher struct {
	*bench
	relay *relay
	topic string

	n      int // records in the topic
	at     time.Time
	empty  time.Time // last check that found no record
	firstN int
	first  time.Time

	meter         *meter
	before, after usage
	mongod        *meter // since the last check that found no record
	mongodCPU     float64
	start         counters
	early, most   float64
	otherCPU      float64
	known         bool
}

// followDrain checks the topic until it has all events.
func (w *watcher) followDrain(ctx context.Context, events int) error {
	progressed := time.Now()
	for w.n < events {
		if err := w.relay.checkRunning(); err != nil {
			return err
		}
		// The CPU time before the first record belongs to the start.
		if w.n == 0 {
			w.before, _ = processUsage(w.relay.pid())
			w.mongod = startMeter(w.mongods...)
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
			return fmt.Errorf("the relay has delivered %d of %d events and nothing for %s; end of its log: %s",
				n, events, stall, w.relay.words)
		}

		// Each check costs the broker something, so there are few of them while the exact time does not matter.
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
	w.mongodCPU = w.mongod.measureUsed(w.mongods...)
	w.otherCPU, w.known = w.meter.measureOtherCPU()
	return nil
}

// recordSample records the figures that are due at the current number of records.
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
		usage, _ := processUsage(w.relay.pid())
		if w.early == 0 {
			w.early = usage.rss
		}
		w.most = max(w.most, usage.rss)
	}
	return nil
}

// estimateRest estimates how long the remaining events take.
func (w *watcher) estimateRest(events int) time.Duration {
	took := w.at.Sub(w.first)
	if w.n <= w.firstN {
		return time.Hour
	}
	return time.Duration(float64(took) * float64(events-w.n) / float64(w.n-w.firstN))
}

// checkDrain returns an error unless the relay has read each event once from the stream. Otherwise the time between the first and the last
// record is no measurement of that.
func (c counters) checkDrain(events int) error {
	switch {
	case c.gaps > 0:
		return fmt.Errorf("the oplog of MongoDB has lost the backlog, so the relay has read the collection and only %.0f of %d events from the stream: "+
			"enlarge the oplog, or take fewer --events or --runs", c.read, events)
	case int(c.read) != events:
		return fmt.Errorf("the relay has read %.0f events of a backlog of %d", c.read, events)
	}
	return nil
}

func (w *watcher) drainResult(ctx context.Context) (drained, error) {
	drained := drained{peak: w.after.hwm, early: w.early, end: w.most, otherCPU: w.otherCPU, known: w.known}

	if w.n > w.firstN {
		drained.eps = float64(w.n-w.firstN) / w.at.Sub(w.first).Seconds()
	} else {
		// So few events that all were there at the first check. The rate is at least this.
		drained.eps = float64(w.n) / w.at.Sub(w.empty).Seconds()
	}

	// Reading the counters costs allocations, which the difference of two readings shows.
	end, err := w.relay.readCounters(ctx)
	if err != nil {
		return drained, err
	}
	again, err := w.relay.readCounters(ctx)
	if err != nil {
		return drained, err
	}
	if err := end.checkDrain(w.Events); err != nil {
		return drained, err
	}

	scrape := again.mallocs - end.mallocs
	if n := end.read - w.start.read; n >= end.read/2 {
		drained.allocs = max(end.mallocs-w.start.mallocs-scrape, 0) / n
	} else {
		// So few events that they were read before the first check.
		drained.allocs = end.mallocs / end.read
	}

	// The process may have ended its work before the first sample of its CPU time.
	cpu := w.after.cpu - w.before.cpu
	if cpu <= 0 {
		cpu = end.cpu
	}
	drained.cpuPerMillion = cpu * 1e6 / float64(w.n)
	drained.mongodPerMillion = -1
	if w.mongodCPU > 0 {
		drained.mongodPerMillion = w.mongodCPU * 1e6 / float64(w.n)
	}
	return drained, nil
}
