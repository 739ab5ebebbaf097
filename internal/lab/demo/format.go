package demo

import (
	"fmt"
	"strconv"
	"time"
)

// formatThousands formats 18402 as 18,402.
func formatThousands(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// formatDuration formats d in milliseconds if it is short, and otherwise in seconds.
func formatDuration(d time.Duration) string {
	if d < 100*time.Millisecond {
		return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
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
