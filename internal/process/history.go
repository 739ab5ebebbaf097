package process

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/retry"
)

const (
	// lagEvery is the interval at which the lag is read for the greatest one of a minute.
	lagEvery = 5 * time.Second
	// historyTimeout bounds the write of one sample. A sample that cannot be written is left out.
	historyTimeout = 5 * time.Second
)

// recordHistory writes throughput and lag of the slots that this process owns, once a minute, until ctx ends.
func (r *Relay) recordHistory(ctx context.Context) error {
	history := nodes.NewHistory(r.shared.Mongo.State.Database(r.cfg.MongoDB.State).Collection("history"))
	begun := minutes{}
	for retry.Sleep(ctx, lagEvery) == nil {
		current := map[string]slotFigures{}
		for _, one := range r.activeSlots() {
			if acked, lag, ok := one.Figures(); ok {
				current[one.Part.ID(r.cfg.Watcher)] = slotFigures{acked, lag}
			}
		}

		for slot, sample := range begun.observe(time.Now(), current) {
			call, cancel := context.WithTimeout(ctx, historyTimeout)
			if err := history.Append(call, slot, sample); err != nil {
				r.log.Debug("a minute is missing in the history", "reason", err)
			}
			cancel()
		}
	}
	return nil
}

// slotFigures are the present figures of a slot.
type slotFigures struct {
	acked int64 // records since the term began
	lag   time.Duration
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
		over[slot] = nodes.Sample{At: one.began, Rate: float64(f.acked-one.acked) / took.Seconds(), LagS: one.lag.Seconds()}
		m[slot] = &minute{now, f.acked, f.lag}
	}
	return over
}
