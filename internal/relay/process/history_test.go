package process

import (
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

// A sample has the rate of its minute and the greatest lag. A term that ends takes its minute with it.
func TestAMinuteOfASlot(t *testing.T) {
	t.Parallel()
	m := minutes{}
	began := time.Now()
	observe := func(second int, current map[string]slotFigures) map[string]nodes.Sample {
		return m.observe(began.Add(time.Duration(second)*time.Second), current)
	}
	one := func(acked int64, lag time.Duration) map[string]slotFigures {
		return map[string]slotFigures{"a/0of1": {acked: acked, lag: lag, p50MS: 2, p99MS: 8}}
	}

	if got := observe(0, one(100, 0)); got != nil {
		t.Errorf("at once: %v", got)
	}
	if got := observe(30, one(400, 9*time.Second)); got != nil {
		t.Errorf("after half a minute: %v", got)
	}
	got := observe(60, one(700, time.Second))
	if want := (nodes.Sample{At: began, Rate: 10, LagS: 9, P50MS: 2, P99MS: 8}); got["a/0of1"] != want {
		t.Errorf("got %+v, want %+v", got, want)
	}

	// The next term counts from 0, and its first minute begins with it.
	if got := observe(90, one(5, 0)); got != nil {
		t.Errorf("a new term: %v", got)
	}
	if got := observe(120, one(5, 0)); got != nil {
		t.Errorf("after half a minute of the new term: %v", got)
	}
	if got := observe(150, one(65, 0)); got["a/0of1"].Rate != 1 {
		t.Errorf("the minute of the new term: %v", got)
	}

	observe(160, nil)
	if len(m) != 0 {
		t.Errorf("a slot that is not owned: %v", m)
	}
}
