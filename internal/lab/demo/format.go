package demo

import (
	"fmt"
	"strconv"
	"time"
)

// formatThousands formats 18402 as 18,402.
func formatThousands(n int) string {
	text := strconv.Itoa(n)
	for i := len(text) - 3; i > 0 && text[i-1] != '-'; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

// formatDuration formats duration in milliseconds if it is short, and otherwise in seconds.
func formatDuration(duration time.Duration) string {
	if duration < 100*time.Millisecond {
		return fmt.Sprintf("%.1f ms", float64(duration)/float64(time.Millisecond))
	}
	return fmt.Sprintf("%.1f s", duration.Seconds())
}

// truncateText shortens text to width columns. A width of 0 or less means no limit. It counts
// runes, which equals columns for the texts of this package.
func truncateText(text string, width int) string {
	if width <= 0 {
		return text
	}

	n := 0
	for i := range text {
		if n == width {
			return text[:i]
		}
		n++
	}
	return text
}
