package admin

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// Overview is the first page that an operator sees.
type Overview struct {
	At            time.Time      `json:"at"`         // time of Slots and Nodes, by this process's clock
	CountedAt     time.Time      `json:"counted_at"` // time of Counts
	Watcher       string         `json:"watcher"`    // the watcher of Counts
	Slots         []SlotStatus   `json:"slots"`      // every slot of every watcher of the state database
	Nodes         []Node         `json:"nodes"`
	Counts        Counts         `json:"counts"`
	WaitingTopics []WaitingTopic `json:"waiting_topics"` // waiting envelopes by topic; the topic with the oldest one comes first
	LagS          float64        `json:"lag_s"`          // the greatest lag of the slots of the watcher
	OldestS       float64        `json:"oldest_s"`       // age of the oldest waiting envelope of the watcher: parked, blocked, or before a retry
	RateS         float64        `json:"rate"`           // acked records per second of all slots of the watcher
	Checks        []Check        `json:"checks"`
}

// Counts are numbers of documents in the watcher's collections, and in the databases that contain
// them.
type Counts struct {
	Envelopes    int64 `json:"envelopes"`    // all in the outboxes, also delivered ones; from the collections' metadata
	Pending      int64 `json:"pending"`      // written after the watcher's position; at most 10,000 per collection; of many outboxes, a part is counted in each round
	PendingMore  bool  `json:"pending_more"` // a collection reached that limit, so there may be more
	Retry        int64 `json:"retry"`
	Blocked      int64 `json:"blocked"`
	Parked       int64 `json:"parked"`
	Queued       int64 `json:"queued"`       // sent next: due, requeued or replayed
	BlockedKeys  int64 `json:"blocked_keys"` // ordering keys with any of these, counted for each topic
	Scheduled    int64 `json:"scheduled"`
	Dead         int64 `json:"dead"`          // letters that are not requeued
	DeadAll      int64 `json:"dead_all"`      // all letters
	HandlerDead  int64 `json:"handler_dead"`  // letters of handlers that are not requeued
	InboxHandled int64 `json:"inbox_handled"` // marks, from the collections' metadata
	InboxClaimed int64 `json:"inbox_claimed"`
	Sagas        int64 `json:"sagas"`
}

// Waiting returns the number of waiting envelopes.
func (c Counts) Waiting() int64 { return c.Retry + c.Blocked + c.Parked + c.Queued }

// Check is the result of one health check.
type Check struct {
	ID string `json:"id"`
	// Watcher is the watcher that the check is about, or "" if it is about the whole deployment.
	Watcher string `json:"watcher,omitempty"`
	Status  string `json:"status"` // ok, warn or fail
	Detail  string `json:"detail"`
	Fix     string `json:"fix,omitempty"` // the next step of the operator
}

// The statuses of a check.
const (
	CheckOK   = "ok"
	CheckWarn = "warn"
	CheckFail = "fail"
)

// Overview reads the watchers and nodes with two small queries. All counts come from the figures,
// which [Operator.Run] renews about every two seconds while an operator reads them. So the cost
// does not depend on the size of the outbox.
func (o Operator) Overview(ctx context.Context) (Overview, error) {
	status, err := ReadStatus(ctx, o.State)
	if err != nil {
		return Overview{}, err
	}
	running, err := o.Nodes().listWith(ctx, status)
	if err != nil {
		return Overview{}, err
	}

	var f figures
	// Only a watcher that has run has figures.
	mine := slices.DeleteFunc(slices.Clone(status.Slots), func(w SlotStatus) bool { return w.Name != o.Watcher })
	if len(mine) > 0 {
		if f, err = o.currentFigures(ctx); err != nil {
			return Overview{}, err
		}
	}
	// Without an owner, nothing reports a missing right, and an operator who looks for the cause waits longer.
	if !slices.ContainsFunc(mine, func(w SlotStatus) bool { return w.hasOwner() }) {
		if f.watched, err = o.checkWatched(ctx, false); err != nil {
			return Overview{}, err
		}
	}

	view := Overview{
		At:            time.Now().UTC(),
		CountedAt:     f.at,
		Watcher:       o.Watcher,
		Slots:         status.Slots,
		Nodes:         running,
		Counts:        f.counts,
		WaitingTopics: addTargets(f.pending, status, o.Watcher),
	}
	for i := range view.Slots {
		// The headroom is the part of the oplog that the position has not lost yet.
		w := &view.Slots[i]
		if f.oldest.IsZero() || w.PositionAt == nil {
			continue
		}
		headroom := max(w.PositionAt.Sub(f.oldest).Seconds(), 0)
		w.OplogHeadroomS = &headroom
	}

	// A watcher is as late as its latest slot, and as fast as all of them together.
	for _, w := range status.Slots {
		if w.Name == o.Watcher {
			view.LagS = max(view.LagS, w.LagS)
			view.RateS += w.Rate
		}
	}
	for _, p := range view.WaitingTopics {
		view.OldestS = max(view.OldestS, p.OldestAgeS)
	}

	view.Checks = slices.Concat(checkSlots(view.Slots, f), checkNodes(nodesOf(running, o.Watcher)), f.watched, f.checks)
	return view, nil
}

