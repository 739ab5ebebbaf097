package check

import (
	"fmt"
	"strings"
	"time"
)

// Report is what a Checker knows at one moment.
type Report struct {
	Committed int // events whose commit was acknowledged
	Delivered int // of those, events that are in every topic they belong to
	Aborted   int // events of transactions that were rolled back
	Unknown   int // events whose commit nobody knows about
	Excused   int // events whose commit was acknowledged, that need not arrive and did not; not among Committed
	Records   int // records seen, of whatever kind
	Flagged   int // of those, records that say of themselves that they may repeat an earlier one
	Repeated  int // of those, records of an event that its topic had already; Duplicates are the others

	Waiting    int       // committed and not everywhere yet
	Oldest     time.Time // commit of the oldest of those; zero without one
	Overtaken  int       // of those, events that a later one of their key has overtaken: lost, or out of order soon
	Duplicates int       // records of an event that its topic had already
	OutOfOrder int       // first records that came after one of a later event of their key
	Phantoms   int       // records of nobody, of aborted events, or in a topic where they do not belong
	Strayed    int       // records of a key in another partition than the record of the key before
	Altered    int       // records with another key or value than the event

	Examples []string // the first violations in words, without keys and values
}

// Report says what is known now.
func (c *Checker) Report() Report {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.r
	r.Examples = append([]string(nil), c.r.Examples...)
	for _, e := range c.open {
		if e.state != committed {
			continue
		}
		r.Waiting++
		if r.Oldest.IsZero() || e.at.Before(r.Oldest) {
			r.Oldest = e.at
		}
		if c.overtaken(e) {
			r.Overtaken++
		}
	}
	return r
}

// Progress is the number of committed events and of those that are delivered; cheap, however many wait.
func (c *Checker) Progress() (committed, delivered int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.r.Committed, c.r.Delivered
}

func (c *Checker) overtaken(e *event) bool {
	if e.topics == nil {
		for t, l := range c.lines { // few: one for each key and topic
			if t.key == e.key && l.last > e.n {
				return true
			}
		}
		return false
	}
	for _, topic := range e.topics {
		if l := c.lines[target{topic, e.key}]; l != nil && l.last > e.n {
			return true
		}
	}
	return false
}

// Waits are the ids of up to max committed events that have not arrived, for a message; in no order.
func (c *Checker) Waits(max int) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var ids []string
	for id, e := range c.open {
		if e.state == committed && len(ids) < max {
			ids = append(ids, id)
		}
	}
	return ids
}

// Err is nil if nothing is missing and no promise was broken. It takes what waits as lost, so it is meant for the end.
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
