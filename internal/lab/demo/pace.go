package demo

import (
	"context"
	"time"
)

const (
	burstEvery = 5 * time.Second
	burstShare = 0.05 // share of the events that come at once at the end of each interval
)

// pace schedules the events of the service. On average they have the requested rate. Most are
// evenly distributed, and a burst comes at the end of each interval.
type pace struct {
	rate  int  // per second; negative means bursts on request only
	even  bool // without bursts
	start time.Time
	n     int // events since start
}

// dueAfterStart returns when the n-th event is due, counted from 0, relative to the start.
func dueAfterStart(n, rate int) time.Duration {
	perInterval := max(int(burstEvery.Seconds()*float64(rate)), 1)
	interval, i := n/perInterval, n%perInterval
	evenEvents := max(int(float64(perInterval)*(1-burstShare)), 1)
	if rate < 1 {
		rate = 1
	}
	if perInterval == 1 {
		return time.Duration(n) * time.Second / time.Duration(rate)
	}

	begin := time.Duration(interval) * burstEvery
	return begin + burstEvery*time.Duration(min(i, evenEvents))/time.Duration(evenEvents)
}

// waitNext blocks until the next event is due, or until extra events are requested on more. It
// returns false if ctx ends.
func (p *pace) waitNext(ctx context.Context, more <-chan int, extra *int) bool {
	if p.start.IsZero() {
		p.start = time.Now()
	}
	if *extra > 0 {
		*extra--
		return ctx.Err() == nil
	}
	// Without a rate, only requested events are appended.
	if p.rate < 0 {
		select {
		case <-ctx.Done():
			return false
		case n := <-more:
			*extra += n - 1
			return true
		}
	}

	at := dueAfterStart(p.n, p.rate)
	if p.even {
		at = time.Duration(p.n) * time.Second / time.Duration(max(p.rate, 1))
	}
	left := time.Until(p.start.Add(at))

	// After a long delay, the service continues at its rate instead of catching up.
	if left < -burstEvery {
		p.start = time.Now()
		p.n = 0
		left = 0
	}
	p.n++
	if left <= 0 {
		return ctx.Err() == nil
	}

	timer := time.NewTimer(left)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case n := <-more:
		*extra += n
		return true
	case <-timer.C:
		return true
	}
}

// limitRate returns the rate at which at least two kills fall into a run with this number of
// events, but at most rate.
func limitRate(rate, events int, killEvery time.Duration) int {
	if events == 0 || killEvery == 0 {
		return rate
	}
	return max(min(rate, int(float64(events)/(2.5*killEvery.Seconds()))), 1)
}
