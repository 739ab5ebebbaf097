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
	Envelopes   int64 `json:"envelopes"`    // all in the outboxes, also delivered ones; from the collections' metadata
	Pending     int64 `json:"pending"`      // written after the watcher's position; at most 10,000 per collection; of many outboxes, a part is counted in each round
	PendingMore bool  `json:"pending_more"` // a collection reached that limit, so there may be more
	Retry       int64 `json:"retry"`
	Blocked     int64 `json:"blocked"`
	Parked      int64 `json:"parked"`
	Queued      int64 `json:"queued"`       // sent next: due, requeued or replayed
	BlockedKeys int64 `json:"blocked_keys"` // ordering keys with any of these, counted for each topic
	Scheduled   int64 `json:"scheduled"`
	Dead        int64 `json:"dead"`         // letters that are not requeued
	DeadAll     int64 `json:"dead_all"`     // all letters
	HandlerDead int64 `json:"handler_dead"` // letters of handlers that are not requeued
	// HandlerWaiting are messages that handlers retry, or that follow such a message of their key; at most 100,000 per database.
	HandlerWaiting int64 `json:"handler_waiting"`
	InboxHandled   int64 `json:"inbox_handled"` // marks, from the collections' metadata
	InboxClaimed   int64 `json:"inbox_claimed"`
	Sagas          int64 `json:"sagas"`
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

	var figures figures
	// Only a watcher that has run has figures.
	mine := slices.DeleteFunc(slices.Clone(status.Slots), func(slot SlotStatus) bool { return slot.Name != o.Watcher })
	if len(mine) > 0 {
		if figures, err = o.currentFigures(ctx); err != nil {
			return Overview{}, err
		}
	}
	// Without an owner, nothing reports a missing right, and an operator who looks for the cause waits longer.
	if !slices.ContainsFunc(mine, func(slot SlotStatus) bool { return slot.hasOwner() }) {
		if figures.watched, err = o.checkWatched(ctx, false); err != nil {
			return Overview{}, err
		}
	}

	view := Overview{
		At:            time.Now().UTC(),
		CountedAt:     figures.at,
		Watcher:       o.Watcher,
		Slots:         status.Slots,
		Nodes:         running,
		Counts:        figures.counts,
		WaitingTopics: addTargets(figures.pending, status, o.Watcher),
	}
	for i := range view.Slots {
		// The headroom is the part of the oplog that the position has not lost yet.
		slot := &view.Slots[i]
		if figures.oldest.IsZero() || slot.PositionAt == nil {
			continue
		}
		headroom := max(slot.PositionAt.Sub(figures.oldest).Seconds(), 0)
		slot.OplogHeadroomS = &headroom
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

	view.Checks = slices.Concat(checkSlots(view.Slots, figures), checkNodes(nodesOf(running, o.Watcher)), figures.watched, figures.checks)
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
		if problem := &w.Problems[i]; problem.ForS >= lastingProblemS && (oldest == nil || problem.Since.Before(oldest.Since)) {
			oldest = problem
		}
	}
	return oldest
}

// checkSlots returns the checks of each slot, based on the last report of its owner.
func checkSlots(list []SlotStatus, figures figures) []Check {
	checks := []Check{}
	window := figures.newest.Sub(figures.oldest).Seconds()
	for i := range list {
		slot := &list[i]
		checks = append(checks, checkSlot(slot))
		if slot.OplogHeadroomS != nil && window > 0 {
			checks = append(checks, checkOplog(slot, window))
		}
	}
	return checks
}

