package demo

import (
	"errors"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/lab/demo/check"
)

// Result contains the figures of a run. Its JSON is the output of `outrelay dev --json`.
type Result struct {
	Events     int     `json:"events"`       // committed
	Delivered  int     `json:"delivered"`    // committed events that the consumer received
	Lost       int     `json:"lost"`         // committed events that it did not receive
	Duplicates int     `json:"duplicates"`   // records of an event that was received before
	OutOfOrder int     `json:"out_of_order"` // first records after a later event of their key, or in another partition
	Takeovers  int     `json:"takeovers"`    // changes of the owner after the first owner
	MaxGapMS   float64 `json:"max_gap_ms"`   // longest wait of a committed event
	P50MS      float64 `json:"p50_ms"`       // from the acknowledged commit to the record at the consumer, without outages
	P99MS      float64 `json:"p99_ms"`

	// Broken describes the broken promises. It is nil if every promise was kept.
	Broken error `json:"-"`
}

// Err returns nil if every promise was kept.
func (r Result) Err() error { return r.Broken }

// newResult returns the result of a run. Only a service that is idle may append nothing.
func newResult(report check.Report, figures check.Figures, takeovers int, idle bool) Result {
	result := Result{
		Events:     report.Committed,
		Delivered:  report.Delivered,
		Lost:       report.Waiting,
		Duplicates: report.Duplicates,
		OutOfOrder: report.OutOfOrder + report.Strayed,
		Takeovers:  takeovers,
		MaxGapMS:   figures.Max,
		P50MS:      figures.P50,
		P99MS:      figures.P99,
		Broken:     report.Err(),
	}

	// A demo without a load has nothing to commit.
	if report.Committed == 0 && !idle {
		result.Broken = errors.Join(result.Broken, errors.New("no event was committed"))
	}
	return result
}

// formatSummary returns the last line of a run.
func (r Result) formatSummary() string {
	longest := time.Duration(r.MaxGapMS * float64(time.Millisecond))
	return fmt.Sprintf("%s events committed, %s delivered · lost %d · duplicate %d · out of order %d"+
		" · %d takeovers · longest wait %s · p50 %.1f ms p99 %.1f ms",
		formatThousands(r.Events), formatThousands(r.Delivered), r.Lost, r.Duplicates, r.OutOfOrder,
		r.Takeovers, formatDuration(longest), r.P50MS, r.P99MS)
}
