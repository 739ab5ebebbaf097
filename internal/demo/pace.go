package demo

import (
	"context"
	"time"
)

const (
	burstEvery = 5 * time.Second
	burstShare = 0.05 // of the events come at once at the end of each such stretch
)

// pace says when each event is due: at an even rate with a burst now and then, at the asked rate on the whole.
type pace struct {
	rate  int
	even  bool // without bursts
	start time.Time
	n     int // events given out since start
}

// due is when the n-th event (from 0) of a stretch at that rate is to be appended, after the start.
func due(n, rate int) time.Duration {
	stretch := max(int(burstEvery.Seconds()*float64(rate)), 1)
	whole, i := n/stretch, n%stretch
	even := max(int(float64(stretch)*(1-burstShare)), 1)
	at := time.Duration(whole) * burstEvery
	if rate < 1 {
		rate = 1
	}
	if stretch == 1 {
		return time.Duration(n) * time.Second / time.Duration(rate)
	}
	return at + burstEvery*time.Duration(min(i, even))/time.Duration(even)
}

// wait returns when the next event is due, or at once when more are wanted now; false when ctx ended.
func (p *pace) wait(ctx context.Context, more <-chan int, extra *int) bool {
	if p.start.IsZero() {
		p.start = time.Now()
	}
	if *extra > 0 {
		*extra--
		return ctx.Err() == nil
	}
	at := due(p.n, p.rate)
	if p.even {
		at = time.Duration(p.n) * time.Second / time.Duration(max(p.rate, 1))
	}
	left := time.Until(p.start.Add(at))
	if left < -burstEvery { // held up for long: go on at the rate, rather than make up for it
		p.start, p.n, left = time.Now(), 0, 0
	}
	p.n++
	if left <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(left)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case n := <-more:
		*extra += n
		return true
	case <-t.C:
		return true
	}
}

// rateFor is the rate at which at least two kills fall into a run of that many events: never above the asked one.
func rateFor(rate, events int, killEvery time.Duration) int {
	if events == 0 || killEvery == 0 {
		return rate
	}
	return max(min(rate, int(float64(events)/(2.5*killEvery.Seconds()))), 1)
}
