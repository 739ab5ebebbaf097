package admin

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// Overview is what an operator sees first.
type Overview struct {
	At        time.Time      `json:"at"`         // of the watchers and nodes, by this process's clock
	CountedAt time.Time      `json:"counted_at"` // of the counts
	Watcher   string         `json:"watcher"`    // whose counts they are
	Watchers  []Watcher      `json:"watchers"`   // every slot of every watcher of the state database
	Nodes     []Node         `json:"nodes"`
	Counts    Counts         `json:"counts"`
	Pending   []PendingTopic `json:"pending"`  // what waits, by topic, the oldest first
	OldestS   float64        `json:"oldest_s"` // age of the oldest envelope of the watcher that is not settled
	RateS     float64        `json:"rate"`     // acked records per second of the watcher's slots together
	Checks    []Check        `json:"checks"`
}

// Counts are numbers of documents in the watcher's collections, and in the databases that hold them.
type Counts struct {
	Envelopes    int64 `json:"envelopes"`    // in the outboxes, delivered ones that are kept too; from the collections' metadata
	Pending      int64 `json:"pending"`      // written behind the watcher's position, on their way; up to 10,000 of a collection
	PendingMore  bool  `json:"pending_more"` // that is the most for one of them: there may be more
	Retry        int64 `json:"retry"`
	Blocked      int64 `json:"blocked"`
	Parked       int64 `json:"parked"`
	BlockedKeys  int64 `json:"blocked_keys"` // ordering keys that have any of these, counted for each topic
	Scheduled    int64 `json:"scheduled"`
	Dead         int64 `json:"dead"`          // letters that nobody requeued
	DeadAll      int64 `json:"dead_all"`      // and those that were
	InboxHandled int64 `json:"inbox_handled"` // markers, from the collections' metadata
	InboxClaimed int64 `json:"inbox_claimed"`
	Sagas        int64 `json:"sagas"`
}

// Waiting is what is neither delivered nor on its way nor scheduled.
func (c Counts) Waiting() int64 { return c.Retry + c.Blocked + c.Parked }

// Check is one named verdict.
type Check struct {
	ID     string `json:"id"`
	Status string `json:"status"` // ok, warn or fail
	Detail string `json:"detail"`
	Fix    string `json:"fix,omitempty"` // what to do about it
}

// The statuses of a check.
const (
	CheckOK   = "ok"
	CheckWarn = "warn"
	CheckFail = "fail"
)

// Overview reads watchers and nodes, two small queries, and takes everything that has to be counted from the figures, which
// [Deployment.Run] keeps about two seconds old while somebody looks. Its cost does not depend on what the outbox holds.
func (k Desk) Overview(ctx context.Context) (Overview, error) {
	status, err := ReadStatus(ctx, k.State)
	if err != nil {
		return Overview{}, err
	}
	nodes, err := k.nodes(ctx, status)
	if err != nil {
		return Overview{}, err
	}
	o := Overview{At: time.Now().UTC(), Watcher: k.Watcher, Watchers: status.Watchers, Nodes: nodes, Pending: []PendingTopic{}}
	var f figures
	if slices.ContainsFunc(status.Watchers, func(w Watcher) bool { return w.Name == k.Watcher }) {
		if f, err = k.d.figures.get(ctx, k); err != nil {
			return Overview{}, err
		}
	}
	o.CountedAt, o.Counts, o.Pending = f.at, f.counts, withTargets(f.pending, status, k.Watcher)
	for i := range o.Watchers {
		w := &o.Watchers[i]
		if f.oldest.IsZero() || w.PositionAt == nil {
			continue
		}
		left := max(w.PositionAt.Sub(f.oldest).Seconds(), 0)
		w.OplogHeadroomS = &left
	}
	for _, w := range status.Watchers {
		if w.Name == k.Watcher {
			o.OldestS, o.RateS = max(o.OldestS, w.LagS), o.RateS+w.Rate
		}
	}
	for _, p := range o.Pending {
		o.OldestS = max(o.OldestS, p.OldestAgeS)
	}
	o.Checks = slices.Concat(slotChecks(o.Watchers, f), nodeChecks(nodes), f.checks)
	return o, nil
}

