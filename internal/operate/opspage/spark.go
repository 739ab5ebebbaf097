package opspage

import (
	"fmt"
	"math"
	"slices"

	"github.com/outrelay/outrelay/internal/relay/activity"
)

// spark is a small chart of bars, oldest first.
type spark struct {
	Width int
	Bars  []sparkBar
	Under []sparkBar // of greater values, with a weaker color
	Text  string     // the chart in words
}

// sparkBar is a bar in a chart of height 20.
type sparkBar struct{ X, Y, Height int }

// newSpark returns the chart of the records in each of the latest three minutes, or nil if there was none.
func newSpark(records []int32) *spark {
	most, total := int32(0), int64(0)
	for _, n := range records {
		most = max(most, n)
		total += int64(n)
	}
	if most == 0 {
		return nil
	}
	return &spark{
		Width: sparkStep * len(records), Bars: newSparkBars(records, most),
		Text: fmt.Sprintf("%s in the last %d minutes", countNoun(total, "record"), len(records)*activity.RecentMinutes),
	}
}

// newLatencySpark returns the chart of the quantiles of the latency in each of the latest three minutes, or nil if none was measured.
func newLatencySpark(p50, p99 []float64) *spark {
	if len(p99) == 0 || slices.Max(p99) == 0 {
		return nil
	}
	most := slices.Max(p99)
	return &spark{
		Width: sparkStep * len(p99), Bars: newSparkBars(p50, most), Under: newSparkBars(p99, most),
		Text: fmt.Sprintf("p50 at most %s and p99 at most %s in a minute of the last %d", formatMillis(slices.Max(append([]float64{0}, p50...))), formatMillis(most), len(p99)*activity.RecentMinutes),
	}
}

// sparkStep is the width of a part in a chart.
const sparkStep = 5

// newSparkBars returns a bar for each value above zero. most has the whole height.
func newSparkBars[T int32 | float64](values []T, most T) (bars []sparkBar) {
	const height = 20
	for i, value := range values {
		if value > 0 {
			// A small value is still visible.
			bar := max(int(math.Round(height*float64(value)/float64(most))), 1)
			bars = append(bars, sparkBar{sparkStep * i, height - bar, bar})
		}
	}
	return bars
}
