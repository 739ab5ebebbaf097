package opspage

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// overview is the data of the first page.
type overview struct {
	admin.Overview
	Worst    string        // status of the most severe check of the watcher
	Problems []admin.Check // checks of the watcher that are not ok, the most severe first
	Watching []verdict     // all watchers
	HeldLive int           // number of live slots of the watcher
	Slots    int           // number of slots of the watcher
	Own      []admin.SlotStatus
	Paused   int // number of slots of the watcher that an operator paused
}

// Headline returns the state of the watcher in a few words.
func (o *overview) Headline() string {
	live := fmt.Sprintf("%d of %d slots live", o.HeldLive, o.Slots)
	switch {
	case o.Paused > 0 && o.Paused == o.Slots:
		return "paused by an operator"
	case o.Paused > 0:
		return fmt.Sprintf("%s, %d paused by an operator", live, o.Paused)
	case o.Slots > 0 && o.HeldLive == o.Slots:
		return "events flow"
	}
	return live
}

// Relays returns the nodes that run the watcher, to which it can be pinned.
func (o *overview) Relays(watcher string) []admin.Node {
	return slices.DeleteFunc(slices.Clone(o.Nodes), func(n admin.Node) bool { return !slices.Contains(n.Watchers, watcher) })
}

// Dead returns the number of dead letters of both sides that are not requeued.
func (o *overview) Dead() int64 { return o.Counts.Dead + o.Counts.HandlerDead }

// tile is a count on the overview, with the term of the glossary that explains it.
type tile struct {
	Count      int64
	More       bool // there may be more
	Text, Term string
	Link       string // to the list; "" if there is none
}

// Tiles returns the counts of the overview. Counts that an operator has to act on come first.
func (o *overview) Tiles(v *view) []tile {
	c := &o.Counts
	return []tile{
		{Count: c.Dead, Text: "dead letters", Term: "dead letter", Link: v.Link("/dead")},
		{Count: c.HandlerDead, Text: "dead letters of handlers", Term: "dead letter", Link: v.Link("/dead", "source", admin.FromHandler)},
		{Count: c.Retry, Text: "retry", Term: "retry", Link: v.Link("/pending", "reason", "retry")},
		{Count: c.Parked, Text: "parked", Term: "parked", Link: v.Link("/pending", "reason", "parked")},
		{Count: c.Blocked, Text: "blocked", Term: "blocked", Link: v.Link("/pending", "reason", "blocked")},
		{Count: c.Queued, Text: "queued", Term: "queued", Link: v.Link("/pending", "reason", "queued")},
		{Count: c.BlockedKeys, Text: "keys that wait", Term: "key", Link: v.Link("/pending")},
		{Count: c.Scheduled, Text: "scheduled", Term: "scheduled", Link: v.Link("/scheduled")},
		{Count: c.Pending, More: c.PendingMore, Text: "after the position", Term: "position"},
		{Count: c.Envelopes, Text: "in the outboxes", Term: "outbox"},
		{Count: c.InboxHandled, Text: "handled messages", Term: "inbox", Link: v.Link("/inbox")},
		{Count: c.InboxClaimed, Text: "claimed messages", Term: "claimed", Link: v.Link("/inbox")},
		{Count: c.Sagas, Text: "sagas", Term: "saga", Link: v.Link("/sagas")},
	}
}

// verdict is the state of one watcher.
type verdict struct{ Name, Status string }

// newVerdict returns the status of the most severe check about a watcher.
func newVerdict(checks []admin.Check, watcher string) verdict {
	v := verdict{watcher, admin.CheckOK}
	for _, c := range checks {
		if c.Watcher == watcher && severity[c.Status] < severity[v.Status] {
			v.Status = c.Status
		}
	}
	return v
}

// checkTitles are the names of checks that are not about a slot.
var checkTitles = map[string]string{
	"nodes": "Nodes", "counting": "Counts of waiting envelopes", "dead_letters": "Dead letters", "exceptions": "Waiting envelopes",
}

// titleOfCheck returns the object of a check in words: its id is for programs.
func titleOfCheck(c admin.Check) string {
	kind, slot, _ := strings.Cut(c.ID, " ")
	name, part, _ := strings.Cut(slot, "/")
	of := "watcher " + name
	if part != "0of1" {
		of = "slot " + part + " of " + of
	}

	switch kind {
	case "slot":
		return strings.ToUpper(of[:1]) + of[1:]
	case "oplog":
		return "Oplog of " + of
	}
	return cmp.Or(checkTitles[c.ID], c.ID)
}