// Health is the checks of the overview.
func (k Desk) Health(ctx context.Context) ([]Check, error) {
	o, err := k.Overview(ctx)
	return o.Checks, err
}

// behind is the lag above which a slot is said to be behind.
const behind = 10.0

// slotChecks judges each slot by what its owner last wrote.
func slotChecks(list []Watcher, f figures) []Check {
	out := []Check{}
	for i := range list {
		w := &list[i]
		c := Check{ID: "slot " + w.Name + "/" + w.Slot, Status: CheckOK, Detail: fmt.Sprintf("%s on %s, epoch %d, lag %.1f s", w.State, w.Node, w.Epoch, w.LagS)}
		switch {
		case w.Paused:
			c.Status, c.Detail, c.Fix = CheckWarn, "an operator paused it", "outrelay resume"
			if w.Slot != "0of1" { // what resumes all slots would end pauses that somebody else may want
				c.Fix += " --slot " + w.Slot
			}
		case w.State == "no-owner":
			c.Status, c.Detail, c.Fix = CheckFail, "no process runs it", "start outrelay run"
		case w.State == "halted", w.State == "config_error":
			c.Status, c.Detail, c.Fix = CheckFail, w.State+": "+w.Reason, "mend what it names; outrelay doctor says more"
		case w.State == "blocked", len(w.Blocked) > 0:
			c.Status, c.Fix = CheckWarn, "make the topic writable; what waits for it goes on by itself"
			if c.Detail = w.Reason; len(w.Blocked) > 0 {
				c.Detail = fmt.Sprintf("topic %s: %s; %d wait", w.Blocked[0].Topic, w.Blocked[0].Reason, w.Blocked[0].Count)
			}
		case w.Gap != "":
			c.Status, c.Detail = CheckWarn, "a gap in the stream is being swept: "+w.Gap
		case w.LagS > behind:
			c.Status, c.Detail, c.Fix = CheckWarn, fmt.Sprintf("the oldest envelope that is not settled is %.0f s old", w.LagS), "outrelay status says where it waits"
		}
		out = append(out, c)
		if window := f.newest.Sub(f.oldest).Seconds(); w.OplogHeadroomS != nil && window > 0 {
			out = append(out, oplogCheck(w, window))
		}
	}
	return out
}

// oplogCheck compares how old the position is with how far the oplog reaches back.
func oplogCheck(w *Watcher, window float64) Check {
	used := 1 - *w.OplogHeadroomS/window
	c := Check{ID: "oplog " + w.Name + "/" + w.Slot, Status: CheckOK, Detail: fmt.Sprintf("%.0f %% of a window of %.1f h is used", max(used, 0)*100, window/3600)}
	switch fix := "let the watcher go on, or make the oplog larger (replSetResizeOplog)"; {
	case used >= 0.9:
		c.Status, c.Fix = CheckFail, fix
	case used >= 0.5:
		c.Status, c.Fix = CheckWarn, fix
	}
	return c
}

// nodeChecks says whether there is somebody to take over.
func nodeChecks(nodes []Node) []Check {
	c := Check{ID: "nodes", Status: CheckOK}
	var live, stale int
	for _, n := range nodes {
		if n.Stale {
			stale++
		} else {
			live++
		}
	}
	c.Detail = fmt.Sprintf("%d live", live)
	switch {
	case live == 0:
		c.Status, c.Detail, c.Fix = CheckFail, "no node gives a sign of life", "start outrelay run"
	case live == 1:
		c.Status, c.Detail, c.Fix = CheckWarn, "one node and no standby", "start outrelay run on another machine"
	}
	if stale > 0 {
		c.Detail += fmt.Sprintf(", %d silent", stale)
		if c.Status == CheckOK {
			c.Status, c.Fix = CheckWarn, "start them again, or remove them from the list if they are gone for good"
		}
	}
	return []Check{c}
}
