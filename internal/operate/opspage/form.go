package opspage

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// value returns a value of the query or form without surrounding blanks.
func (c *call) value(name string) string { return strings.TrimSpace(c.q.Get(name)) }

// isSet reports whether a value is not empty, such as that of a ticked box.
func (c *call) isSet(name string) bool { return c.value(name) != "" }

// pageLimit returns the requested number of entries of a list, or 0 for the default of the list.
func (c *call) pageLimit() int {
	n, err := strconv.Atoi(c.value("limit"))
	if err != nil || n < 1 {
		return 0
	}
	return n
}

func invalidInput(format string, args ...any) error {
	return &admin.InvalidError{Reason: fmt.Sprintf(format, args...)}
}

// timeLayouts are the formats of times that browsers send and that people type. A time without a
// zone is UTC.
var timeLayouts = []string{
	time.RFC3339, "2006-01-02T15:04", "2006-01-02T15:04:05", "2006-01-02 15:04", time.DateTime, time.DateOnly,
}

// parseTime returns the zero time if the value is empty.
func (c *call) parseTime(name string) (time.Time, error) {
	text := c.value(name)
	if text == "" {
		return time.Time{}, nil
	}

	if moment, ok := parseInstant(text); ok {
		return moment, nil
	}
	return time.Time{}, invalidInput("%s: %q is not a time such as 2026-11-20 08:00 (UTC) or 2026-11-20T08:00:00+01:00", name, text)
}

// parseWindow returns the start and the end of the window. The duration since sets the start relative to now.
func (c *call) parseWindow() (start, end time.Time, err error) {
	start, fromErr := c.parseTime("from")
	end, toErr := c.parseTime("to")
	since, sinceErr := c.parseDuration("since", 0)
	if since > 0 && start.IsZero() {
		start = c.v.Now.Add(-since)
	}
	return start, end, errors.Join(fromErr, toErr, sinceErr)
}

// parseDuration parses a duration such as 90s, 2h or 7d.
func (c *call) parseDuration(name string, byDefault time.Duration) (time.Duration, error) {
	text := c.value(name)
	if text == "" {
		return byDefault, nil
	}

	if days, ok := strings.CutSuffix(text, "d"); ok {
		if n, err := strconv.Atoi(days); err == nil && n >= 0 && n < 36500 {
			return time.Duration(n) * 24 * time.Hour, nil
		}
	}
	duration, err := time.ParseDuration(text)
	if err != nil || duration < 0 {
		return 0, invalidInput("%s: %q is not a duration such as 90s, 2h or 7d", name, text)
	}
	return duration, nil
}

// splitWords splits text at blanks, commas and line ends. It returns nil without a word: an empty list would select nothing.
func splitWords(text string) (words []string) {
	isSeparator := func(char rune) bool { return strings.ContainsRune(", \n\r\t", char) }
	return slices.AppendSeq(words, strings.FieldsFuncSeq(text, isSeparator))
}

// splitLines splits text into lines without empty ones. Names may contain blanks.
func splitLines(text string) []string {
	var list []string
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" {
			list = append(list, line)
		}
	}
	return list
}

// parseScope returns the selection for an action: the selected entries of a list as ids, or all entries that match the filter. noun
// names the entries.
func (c *call) parseScope(noun string) (ids []string, all bool, err error) {
	if c.value("scope") == "all" {
		return nil, true, nil
	}
	if ids = c.q["pick"]; len(ids) == 0 {
		return nil, false, errNothingSelected(noun)
	}
	return ids, false, nil
}

func errNothingSelected(noun string) error {
	return invalidInput("no %s is selected; select some, or all that match", noun)
}

// parseDeadFilter returns the filter of the form of dead letters.
// inArchive is the choice of the field "requeued" that selects the letters in the archive.
const inArchive = "archived"

func (c *call) parseDeadFilter() (filter admin.DeadFilter, err error) {
	filter = admin.DeadFilter{
		Collection:    c.value("collection"),
		IDs:           splitLines(c.q.Get("id")),
		Topic:         c.value("topic"),
		Type:          c.value("type"),
		AggregateType: c.value("aggregate"),
		Key:           c.q.Get("key"),
		Class:         c.value("class"),
		Message:       c.q.Get("message"),
		Fingerprint:   c.value("fingerprint"),
		Source:        c.value("source"),
		Group:         c.value("group"),
		Handler:       c.value("handler"),
		RequeueStatus: c.value("requeued"),
	}

	switch filter.RequeueStatus {
	// The list starts with the letters that need somebody.
	case "":
		filter.RequeueStatus = "false"
	case inArchive:
		filter.RequeueStatus, filter.Archived = "any", true
	}

	filter.From, filter.To, err = c.parseWindow()
	return filter, err
}

// selectLetters returns the filter of the letters that an action applies to.
func (c *call) selectLetters() (admin.DeadFilter, error) {
	filter, err := c.parseDeadFilter()
	if err != nil {
		return filter, err
	}

	// The confirmed letters must not depend on the clock.
	if c.isSet("since") {
		c.q.Set("from", filter.From.UTC().Format(time.RFC3339))
		c.q.Del("since")
	}

	ids, all, err := c.parseScope("dead letter")
	if !all {
		filter.IDs = ids
	}
	filter.All = all
	return filter, err
}

func (c *call) parseScheduledFilter() (filter admin.ScheduledFilter, err error) {
	filter = admin.ScheduledFilter{
		Collection:    c.value("collection"),
		IDs:           splitLines(c.q.Get("id")),
		Type:          c.value("type"),
		AggregateType: c.value("aggregate"),
	}
	filter.From, filter.To, err = c.parseWindow()
	return filter, err
}

// selectScheduled returns the filter of the events that an action applies to.
func (c *call) selectScheduled() (admin.ScheduledFilter, error) {
	filter, err := c.parseScheduledFilter()
	if err != nil {
		return filter, err
	}
	ids, all, err := c.parseScope("event")
	if !all {
		filter.IDs = ids
	}
	filter.All = all
	return filter, err
}

func (c *call) waitingFilter() admin.WaitingFilter {
	return admin.WaitingFilter{
		Collection: c.value("collection"), Reason: c.value("reason"), Topic: c.value("topic"), Key: c.value("key"),
	}
}
