package opspage

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/problems"
)

// overview is the data of the first page.
type overview struct {
	admin.Overview
	Worst    string          // ok, warn or fail: the greatest severity of the problems of the watcher
	Problems []admin.Problem // of the watcher, failures first
	Watching []verdict       // all watchers
	HeldLive int             // number of live slots of the watcher
	Slots    int             // number of slots of the watcher
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
func (o *overview) Tiles(view *view) []tile {
	counts := &o.Counts
	return []tile{
		{Count: counts.Dead, Text: "dead letters", Term: "dead letter", Link: view.Link("/dead")},
		{Count: counts.HandlerDead, Text: "dead letters of handlers", Term: "dead letter", Link: view.Link("/dead", "source", admin.FromHandler)},
		{Count: counts.Retry, Text: "retry", Term: "retry", Link: view.Link("/pending", "reason", "retry")},
		{Count: counts.Parked, Text: "parked", Term: "parked", Link: view.Link("/pending", "reason", "parked")},
		{Count: counts.Blocked, Text: "blocked", Term: "blocked", Link: view.Link("/pending", "reason", "blocked")},
		{Count: counts.Queued, Text: "queued", Term: "queued", Link: view.Link("/pending", "reason", "queued")},
		{Count: counts.BlockedKeys, Text: "keys that wait", Term: "key", Link: view.Link("/pending")},
		{Count: counts.Scheduled, Text: "scheduled", Term: "scheduled", Link: view.Link("/scheduled")},
		{Count: counts.Pending, More: counts.PendingMore, Text: "after the position", Term: "position"},
		{Count: counts.Envelopes, Text: "in the outboxes", Term: "outbox"},
		{Count: counts.InboxHandled, Text: "handled messages", Term: "inbox", Link: view.Link("/inbox")},
		{Count: counts.InboxClaimed, Text: "claimed messages", Term: "claimed", Link: view.Link("/inbox")},
		{Count: counts.Sagas, Text: "sagas", Term: "saga", Link: view.Link("/sagas")},
	}
}

// verdict is the state of one watcher.
type verdict struct{ Name, Status string }

// newVerdict returns the greatest severity of the problems of a watcher.
func newVerdict(list []admin.Problem, watcher string) verdict {
	return verdict{watcher, worstOf(slices.DeleteFunc(slices.Clone(list), func(problem admin.Problem) bool { return problem.Watcher != watcher }))}
}

// worstOf returns ok, or the greatest severity of the problems.
func worstOf(list []admin.Problem) string { return cmp.Or(string(problems.Worst(list)), "ok") }

func newOverview(reported admin.Overview, watcher string) *overview {
	overview := &overview{Overview: reported}
	// A problem without a watcher concerns the whole deployment.
	overview.Problems = slices.DeleteFunc(slices.Clone(reported.Problems), func(problem admin.Problem) bool {
		return problem.Watcher != "" && problem.Watcher != watcher
	})
	overview.Worst = worstOf(overview.Problems)

	for i := range reported.Slots {
		reportedSlot := &reported.Slots[i]
		if !slices.ContainsFunc(overview.Watching, func(verdict verdict) bool { return verdict.Name == reportedSlot.Name }) {
			overview.Watching = append(overview.Watching, newVerdict(reported.Problems, reportedSlot.Name))
		}
		// The numbers below are about the watcher of this page; the others have only a verdict.
		if reportedSlot.Name != watcher {
			continue
		}

		overview.Slots++
		overview.Own = append(overview.Own, *reportedSlot)
		if reportedSlot.State == "live" {
			overview.HeldLive++
		}
		if reportedSlot.Paused {
			overview.Paused++
		}
	}
	return overview
}

func showOverview(call *call) (any, error) {
	overview, err := call.use.Operator.Overview(call.ctx)
	if err != nil {
		return nil, err
	}
	return newOverview(overview, call.v.Watcher), nil
}

// showHistory serves throughput and lag of the last day, for the charts: seconds, records per second, and seconds of lag.
func (p *page) showHistory(response http.ResponseWriter, request *http.Request, call *call) {
	list, err := call.use.Activity.Minutes(call.ctx)
	if err != nil {
		p.serveProblem(response, request, call, err)
		return
	}

	points := make([][3]float64, len(list))
	for i, h := range list {
		points[i] = [3]float64{float64(h.At.Unix()), h.Rate, h.LagS}
	}
	response.Header().Set("Content-Type", "application/json")
	// An error means that the client has disconnected.
	_ = json.NewEncoder(response).Encode(points)
}

// pending is the data of the page of waiting envelopes.
type pending struct {
	Topics []admin.WaitingTopic
	Page   admin.WaitingPage
}

func showPending(call *call) (any, error) {
	var page pending
	var err error
	if page.Topics, err = call.use.Waiting.Topics(call.ctx); err != nil {
		return nil, err
	}
	page.Page, err = call.use.Waiting.Page(call.ctx, call.waitingFilter(), call.pageLimit(), call.value("after"))
	return page, err
}

// nodes is the data of the page of nodes.
type nodes struct {
	Nodes []admin.Node
	Slots []admin.SlotStatus
}

func showNodes(call *call) (any, error) {
	overview, err := call.use.Operator.Overview(call.ctx)
	return nodes{overview.Nodes, overview.Slots}, err
}

// control is the data of the page with the forms of actions.
type control struct {
	*overview
	Collections []string
	Replays     []admin.ReplayInfo
}

// maxListedReplays is the number of replays on the page.
const maxListedReplays = 20

func showControl(call *call) (any, error) {
	overview, err := call.use.Operator.Overview(call.ctx)
	if err != nil {
		return nil, err
	}

	// A watcher that never ran has no collections and no replays.
	control := control{overview: newOverview(overview, call.v.Watcher)}
	if control.Slots == 0 {
		return control, nil
	}

	// A watcher without collections can still be paused and pinned.
	control.Collections, err = call.use.Operator.Collections(call.ctx, "")
	if err != nil && !errors.Is(err, admin.ErrNoCollections) {
		return nil, err
	}
	control.Replays, err = call.use.Replays.List(call.ctx, maxListedReplays)
	return control, err
}
