package demo

import (
	"fmt"
	"strconv"
	"time"
)

// thousands writes 18402 as 18,402.
func thousands(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// seconds writes a wait for people.
func seconds(d time.Duration) string {
	if d < 100*time.Millisecond {
		return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}

// clip cuts text to width columns; 0 is no limit. It counts runes, which is right for what this package prints.
func clip(text string, width int) string {
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
