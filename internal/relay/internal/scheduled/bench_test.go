package scheduled

import (
	"slices"
	"testing"
	"time"

	"github.com/outrelay/outrelay/pkg/event"
)

// How fast many that are due at once go, with an outlet that acks at once: the rate of the claims and of the finishing
// writes together.
func BenchmarkScheduledDrain(b *testing.B) {
	for _, recording := range []string{"position", "delete"} {
		b.Run(recording, func(b *testing.B) {
			const n = 20_000
			for b.Loop() {
				b.StopTimer()
				p := newPlanned(b)
				p.schedule(n, -time.Second)
				b.StartTimer()

				begin := time.Now()
				x := p.takeOver(func(c *setUp) { c.ledger.Recording = recording })
				x.waitSettled(n)
				b.ReportMetric(n/time.Since(begin).Seconds(), "events/s")

				b.StopTimer()
				x.release()
				b.StartTimer()
			}
		})
	}
}

// How late envelopes are of which 10,000 are due in the same second, or at the same moment.
func BenchmarkScheduledDueError(b *testing.B) {
	b.Run("second", func(b *testing.B) { measureDueError(b, 100*time.Microsecond) })
	b.Run("moment", func(b *testing.B) { measureDueError(b, 0) })
}

func measureDueError(b *testing.B, step time.Duration) {
	const n = 10_000
	for b.Loop() {
		p := newPlanned(b)
		begin := time.Now().Add(20 * time.Second)
		for i := range n / 1000 {
			events := make([]event.Event, 1000)
			for j := range events {
				at := begin.Add(time.Duration(i*1000+j) * step)
				events[j] = event.New(event.Aggregate{Type: "order", ID: "o-1"}, "Due", event.Bytes("", []byte("p")), event.WithDueAt(at))
			}
			if err := p.box.Append(b.Context(), events...); err != nil {
				b.Fatal(err)
			}
		}
		if time.Until(begin) < 5*time.Second {
			b.Fatal("the machine is too slow: the events were not stored in time")
		}

		late := make([]time.Duration, 0, n)
		done := make(chan time.Duration, n)

		x := p.takeOver(func(c *setUp) { c.OnSent = func(d time.Duration) { done <- d } })
		x.waitSettled(n)
		x.release()
		for range n {
			late = append(late, <-done)
		}

		slices.Sort(late)
		b.ReportMetric(float64(late[n/2].Milliseconds()), "p50-ms")
		b.ReportMetric(float64(late[n*99/100].Milliseconds()), "p99-ms")
		b.ReportMetric(float64(late[n-1].Milliseconds()), "max-ms")
	}
}