// severity sorts checks: the most severe ones come first.
var severity = map[string]int{admin.CheckFail: 0, admin.CheckWarn: 1, admin.CheckOK: 2}

func newOverview(o admin.Overview, watcher string) *overview {
	v := &overview{Overview: o, Worst: admin.CheckOK}
	// A check without a watcher concerns the whole deployment.
	v.Checks = slices.DeleteFunc(slices.Clone(o.Checks), func(c admin.Check) bool { return c.Watcher != "" && c.Watcher != watcher })
	// A stable order keeps rows in place when the page refreshes.
	slices.SortStableFunc(v.Checks, func(a, b admin.Check) int {
		return cmp.Compare(severity[a.Status], severity[b.Status])
	})
	for _, c := range v.Checks {
		if c.Status != admin.CheckOK {
			v.Problems = append(v.Problems, c)
		}
	}
	if len(v.Checks) > 0 {
		v.Worst = v.Checks[0].Status
	}

	for i := range o.Slots {
		w := &o.Slots[i]
		if !slices.ContainsFunc(v.Watching, func(x verdict) bool { return x.Name == w.Name }) {
			v.Watching = append(v.Watching, newVerdict(o.Checks, w.Name))
		}
		// The numbers below are about the watcher of this page; the others have only a verdict.
		if w.Name != watcher {
			continue
		}

		v.Slots++
		v.Own = append(v.Own, *w)
		if w.State == "live" {
			v.HeldLive++
		}
		if w.Paused {
			v.Paused++
		}
	}
	return v
}

func showOverview(c *call) (any, error) {
	o, err := c.use.Operator.Overview(c.ctx)
	if err != nil {
		return nil, err
	}
	return newOverview(o, c.v.Watcher), nil
}

// showHistory serves throughput and lag of the last day, for the charts: seconds, records per second, and seconds of lag.
func (p *page) showHistory(w http.ResponseWriter, r *http.Request, c *call) {
	list, err := c.use.Activity.Minutes(c.ctx)
	if err != nil {
		p.serveProblem(w, r, c, err)
		return
	}

	points := make([][3]float64, len(list))
	for i, h := range list {
		points[i] = [3]float64{float64(h.At.Unix()), h.Rate, h.LagS}
	}
	w.Header().Set("Content-Type", "application/json")
	// An error means that the client has disconnected.
	_ = json.NewEncoder(w).Encode(points)
}

// pending is the data of the page of waiting envelopes.
type pending struct {
	Topics []admin.WaitingTopic
	Page   admin.WaitingPage
}

func showPending(c *call) (any, error) {
	var d pending
	var err error
	if d.Topics, err = c.use.Waiting.Topics(c.ctx); err != nil {
		return nil, err
	}
	d.Page, err = c.use.Waiting.Page(c.ctx, c.waitingFilter(), c.pageLimit(), c.value("after"))
	return d, err
}

// nodes is the data of the page of nodes.
type nodes struct {
	Nodes []admin.Node
	Slots []admin.SlotStatus
}

func showNodes(c *call) (any, error) {
	o, err := c.use.Operator.Overview(c.ctx)
	return nodes{o.Nodes, o.Slots}, err
}

// control is the data of the page with the forms of actions.
type control struct {
	*overview
	Collections []string
	Replays     []admin.ReplayInfo
}

// maxListedReplays is the number of replays on the page.
const maxListedReplays = 20

func showControl(c *call) (any, error) {
	o, err := c.use.Operator.Overview(c.ctx)
	if err != nil {
		return nil, err
	}

	// A watcher that never ran has no collections and no replays.
	d := control{overview: newOverview(o, c.v.Watcher)}
	if d.Slots == 0 {
		return d, nil
	}

	// A watcher without collections can still be paused and pinned.
	d.Collections, err = c.use.Operator.Collections(c.ctx, "")
	if err != nil && !errors.Is(err, admin.ErrNoCollections) {
		return nil, err
	}
	d.Replays, err = c.use.Replays.List(c.ctx, maxListedReplays)
	return d, err
}
