package check

import (
	"math"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// longest is what the histogram can hold; more counts as that.
const longest = time.Hour

// Latency measures the time from an acknowledged commit to the record at a consumer. Events that were committed during an
// outage, which begins when somebody kills the owner and ends with the first record of the next owner, tell about the
// outage and not about the path: the percentiles leave them out, Longest does not. A record that is there before its
// commit was acknowledged took no time. All methods may be called from any goroutine.
type Latency struct {
	mu      sync.Mutex
	h       *hdrhistogram.Histogram // microseconds
	longest time.Duration
	left    int

	out    bool
	keep   bool      // its events count all the same
	from   time.Time // the kill
	next   time.Time // when the next owner acquired; zero while there is none
	first  time.Time // first record seen at or after next
	during []sample  // all since the kill, undecided
}

type sample struct{ committed, seen time.Time }

// NewLatency makes an empty Latency.
func NewLatency() *Latency {
	return &Latency{h: hdrhistogram.New(1, longest.Microseconds(), 3)}
}

// Add takes one event. Call it once both times are known.
func (l *Latency) Add(committed, seen time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.longest = max(l.longest, seen.Sub(committed))
	if !l.out {
		l.record(sample{committed, seen})
		return
	}
	l.during = append(l.during, sample{committed, seen})
	l.resolve()
}

// Outage says that the owner was made to end at from; with leaveOut the percentiles are not to know of it. An outage that
// is under way goes on.
func (l *Latency) Outage(from time.Time, leaveOut bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.out {
		l.next, l.keep = time.Time{}, l.keep && !leaveOut
		return
	}
	l.out, l.keep, l.from, l.next = true, !leaveOut, from, time.Time{}
}

// Acquired says when the next owner got the lease; the outage ends with the first record seen from then on.
func (l *Latency) Acquired(at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.out && l.next.IsZero() {
		l.next = at
		l.resolve()
	}
}

// Outside reports whether no outage is under way, and when the last one ended: the time of its first record.
func (l *Latency) Outside() (firstRecord time.Time, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.first, !l.out
}

// resolve ends the outage if its first record is there.
func (l *Latency) resolve() {
	if l.next.IsZero() {
		return
	}
	var first time.Time
	for _, s := range l.during {
		if !s.seen.Before(l.next) && (first.IsZero() || s.seen.Before(first)) {
			first = s.seen
		}
	}
	if first.IsZero() {
		return
	}
	for _, s := range l.during {
		l.judge(s, first)
	}
	l.out, l.first, l.during = false, first, nil
}

func (l *Latency) judge(s sample, first time.Time) {
	if !l.keep && s.committed.After(l.from) && s.committed.Before(first) {
		l.left++
		return
	}
	l.record(s)
}

func (l *Latency) record(s sample) {
	if !l.keep && s.committed.After(l.from) && s.committed.Before(l.first) {
		l.left++ // of the last outage, and seen after its first record
		return
	}
	d := min(max(s.seen.Sub(s.committed), 0), longest)
	_ = l.h.RecordValue(d.Microseconds()) // within the bounds
}

// Figures are milliseconds, rounded to the microsecond. 0 events measured gives 0.
type Figures struct {
	P50, P99, Max float64 // Max is over all events, also those of outages
	Measured      int     // events in the percentiles
	LeftOut       int     // events of outages
}

// Figures are those of all events so far; those of an outage under way are left out.
func (l *Latency) Figures() Figures {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := Figures{Max: ms(l.longest), Measured: int(l.h.TotalCount()), LeftOut: l.left + len(l.during)}
	if f.Measured > 0 {
		f.P50 = ms(time.Duration(l.h.ValueAtQuantile(50)) * time.Microsecond)
		f.P99 = ms(time.Duration(l.h.ValueAtQuantile(99)) * time.Microsecond)
	}
	return f
}

func ms(d time.Duration) float64 { return math.Round(float64(d)/float64(time.Microsecond)) / 1000 }
