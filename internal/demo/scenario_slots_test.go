package demo

import (
	"testing"
	"time"
)

func TestDrainRate(t *testing.T) {
	t.Parallel()
	type look struct {
		after time.Duration
		acked float64
	}
	for name, c := range map[string]struct {
		looks []look
		want  float64
	}{
		"from the first tenth to the last": {[]look{{time.Second, 0}, {2 * time.Second, 200}, {3 * time.Second, 600}, {4 * time.Second, 950}}, 375},
		"gone before the second look":      {[]look{{100 * time.Millisecond, 1000}}, 10_000},
		"half gone at the first look":      {[]look{{time.Second, 600}, {2 * time.Second, 1000}}, 500},
		"nothing new between two looks":    {[]look{{time.Second, 200}, {2 * time.Second, 200}, {3 * time.Second, 1000}}, 400},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			start := time.Now()
			r := drainRate{size: 1000, from: start}
			for i, l := range c.looks {
				if done := r.look(l.acked, start.Add(l.after)); done != (i == len(c.looks)-1) {
					t.Errorf("look %d: done is %v", i, done)
				}
			}
			if got := r.eps(); got != c.want {
				t.Errorf("%v events a second, not %v", got, c.want)
			}
		})
	}
}
