package opspage

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/outrelay/outrelay/internal/admin"
)

// overview is what an operator sees first.
type overview struct {
	admin.Overview
	Worst    string   // status of the worst check
	Failing  int      // checks that are not ok
	Others   []string // names of all watchers
	HeldLive int      // slots of the watcher that are live
	Slots    int
	Own      []admin.Watcher // slots of the watcher
	Paused   int             // of them, by an operator
}

// Headline is how the watcher stands, in a word.
func (o *overview) Headline() string {
	switch {
	case o.Paused > 0 && o.Paused == o.Slots:
		return "paused by an operator"
	case o.Paused > 0:
		return fmt.Sprintf("%d of %d slots live, %d paused by an operator", o.HeldLive, o.Slots, o.Paused)
	case o.Slots > 0 && o.HeldLive == o.Slots:
		return "events flow"
	}
	return fmt.Sprintf("%d of %d slots live", o.HeldLive, o.Slots)
}

// Relays are the nodes that run that watcher: those that it can be pinned to.
func (o *overview) Relays(watcher string) []admin.Node {
	return slices.DeleteFunc(slices.Clone(o.Nodes), func(n admin.Node) bool { return !slices.Contains(n.Watchers, watcher) })
}

var order = map[string]int{admin.CheckFail: 0, admin.CheckWarn: 1, admin.CheckOK: 2}

func newOverview(o admin.Overview, watcher string) *overview {
	v := &overview{Overview: o, Worst: admin.CheckOK}
	v.Checks = slices.Clone(o.Checks)
	slices.SortStableFunc(v.Checks, func(a, b admin.Check) int { return cmp.Compare(order[a.Status], order[b.Status]) })
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
		if w.State == "live" {
			v.HeldLive++
		}
		v.Own = append(v.Own, *w)
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

// pending is what waits: by topic, and the envelopes themselves.
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
	f := admin.WaitingFilter{Collection: c.get("collection"), State: c.get("state"), Topic: c.get("topic"), Key: c.get("key")}
	d.Page, err = c.use.Waiting.Page(c.ctx, f, c.limit(), c.get("after"))
	return d, err
}

type nodes struct {
	Nodes    []admin.Node
	Watchers []admin.Watcher
}

func showNodes(c *call) (any, error) {
	o, err := c.use.Operator.Overview(c.ctx)
	return nodes{o.Nodes, o.Watchers}, err
}

func showLog(c *call) (any, error) {
	f := admin.EventFilter{Watcher: c.get("of"), Node: c.get("node"), Actor: c.get("actor"), Kinds: words(c.get("kind"))}
	var err error
	if f.From, f.To, err = c.window(); err != nil {
		return nil, err
	}
	return c.use.Operator.Events(c.ctx, f, c.limit(), c.get("after"))
}

// control is what the forms of the page for actions offer.
type control struct {
	*overview
	Collections []string
	Replays     []admin.ReplayInfo
}

func showControl(c *call) (any, error) {
	o, err := c.use.Operator.Overview(c.ctx)
	if err != nil {
		return nil, err
	}
	d := control{overview: newOverview(o, c.v.Watcher)}
	if d.Slots == 0 {
		return d, nil // nothing runs yet, so nothing is registered
	}
	// One that has registered nothing yet can be paused and handed over all the same.
	if d.Collections, err = c.use.Operator.Collections(c.ctx, ""); err != nil && !errors.Is(err, admin.ErrNoCollections) {
		return nil, err
	}
	d.Replays, err = c.use.Replays.List(c.ctx, 20)
	return d, err
}