// OverviewWithoutCounts is the overview if the counts are not available because of problem: the documents of the watchers are
// few, and need fewer privileges than the counts.
func (o Operator) OverviewWithoutCounts(ctx context.Context, problem string) (Overview, error) {
	status, err := ReadStatus(ctx, o.State)
	if err != nil {
		return Overview{}, err
	}

	// The reason may be that the watched names cannot be read. This is a second opinion, so its own failure is none.
	watched, _ := o.checkWatched(ctx, false)
	unknown := Check{ID: "counts", Watcher: o.Watcher, Status: CheckWarn, Detail: "counts are not available: " + problem}
	return Overview{
		// Empty lists, so that they are [] in JSON.
		At: time.Now().UTC(), Watcher: o.Watcher, Slots: status.Slots, Nodes: []Node{}, WaitingTopics: []WaitingTopic{},
		Checks: slices.Concat(checkSlots(status.Slots, figures{}), watched, []Check{unknown}),
	}, nil
}

// maxHealthyLag is the lag in seconds above which the check of a slot warns.
const maxHealthyLag = 10.0

// lastingProblemS is the age in seconds at which a problem fails the check of a slot. A failover takes less.
const lastingProblemS = 30.0

// lastingProblem returns the oldest problem of the owner if it lasts too long, or nil.
func (w *SlotStatus) lastingProblem() (oldest *SlotProblem) {
	for i := range w.Problems {
		if p := &w.Problems[i]; p.ForS >= lastingProblemS && (oldest == nil || p.Since.Before(oldest.Since)) {
			oldest = p
		}
	}
	return oldest
}

// checkSlots returns the checks of each slot, based on the last report of its owner.
func checkSlots(list []SlotStatus, f figures) []Check {
	checks := []Check{}
	window := f.newest.Sub(f.oldest).Seconds()
	for i := range list {
		w := &list[i]
		checks = append(checks, checkSlot(w))
		if w.OplogHeadroomS != nil && window > 0 {
			checks = append(checks, checkOplog(w, window))
		}
	}
	return checks
}

