package check

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Report contains the counts of a Checker at one moment.
type Report struct {
	Committed int // events whose commit was acknowledged
	Delivered int // events of Committed that were delivered to all topics
	Aborted   int // events of transactions that were rolled back
	Unknown   int // events for which it is unknown whether they are committed
	Excused   int // acknowledged events that need not be delivered and were not; not included in Committed
	Records   int // all records
	Flagged   int // records with the redelivered header
	Repeated  int // records of Flagged for an event that its topic had already; Duplicates counts the others

	Waiting    int       // events of Committed that are not delivered to all topics yet
	Oldest     time.Time // commit of the oldest event of Waiting; zero if there is none
	Overtaken  int       // events of Waiting that a later event of their key has overtaken: lost, or out of order soon
	Duplicates int       // records of an event that its topic had already
	OutOfOrder int       // first records that came after one of a later event of their key
	Phantoms   int       // records without an event, of aborted events, or in a topic where they do not belong
	Strayed    int       // records of a key in another partition than the previous record of the key
	Altered    int       // records whose key or value differs from the event
	Foreign    int       // records of events that were never begun, with Options.Others

	Examples []string // the first violations in words, without keys and values
}

// Report returns the current counts. It reads each event that is not delivered yet.
func (c *Checker) Report() Report {
	c.mu.Lock()
	defer c.mu.Unlock()

	report := c.report
	report.Examples = append([]string(nil), c.report.Examples...)
	// Only a committed event can wait: the outcome of the others is open.
	for _, e := range c.open {
		if e.state != committed {
			continue
		}

		report.Waiting++
		if report.Oldest.IsZero() || e.committedAt.Before(report.Oldest) {
			report.Oldest = e.committedAt
		}
		if c.isOvertakenLocked(e) {
			report.Overtaken++
		}
	}
	return report
}

// Progress returns the numbers of committed and of delivered events. Its cost does not depend on
// the number of waiting events.
func (c *Checker) Progress() (committed, delivered int) {
	c.mu.Lock()
	defer c.mu.Unlock()

	return c.report.Committed, c.report.Delivered
}

// isOvertakenLocked reports whether a later event of the key was delivered to a topic of event.
func (c *Checker) isOvertakenLocked(event *event) bool {
	if event.topics == nil {
		// The map is small: it has one entry per key and topic.
		for t, order := range c.keyOrders {
			if t.key == event.key && order.last > event.number {
				return true
			}
		}
		return false
	}

	for _, topic := range event.topics {
		if order := c.keyOrders[target{topic, event.key}]; order != nil && order.last > event.number {
			return true
		}
	}
	return false
}

// Missing is a topic that a committed event has not reached.
type Missing struct {
	ID, Key string
	Topic   string // "" if the event may be delivered to any single topic
}

// Missing returns what committed events wait for, sorted by id and topic.
func (c *Checker) Missing() []Missing {
	c.mu.Lock()
	defer c.mu.Unlock()

	var out []Missing
	for _, e := range c.open {
		if e.state != committed {
			continue
		}
		// Without a list of topics, one record in any topic is enough.
		if e.topics == nil {
			out = append(out, Missing{e.id, e.key, ""})
		}
		for _, topic := range e.topics {
			if !slices.Contains(e.seenTopics, topic) {
				out = append(out, Missing{e.id, e.key, topic})
			}
		}
	}
	slices.SortFunc(out, func(a, b Missing) int { return cmp.Or(cmp.Compare(a.ID, b.ID), cmp.Compare(a.Topic, b.Topic)) })
	return out
}

// Err returns nil if no event is lost and no other promise was broken. It counts waiting events as
// lost, so it is for the end of a run.
func (r Report) Err() error {
	var broken []string
	for _, x := range []struct {
		n    int
		what string
	}{
		{r.Waiting, "lost"},
		{r.Duplicates, "duplicate"},
		{r.OutOfOrder, "out of order"},
		{r.Phantoms, "phantom"},
		{r.Strayed, "in another partition"},
		{r.Altered, "altered"},
	} {
		if x.n > 0 {
			broken = append(broken, fmt.Sprintf("%d %s", x.n, x.what))
		}
	}

	if broken == nil {
		return nil
	}
	return fmt.Errorf("of %d committed events: %s", r.Committed, strings.Join(append(broken, r.Examples...), "; "))
}
