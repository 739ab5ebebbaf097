package config

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Size is a number of bytes.
type Size int64

// The units of sizes.
const (
	KiB Size = 1 << 10
	MiB Size = 1 << 20
	GiB Size = 1 << 30
)

var units = []struct {
	name string
	size Size
}{{"GiB", GiB}, {"MiB", MiB}, {"KiB", KiB}, {"GB", 1e9}, {"MB", 1e6}, {"kB", 1e3}, {"KB", 1e3}, {"B", 1}}

// parseSize parses a size: 900KiB, 32MiB, 1.5GiB, 10MB, or a plain number of bytes.
func parseSize(text string) (Size, error) {
	number, unit := strings.TrimSpace(text), Size(1)
	for _, u := range units {
		if rest, ok := strings.CutSuffix(number, u.name); ok {
			number, unit = strings.TrimSpace(rest), u.size
			break
		}
	}

	factor, err := strconv.ParseFloat(number, 64)
	if err != nil || factor < 0 || factor*float64(unit) >= math.MaxInt64 || math.IsNaN(factor) {
		return 0, fmt.Errorf("%q is not a size such as 900KiB or 32MiB", text)
	}
	return Size(factor * float64(unit)), nil
}

// String returns the size in the largest unit that divides it.
func (s Size) String() string {
	for _, u := range units[:3] {
		if s >= u.size && s%u.size == 0 {
			return strconv.FormatInt(int64(s/u.size), 10) + u.name
		}
	}
	return strconv.FormatInt(int64(s), 10)
}

// MarshalText implements [encoding.TextMarshaler]; YAML uses it too.
func (s Size) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

var daysPattern = regexp.MustCompile(`^(\d+)d(.*)$`)

// ParseDuration parses a duration in the format of [time.ParseDuration], with optional days before it:
// 250ms, 5s, 24h, 7d, 1d12h. It rejects negative durations.
func ParseDuration(text string) (time.Duration, error) {
	errInvalid := fmt.Errorf("%q is not a duration such as 250ms, 5s, 24h or 7d", text)

	rest, days := text, time.Duration(0)
	if match := daysPattern.FindStringSubmatch(text); match != nil {
		n, err := strconv.Atoi(match[1])
		if err != nil || n > 36500 {
			return 0, errInvalid
		}
		days, rest = time.Duration(n)*24*time.Hour, match[2]
		if rest == "" {
			return days, nil
		}
	}

	duration, err := time.ParseDuration(rest)
	if err != nil || duration < 0 || days+duration < days {
		return 0, errInvalid
	}
	return days + duration, nil
}

// Start is where a watcher without a position begins. The zero value is backlog.
type Start struct {
	Now bool      // skip the events in the outbox
	At  time.Time // deliver the events committed since then; zero if unused
}

// parseStart parses backlog, now, or a time in the format of RFC 3339.
func parseStart(text string) (Start, error) {
	switch text {
	case "backlog":
		return Start{}, nil
	case "now":
		return Start{Now: true}, nil
	}

	for _, layout := range []string{time.RFC3339Nano, "2006-01-02T15:04Z07:00", time.DateOnly} {
		if at, err := time.Parse(layout, text); err == nil {
			return Start{At: at.UTC()}, nil
		}
	}
	return Start{}, fmt.Errorf("%q is neither backlog, now nor a time such as 2026-11-20T08:00:00Z", text)
}

// String returns the text that ParseStart parses.
func (s Start) String() string {
	switch {
	case s.Now:
		return "now"
	case !s.At.IsZero():
		return s.At.Format(time.RFC3339Nano)
	}
	return "backlog"
}

// MarshalText implements [encoding.TextMarshaler]; YAML uses it too.
func (s Start) MarshalText() ([]byte, error) { return []byte(s.String()), nil }
