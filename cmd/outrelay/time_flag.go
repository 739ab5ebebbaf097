package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
)

// timeValue is the value of a flag: a time, or a duration before or after now.
type timeValue struct {
	at    *time.Time
	parse func(text string, now time.Time) (time.Time, error)
}

// addTimeFlag adds a flag for a time. parse is a function of this file. "" is the zero time.
func addTimeFlag(
	cmd *cobra.Command, value *time.Time, name, usage string, parse func(text string, now time.Time) (time.Time, error),
) {
	cmd.Flags().Var(timeValue{value, parse}, name, usage)
}

func (v timeValue) String() string {
	// The library calls it for the zero value too.
	if v.at == nil || v.at.IsZero() {
		return ""
	}
	return v.at.Format(time.RFC3339)
}

func (v timeValue) Set(text string) (err error) {
	*v.at, err = v.parse(text, time.Now())
	return err
}

func (v timeValue) Type() string { return "time" }

// zonedLayouts are the time formats that include a time zone.
var zonedLayouts = []string{time.RFC3339Nano, "2006-01-02T15:04Z07:00"}

// parsePastTime parses a time, or a duration such as 2h before now. A time without a zone is in UTC.
func parsePastTime(text string, now time.Time) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	if ago, err := time.ParseDuration(text); err == nil && ago >= 0 {
		return now.Add(-ago), nil
	}

	for _, layout := range append(zonedLayouts, "2006-01-02T15:04:05", "2006-01-02T15:04", time.DateOnly) {
		if at, err := time.Parse(layout, text); err == nil {
			return at, nil
		}
	}
	return time.Time{}, errors.New("expected a time such as 2026-11-20T08:00:00Z, or a duration such as 2h")
}

// parseZonedPastTime is parsePastTime for an action that depends on the time: it rejects a time without a zone.
func parseZonedPastTime(text string, now time.Time) (time.Time, error) {
	at, err := parsePastTime(text, now)
	if err != nil || text == "" {
		return at, err
	}
	if _, err := time.ParseDuration(text); err == nil {
		return at, nil
	}

	for _, layout := range zonedLayouts {
		if at, err := time.Parse(layout, text); err == nil {
			return at, nil
		}
	}
	return time.Time{}, fmt.Errorf("it has no time zone: write %s for UTC, or a duration such as 2h", at.Format(time.RFC3339))
}

// parseFutureTime parses a time, or a duration such as 2h from now. A time without a zone is in UTC.
func parseFutureTime(text string, now time.Time) (time.Time, error) {
	if wait, err := time.ParseDuration(text); err == nil {
		return now.Add(wait), nil
	}
	return parsePastTime(text, now)
}