// checkSlot returns the most severe finding about a slot.
func checkSlot(slot *SlotStatus) Check {
	check := Check{ID: "slot " + slot.Name + "/" + slot.Slot, Watcher: slot.Name}
	// One finding for each slot: the first one that applies hides the symptoms that follow from it.
	switch {
	case slot.Paused:
		check.Status, check.Detail, check.Fix = CheckWarn, "an operator paused it", "outrelay resume"

		// Without the flag, the command would also end the pauses of the other slots.
		if slot.Slot != "0of1" {
			check.Fix += " --slot " + slot.Slot
		}

	case slot.State == "no-owner" && slot.Pin != "":
		check.Status, check.Detail = CheckFail, "no process runs it: it is pinned to node "+slot.Pin+", and other nodes wait for that node"
		check.Fix = "start node " + slot.Pin + ", or run outrelay pin --off"

	case slot.State == "no-owner":
		check.Status, check.Detail, check.Fix = CheckFail, "no process runs it", "start outrelay run"

	case slot.State == "halted", slot.State == "config_error":
		check.Status, check.Detail, check.Fix = CheckFail, slot.State+": "+slot.Reason, "fix the named cause; outrelay doctor has details"

	case slot.lastingProblem() != nil:
		problem := slot.lastingProblem()
		check.Status = CheckFail
		check.Detail = fmt.Sprintf("%s, for %s: %s", problem.Part, time.Duration(problem.ForS*float64(time.Second)).Truncate(time.Second), problem.Text)
		check.Fix = "fix the named cause; outrelay doctor has details"

	case slot.State == "unwritable", len(slot.Unwritable) > 0:
		check.Status, check.Fix = CheckWarn, "make the topic writable; the waiting envelopes are then sent automatically"
		check.Detail = slot.Reason
		if len(slot.Unwritable) > 0 {
			topic := &slot.Unwritable[0]
			check.Detail = fmt.Sprintf("topic %s: %s; %d wait", topic.Topic, topic.Reason, topic.Count)
		}

	case slot.Gap != "":
		check.Status, check.Detail = CheckWarn, "a gap in the stream is being swept: "+slot.Gap

	case slot.LagS > maxHealthyLag:
		check.Status, check.Fix = CheckWarn, "run outrelay status to find where it waits"
		check.Detail = fmt.Sprintf("the lag is %.0f s: the stream contains an event of that age that Kafka has not acknowledged", slot.LagS)

	default:
		check.Status = CheckOK
		check.Detail = fmt.Sprintf("%s on %s, epoch %d, lag %.1f s", slot.State, slot.Node, slot.Epoch, slot.LagS)
	}
	return check
}

// checkOplog compares the age of the position with window, the seconds that the oplog covers.
func checkOplog(slot *SlotStatus, window float64) Check {
	used := 1 - *slot.OplogHeadroomS/window
	check := Check{
		ID:      "oplog " + slot.Name + "/" + slot.Slot,
		Watcher: slot.Name,
		Status:  CheckOK,
		Detail:  fmt.Sprintf("%.0f %% of a window of %.1f h is used", max(used, 0)*100, window/3600),
	}

	const fix = "let the watcher continue, or make the oplog larger (replSetResizeOplog)"
	switch {
	case used >= 0.9:
		check.Status, check.Fix = CheckFail, fix
	case used >= 0.5:
		check.Status, check.Fix = CheckWarn, fix
	}
	return check
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
		check := Check{ID: "watch " + f.NS, Watcher: o.Watcher, Status: CheckWarn, Detail: f.Cause, Fix: f.Fix}
		if f.Fatal {
			check.Status = CheckFail
		}
		checks = append(checks, check)
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

	check := Check{ID: "nodes", Status: CheckOK, Detail: fmt.Sprintf("%d live", live)}
	switch live {
	case 0:
		check.Status, check.Detail, check.Fix = CheckFail, "no node is alive", "start outrelay run"
	case 1:
		check.Status, check.Detail, check.Fix = CheckWarn, "one node and no standby", "start outrelay run on another machine"
	}

	if stale > 0 {
		check.Detail += fmt.Sprintf(", %d stale", stale)
		// A problem with the number of live nodes is more important.
		if check.Status == CheckOK {
			check.Status, check.Fix = CheckWarn, "start them again, or remove them from the list if they are gone permanently"
		}
	}
	return []Check{check}
}
