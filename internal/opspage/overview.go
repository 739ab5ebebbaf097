package opspage

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/outrelay/outrelay/internal/admin"
)

// overview is the data of the first page.
type overview struct {
	admin.Overview
	Worst    string   // status of the most severe check
	Failing  int      // number of checks that are not ok
	Others   []string // names of all watchers
	HeldLive int      // number of live slots of the watcher
	Slots    int      // number of slots of the watcher
	Own      []admin.Watcher
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

// severity sorts checks: the most severe ones come first.
var severity = map[string]int{admin.CheckFail: 0, admin.CheckWarn: 1, admin.CheckOK: 2}

func newOverview(o admin.Overview, watcher string) *overview {
	v := &overview{Overview: o, Worst: admin.CheckOK}
	v.Checks = slices.Clone(o.Checks)
	slices.SortStableFunc(v.Checks, func(a, b admin.Check) int {
		return cmp.Compare(severity[a.Status], severity[b.Status])
	})
	for _, c := range v.Checks {
		if c.Status != admin.CheckOK {
			v.Failing++
		}
	}
	if len(v.Checks) > 0 {
		v.Worst = v.Checks[0].Status
	}

	for i := range o.Watchers {
		w := &o.Watchers[i]
		if !slices.Contains(v.Others, w.Name) {
			v.Others = append(v.Others, w.Name)
		}
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

// pending is the data of the page of waiting envelopes.
type pending struct {
	Topics []admin.PendingTopic
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
	Nodes    []admin.Node
	Watchers []admin.Watcher
}

func showNodes(c *call) (any, error) {
	o, err := c.use.Operator.Overview(c.ctx)
	return nodes{o.Nodes, o.Watchers}, err
}

func showLog(c *call) (any, error) {
	f := admin.EventFilter{
		Watcher: c.value("of"), Node: c.value("node"), Actor: c.value("actor"), Kinds: splitWords(c.value("kind")),
	}
	var err error
	if f.From, f.To, err = c.parseWindow(); err != nil {
		return nil, err
	}
	return c.use.Operator.Events(c.ctx, f, c.pageLimit(), c.value("after"))
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
