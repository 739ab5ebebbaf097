package check

import (
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func at0(d time.Duration) time.Time { return t0.Add(d) }

// The percentiles equal the percentiles of the sorted list, within the three digits of the histogram.
func TestPercentiles(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		us := rapid.SliceOfN(rapid.IntRange(1, 5_000_000), 1, 300).Draw(t, "us")

		l := NewLatency()
		for _, u := range us {
			l.Add(t0, at0(time.Duration(u)*time.Microsecond))
		}

		slices.Sort(us)
		rank := func(q float64) float64 { return float64(us[int(math.Ceil(q*float64(len(us))))-1]) / 1000 }
		f := l.Figures()

		for _, x := range []struct{ got, want float64 }{{f.P50, rank(.5)}, {f.P99, rank(.99)}} {
			if math.Abs(x.got-x.want) > x.want/500+0.002 {
				t.Fatalf("got %v, want %v of %v", x.got, x.want, us)
			}
		}

		if f.Max != float64(us[len(us)-1])/1000 || f.Measured != len(us) {
			t.Fatalf("%+v of %v", f, us)
		}
	})
}

func TestOutageIsLeftOutOfThePercentiles(t *testing.T) {
	t.Parallel()
	l := NewLatency()
	for i := range 100 {
		l.Add(at0(time.Duration(i)*time.Millisecond), at0(time.Duration(i+1)*time.Millisecond))
	}

	l.Outage(at0(200*time.Millisecond), OmitSamples)
	// The event was committed before the kill, and has a latency of 2 ms.
	l.Add(at0(199*time.Millisecond), at0(201*time.Millisecond))
	if _, over := l.Outside(); over {
		t.Error("a record of the killed owner ended the outage")
	}

	l.Add(at0(300*time.Millisecond), at0(2400*time.Millisecond))
	l.Add(at0(2300*time.Millisecond), at0(2401*time.Millisecond))
	// The time of the takeover arrives after the first record.
	l.Acquired(at0(2250 * time.Millisecond))
	l.Add(at0(400*time.Millisecond), at0(2403*time.Millisecond))
	l.Add(at0(2410*time.Millisecond), at0(2411*time.Millisecond))
	first, over := l.Outside()
	if !over || !first.Equal(at0(2400*time.Millisecond)) {
		t.Errorf("ended %v at %v", over, first)
	}

	f := l.Figures()
	if f.Max != 2100 || f.Measured != 102 || f.LeftOut != 3 || f.P99 < 1 || f.P99 > 2.01 {
		t.Errorf("%+v", f)
	}
}

func TestTwoKillsAreOneOutage(t *testing.T) {
	t.Parallel()
	l := NewLatency()
	l.Outage(t0, OmitSamples)
	l.Acquired(at0(time.Second))
	l.Outage(at0(1100*time.Millisecond), OmitSamples) // before it delivered anything
	l.Add(at0(500*time.Millisecond), at0(1050*time.Millisecond))
	if _, over := l.Outside(); over {
		t.Error("over without an owner")
	}

	l.Acquired(at0(3 * time.Second))
	l.Add(at0(600*time.Millisecond), at0(3200*time.Millisecond))
	if first, over := l.Outside(); !over || !first.Equal(at0(3200*time.Millisecond)) {
		t.Errorf("%v %v", first, over)
	}
	if f := l.Figures(); f.Measured != 0 || f.LeftOut != 2 || f.Max != 2600 || f.P50 != 0 {
		t.Errorf("%+v", f)
	}
}

func TestARecordBeforeItsAcknowledgementTookNoTime(t *testing.T) {
	t.Parallel()
	l := NewLatency()
	c := New(Options{Latency: l})

	// The record is seen before the acknowledgement.
	c.Begin(Event{ID: "1", Key: "k"})
	c.Delivered(Delivery{ID: "1", Key: "k", Topic: "t", Seen: t0})
	c.Committed(at0(time.Millisecond), "1")

	// Only the first of two records counts.
	c.Begin(Event{ID: "2", Key: "k"})
	c.Committed(t0, "2")
	c.Delivered(Delivery{ID: "2", Key: "k", Topic: "t", Seen: at0(time.Second)})
	c.Delivered(Delivery{ID: "2", Key: "k", Topic: "t", Seen: at0(time.Hour)})

	if f := l.Figures(); f.Measured != 2 || f.P50 > 0.001 || f.Max != 1000 {
		t.Errorf("%+v", f)
	}
}

func TestHandoverCounts(t *testing.T) {
	t.Parallel()
	l := NewLatency()
	l.Outage(t0, KeepSamples)
	l.Add(at0(time.Millisecond), at0(101*time.Millisecond))
	l.Acquired(at0(90 * time.Millisecond))
	l.Add(at0(50*time.Millisecond), at0(150*time.Millisecond))
	first, over := l.Outside()
	if f := l.Figures(); !over || !first.Equal(at0(101*time.Millisecond)) || f.Measured != 2 || f.LeftOut != 0 {
		t.Errorf("%v %v %+v", first, over, f)
	}
}
