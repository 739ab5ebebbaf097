package process

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/relay/activity"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

const (
	// historyEvery is the interval at which the lag is read for the greatest one of a minute, and at which the activity is
	// written.
	historyEvery = 5 * time.Second
	// historyTimeout bounds the write of one sample. A sample that cannot be written is left out.
	historyTimeout = 5 * time.Second
)

// recordHistory writes throughput and lag of the slots that this process owns, once a minute, and their activity while
// records are acked. It returns when ctx ends.
func (r *Relay) recordHistory(ctx context.Context) error {
	history := nodes.NewHistory(state.Open(r.shared.Mongo.State, r.cfg.State).Collection("history"))
	begun := minutes{}
	for retry.Sleep(ctx, historyEvery) == nil {
		current := map[string]slotFigures{}
		for _, one := range r.activeSlots() {
			slot := one.Slot.ID(r.cfg.Watcher)
			if acked, lag, ok := one.Figures(); ok {
				current[slot] = slotFigures{acked: acked, lag: lag}
			}
			if log := one.Activity(); log != nil {
				if figures, ok := current[slot]; ok {
					figures.p50MS, figures.p99MS = log.Latency()
					current[slot] = figures
				}
				r.saveActivity(ctx, history, slot, log)
			}
		}

		for slot, sample := range begun.observe(time.Now(), current) {
			// A failed write only leaves a hole in the history.
			call, cancel := context.WithTimeout(ctx, historyTimeout)
			if err := history.Append(call, slot, sample); err != nil {
				r.log.Debug("a minute is missing in the history", "error", err)
			}
			cancel()
		}
	}
	return nil
}

// saveActivity writes the activity of a slot if there is any. Before the first write, it reads the report of the previous
// owner, which has the topics without a record since.
func (r *Relay) saveActivity(ctx context.Context, history *nodes.History, slot string, log *activity.Log) {
	ctx, cancel := context.WithTimeout(ctx, historyTimeout)
	defer cancel()
	if _, active := log.Report(); !active {
		return
	}

	var err error
	if log.NeedsPrevious() {
		var previous activity.Report
		if previous, err = history.ReadSlotActivity(ctx, slot); err == nil {
			log.Adopt(previous)
		}
	}
	// Without the previous report, a write would lose its topics.
	if report, _ := log.Report(); err == nil {
		err = history.SaveActivity(ctx, slot, report)
	}
	if err != nil {
		r.log.Debug("cannot write the activity of a slot; its report stays old", "slot", slot, "error", err)
	}
}

// slotFigures are the present figures of a slot.
type slotFigures struct {
	acked        int64 // records since the term began
	lag          time.Duration
	p50MS, p99MS float64 // latency of the last minute
}

// minutes has the minute that has begun of each slot, by the id of the slot.
type minutes map[string]*minute

type minute struct {
	began time.Time
	acked int64 // when it began
	lag   time.Duration
}

// observe takes the figures of the slots that this process owns, and returns the samples of the minutes that are over. A slot that
// is not in current is not owned any more.
func (m minutes) observe(now time.Time, current map[string]slotFigures) map[string]nodes.Sample {
	for slot := range m {
		if _, owned := current[slot]; !owned {
			delete(m, slot)
		}
	}

	var over map[string]nodes.Sample
	for slot, f := range current {
		one := m[slot]
		// Another term of the slot counts from 0.
		if one == nil || f.acked < one.acked {
			m[slot] = &minute{now, f.acked, f.lag}
			continue
		}

		one.lag = max(one.lag, f.lag)
		took := now.Sub(one.began)
		if took < time.Minute {
			continue
		}
		if over == nil {
			over = map[string]nodes.Sample{}
		}
		over[slot] = nodes.Sample{
			At: one.began, Rate: float64(f.acked-one.acked) / took.Seconds(), LagS: one.lag.Seconds(), P50MS: f.p50MS, P99MS: f.p99MS,
		}
		m[slot] = &minute{now, f.acked, f.lag}
	}
	return over
}
