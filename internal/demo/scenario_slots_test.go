package demo

import (
	"strings"
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
				if done := r.addSample(l.acked, start.Add(l.after)); done != (i == len(c.looks)-1) {
					t.Errorf("look %d: done is %v", i, done)
				}
			}
			if got := r.eventsPerSecond(); got != c.want {
				t.Errorf("%v events a second, not %v", got, c.want)
			}
		})
	}
}

func TestThroughLeadsNowhereElse(t *testing.T) {
	t.Parallel()
	for uri, want := range map[string]string{
		"mongodb://127.0.0.1:1/?replicaSet=rs0":          "mongodb://w:9/?directConnection=true",
		"mongodb://u:p@h:1/db?replicaSet=r&authSource=a": "mongodb://u:p@w:9/db?authSource=a&directConnection=true",
		"mongodb://h:1": "mongodb://w:9/?directConnection=true",
	} {
		if got, err := proxyURI(uri, "w:9"); err != nil || got != want {
			t.Errorf("%s by way of w:9 is %s, want %s: %v", uri, got, want, err)
		}
	}

	if _, err := proxyURI("mongodb://u:secret%zz@h", "w:9"); err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("no URL: %v", err)
	}
}