// checkSlot returns the most severe finding about a slot.
func checkSlot(w *SlotStatus) Check {
	c := Check{ID: "slot " + w.Name + "/" + w.Slot, Watcher: w.Name}
	// One finding for each slot: the first one that applies hides the symptoms that follow from it.
	switch {
	case w.Paused:
		c.Status, c.Detail, c.Fix = CheckWarn, "an operator paused it", "outrelay resume"

		// Without the flag, the command would also end the pauses of the other slots.
		if w.Slot != "0of1" {
			c.Fix += " --slot " + w.Slot
		}

	case w.State == "no-owner" && w.Pin != "":
		c.Status, c.Detail = CheckFail, "no process runs it: it is pinned to node "+w.Pin+", and other nodes wait for that node"
		c.Fix = "start node " + w.Pin + ", or run outrelay pin --off"

	case w.State == "no-owner":
		c.Status, c.Detail, c.Fix = CheckFail, "no process runs it", "start outrelay run"

	case w.State == "halted", w.State == "config_error":
		c.Status, c.Detail, c.Fix = CheckFail, w.State+": "+w.Reason, "fix the named cause; outrelay doctor has details"

	case w.lastingProblem() != nil:
		p := w.lastingProblem()
		c.Status = CheckFail
		c.Detail = fmt.Sprintf("%s, for %s: %s", p.Part, time.Duration(p.ForS*float64(time.Second)).Truncate(time.Second), p.Text)
		c.Fix = "fix the named cause; outrelay doctor has details"

	case w.State == "unwritable", len(w.Unwritable) > 0:
		c.Status, c.Fix = CheckWarn, "make the topic writable; the waiting envelopes are then sent automatically"
		c.Detail = w.Reason
		if len(w.Unwritable) > 0 {
			b := &w.Unwritable[0]
			c.Detail = fmt.Sprintf("topic %s: %s; %d wait", b.Topic, b.Reason, b.Count)
		}

	case w.Gap != "":
		c.Status, c.Detail = CheckWarn, "a gap in the stream is being swept: "+w.Gap

	case w.LagS > maxHealthyLag:
		c.Status, c.Fix = CheckWarn, "run outrelay status to find where it waits"
		c.Detail = fmt.Sprintf("the lag is %.0f s: the stream contains an event of that age that Kafka has not acknowledged", w.LagS)

	default:
		c.Status = CheckOK
		c.Detail = fmt.Sprintf("%s on %s, epoch %d, lag %.1f s", w.State, w.Node, w.Epoch, w.LagS)
	}
	return c
}

// checkOplog compares the age of the position with window, the seconds that the oplog covers.
func checkOplog(w *SlotStatus, window float64) Check {
	used := 1 - *w.OplogHeadroomS/window
	c := Check{
		ID:      "oplog " + w.Name + "/" + w.Slot,
		Watcher: w.Name,
		Status:  CheckOK,
		Detail:  fmt.Sprintf("%.0f %% of a window of %.1f h is used", max(used, 0)*100, window/3600),
	}

	const fix = "let the watcher continue, or make the oplog larger (replSetResizeOplog)"
	switch {
	case used >= 0.9:
		c.Status, c.Fix = CheckFail, fix
	case used >= 0.5:
		c.Status, c.Fix = CheckWarn, fix
	}
	return c
}

// checkWatched returns a check for each name of the configuration whose events are not delivered, or may get lost. The
// names of another watcher are unknown.
func (o Operator) checkWatched(ctx context.Context, owned bool) ([]Check, error) {
	if o.Inspect == nil || !o.isConfigured() {
		return nil, nil
	}
	found, err := o.Inspect(ctx, owned)
	// Without the privilege to list, the names are unknown.
	if err != nil && !mongodb.HasCode(err, mongodb.CodeUnauthorized) {
		return nil, err
	}

	var checks []Check
	for _, f := range found {
		c := Check{ID: "watch " + f.NS, Watcher: o.Watcher, Status: CheckWarn, Detail: f.Cause, Fix: f.Fix}
		if f.Fatal {
			c.Status = CheckFail
		}
		checks = append(checks, c)
	}
	return checks, nil
}

// nodesOf returns the nodes that run a watcher.
func nodesOf(list []Node, watcher string) []Node {
	return slices.DeleteFunc(slices.Clone(list), func(n Node) bool { return !slices.Contains(n.Watchers, watcher) })
}

// checkNodes checks whether there is a standby, and whether nodes are stale.
func checkNodes(list []Node) []Check {
	var live, stale int
	for _, n := range list {
		if n.Stale {
			stale++
		} else {
			live++
		}
	}

	c := Check{ID: "nodes", Status: CheckOK, Detail: fmt.Sprintf("%d live", live)}
	switch live {
	case 0:
		c.Status, c.Detail, c.Fix = CheckFail, "no node is alive", "start outrelay run"
	case 1:
		c.Status, c.Detail, c.Fix = CheckWarn, "one node and no standby", "start outrelay run on another machine"
	}

	if stale > 0 {
		c.Detail += fmt.Sprintf(", %d stale", stale)
		// A problem with the number of live nodes is more important.
		if c.Status == CheckOK {
			c.Status, c.Fix = CheckWarn, "start them again, or remove them from the list if they are gone permanently"
		}
	}
	return []Check{c}
}
