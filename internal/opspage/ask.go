package opspage

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/admin"
)

func (c *call) get(name string) string { return strings.TrimSpace(c.q.Get(name)) }

// limit is the size of a page of a list; 0 leaves it to the list.
func (c *call) limit() int {
	n, err := strconv.Atoi(c.get("limit"))
	if err != nil || n < 1 {
		return 0
	}
	return n
}

// formats of a time as a browser's field gives it, or as people type it. What names no zone is UTC.
var formats = []string{time.RFC3339, "2006-01-02T15:04", "2006-01-02T15:04:05", "2006-01-02 15:04", "2006-01-02 15:04:05", "2006-01-02"}

func (c *call) instant(name string) (time.Time, error) {
	text := c.get(name)
	if text == "" {
		return time.Time{}, nil
	}
	for _, f := range formats {
		if t, err := time.Parse(f, text); err == nil {
			return t, nil
		}
	}
	return time.Time{}, wrong("%s: %q is not a time such as 2026-11-20 08:00 (UTC) or 2026-11-20T08:00:00+01:00", name, text)
}

func wrong(format string, args ...any) error {
	return &admin.InvalidError{Reason: fmt.Sprintf(format, args...)}
}

// window is from, or since a while, to.
func (c *call) window() (from, to time.Time, err error) {
	from, err = c.instant("from")
	to, err2 := c.instant("to")
	since, err3 := c.span("since", 0)
	if since > 0 && from.IsZero() {
		from = c.v.Now.Add(-since)
	}
	return from, to, errors.Join(err, err2, err3)
}

// span is a duration such as 90s, 2h or 7d.
func (c *call) span(name string, without time.Duration) (time.Duration, error) {
	text := c.get(name)
	if text == "" {
		return without, nil
	}
	if days, ok := strings.CutSuffix(text, "d"); ok {
		if n, err := strconv.Atoi(days); err == nil && n >= 0 && n < 36500 {
			return time.Duration(n) * 24 * time.Hour, nil
		}
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return 0, wrong("%s: %q is not a duration such as 90s, 2h or 7d", name, text)
	}
	return d, nil
}

// words are what stands between blanks, commas and ends of lines.
func words(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' || r == '\n' || r == '\r' || r == '\t' })
}

// lines are what stands between ends of lines, for names that may hold blanks.
func lines(text string) []string {
	var out []string
	for l := range strings.Lines(text) {
		if l = strings.TrimSpace(l); l != "" {
			out = append(out, l)
		}
	}
	return out
}

// deadFilter is the filter that the form of the dead letters fills in.
func (c *call) deadFilter() (admin.DeadFilter, error) {
	f := admin.DeadFilter{
		Collection: c.get("collection"), IDs: lines(c.q.Get("id")), Topic: c.get("topic"), Type: c.get("type"),
		AggregateType: c.get("aggregate"), Key: c.q.Get("key"), Class: c.get("class"), Message: c.q.Get("message"),
		Source: c.get("source"), RequeueStatus: c.get("stand"),
	}
	if f.RequeueStatus == "" {
		f.RequeueStatus = "replayable"
	}
	var err error
	f.From, f.To, err = c.window()
	return f, err
}

// chosen is what an action on letters is for: those that were ticked, or all that the filter finds.
func (c *call) chosen() (admin.DeadFilter, error) {
	f, err := c.deadFilter()
	if err != nil {
		return f, err
	}
	if c.get("since") != "" { // what is confirmed must not move with the clock
		c.q.Set("from", f.From.UTC().Format(time.RFC3339))
		c.q.Del("since")
	}
	switch c.get("scope") {
	case "ticked":
		if f.IDs = c.q["pick"]; len(f.IDs) == 0 {
			return f, wrong("no letter is ticked; tick some, or choose all that match")
		}
	case "all":
		f.All = true
	default:
		return f, wrong("it is not said whether the ticked letters are meant or all that match")
	}
	return f, nil
}

func (c *call) scheduledFilter() (admin.ScheduledFilter, error) {
	f := admin.ScheduledFilter{Collection: c.get("collection"), IDs: lines(c.q.Get("id")), Type: c.get("type"), AggregateType: c.get("aggregate")}
	var err error
	if f.From, err = c.instant("from"); err != nil {
		return f, err
	}
	f.To, err = c.instant("to")
	return f, err
}
