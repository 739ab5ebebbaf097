package demo

import (
	"errors"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/demo/check"
)

// Result is what a run found. Its names are those of `outrelay dev --json`.
type Result struct {
	Events     int     `json:"events"`       // committed
	Delivered  int     `json:"delivered"`    // of those, seen by the consumer
	Lost       int     `json:"lost"`         // of those, not seen
	Duplicates int     `json:"duplicates"`   // records of an event that was seen before
	OutOfOrder int     `json:"out_of_order"` // first records behind one of a later event of their key, or in another partition
	Takeovers  int     `json:"takeovers"`    // changes of the owner after the first
	MaxGapMS   float64 `json:"max_gap_ms"`   // longest wait of a committed event
	P50MS      float64 `json:"p50_ms"`       // commit acknowledged to record at the consumer, without the outages
	P99MS      float64 `json:"p99_ms"`

	// Broken is what else was wrong, for people; nil if every promise was kept.
	Broken error `json:"-"`
}

// Err is nil if the run shows what it should.
func (r Result) Err() error { return r.Broken }

func newResult(c check.Report, f check.Figures, takeovers int) Result {
	r := Result{
		Events: c.Committed, Delivered: c.Delivered, Lost: c.Waiting, Duplicates: c.Duplicates, OutOfOrder: c.OutOfOrder + c.Strayed,
		Takeovers: takeovers, MaxGapMS: f.Max, P50MS: f.P50, P99MS: f.P99, Broken: c.Err(),
	}
	if c.Committed == 0 {
		r.Broken = errors.Join(r.Broken, errors.New("not one event was committed"))
	}
	return r
}

// summary is the last line of a run.
func (r Result) summary() string {
	return fmt.Sprintf("%s events committed, %s delivered · lost %d · duplicate %d · out of order %d · %d take-overs · longest wait %s · p50 %.1f ms p99 %.1f ms",
		thousands(r.Events), thousands(r.Delivered), r.Lost, r.Duplicates, r.OutOfOrder, r.Takeovers,
		seconds(time.Duration(r.MaxGapMS*float64(time.Millisecond))), r.P50MS, r.P99MS)
}
