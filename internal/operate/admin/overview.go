package admin

import (
	"context"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/figures"
	"github.com/outrelay/outrelay/internal/relay/problems"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// Overview is the first page that an operator sees.
type Overview struct {
	At            time.Time      `json:"at"`         // time of Slots and Nodes, by this process's clock
	CountedAt     time.Time      `json:"counted_at"` // time of Counts
	Watcher       string         `json:"watcher"`    // the watcher of Counts
	Slots         []SlotStatus   `json:"slots"`      // every slot of every watcher of the state database
	Nodes         []Node         `json:"nodes"`
	Counts        Counts         `json:"counts"`
	WaitingTopics []WaitingTopic `json:"waiting_topics"`  // waiting envelopes by topic; the topic with the oldest one comes first
	LagS          *float64       `json:"lag_s,omitempty"` // the greatest lag of the slots of the watcher; nil if the lag of one of them is unknown
	OldestS       float64        `json:"oldest_s"`        // age of the oldest waiting envelope of the watcher: parked, blocked, or before a retry
	RateS         float64        `json:"rate"`            // acked records per second of all slots of the watcher
	// Problems is the list of everything that is wrong, failures first: of the watcher, and of the slots of the others.
	Problems []Problem `json:"problems"`
}

// Overview reads the watchers and nodes with two small queries, and the figures that the process which counts for the watcher has stored. If
// none counts now, or an operator has acted since, Overview counts.
func (o Operator) Overview(ctx context.Context) (Overview, error) {
	status, err := ReadStatus(ctx, o.State)
	if err != nil {
		return Overview{}, err
	}
	members, err := o.Nodes().read(ctx)
	if err != nil {
		return Overview{}, err
	}

	var counted figures.Figures
	var counts bool
	// Only a watcher that has run has figures.
	mine := slices.DeleteFunc(slices.Clone(status.Slots), func(slot SlotStatus) bool { return slot.Name != o.Watcher })
	if len(mine) > 0 {
		if counted, counts, err = o.readFigures(ctx); err != nil {
			return Overview{}, err
		}
	}
	// Without an owner, nothing reports a missing right, and an operator who looks for the cause waits longer.
	if owned := slices.ContainsFunc(mine, func(slot SlotStatus) bool { return slot.HasOwner() }); !counts || !owned {
		if counted.Unreadable, err = o.inspectWatched(ctx, connect.RightsCheck(!owned)); err != nil {
			return Overview{}, err
		}
	}

	view := Overview{
		At:            time.Now().UTC(),
		CountedAt:     counted.At,
		Watcher:       o.Watcher,
		Slots:         status.Slots,
		Nodes:         newNodes(members, status),
		Counts:        counted.Counts,
		WaitingTopics: addTargets(newWaitingTopics(counted.Topics, time.Now()), status, o.Watcher),
	}
	for i := range view.Slots {
		// The headroom is the part of the oplog that the position has not lost yet.
		slot := &view.Slots[i]
		if counted.Oplog.Oldest.IsZero() || slot.PositionAt == nil {
			continue
		}
		headroom := max(slot.PositionAt.Sub(counted.Oplog.Oldest).Seconds(), 0)
		slot.OplogHeadroomS = &headroom
	}

	view.addProgress()
	for _, p := range view.WaitingTopics {
		view.OldestS = max(view.OldestS, p.OldestAgeS)
	}

	facts := newFacts(o, &view, members)
	counted.AddTo(&facts)
	view.Problems = problems.List(facts)
	return view, nil
}

// addProgress adds the lag and the rate of the watcher, which is as late as its latest slot, and as fast as all of them together.
func (v *Overview) addProgress() {
	var lags []float64
	slots := 0
	for i := range v.Slots {
		slot := &v.Slots[i]
		if slot.Name != v.Watcher {
			continue
		}
		slots++
		v.RateS += slot.Rate
		if slot.LagS != nil {
			lags = append(lags, *slot.LagS)
		}
	}

	// The slot with an unknown lag may be the latest one.
	if slots > 0 && len(lags) == slots {
		latest := slices.Max(lags)
		v.LagS = &latest
	}
}

// newFacts returns the facts that every overview has.
func newFacts(op Operator, view *Overview, members []nodes.Node) problems.Facts {
	return problems.Facts{Now: view.At, Watcher: op.Watcher, Slots: view.Slots, Nodes: members, TopicCommand: op.TopicCommand}
}

// OverviewWithoutCounts is the overview if the counts are not available because of problem: the documents of the watchers are
// few, and need fewer privileges than the counts.
func (o Operator) OverviewWithoutCounts(ctx context.Context, problem string) (Overview, error) {
	status, err := ReadStatus(ctx, o.State)
	if err != nil {
		return Overview{}, err
	}

	// Empty lists, so that they are [] in JSON.
	view := Overview{At: time.Now().UTC(), Watcher: o.Watcher, Slots: status.Slots, Nodes: []Node{}, WaitingTopics: []WaitingTopic{}}
	view.addProgress()
	facts := newFacts(o, &view, nil)
	facts.CountsFail = problem
	// The reason may be that the watched names cannot be read. This is a second opinion, so its own failure is none.
	facts.Unreadable, _ = o.inspectWatched(ctx, connect.TryRights)
	view.Problems = problems.List(facts)
	return view, nil
}

// inspectWatched returns the names of the configuration whose events are not delivered, or may get lost. The names of another watcher are
// unknown.
func (o Operator) inspectWatched(ctx context.Context, rights connect.RightsCheck) ([]outboxes.Finding, error) {
	if o.Inspect == nil || !o.isConfigured() {
		return nil, nil
	}
	found, err := o.Inspect(ctx, rights)
	// Without the privilege to list, the names are unknown.
	if mongodb.HasCode(err, mongodb.CodeUnauthorized) {
		return nil, nil
	}
	if err != nil || len(found) == 0 {
		return nil, err
	}

	// The stored figures have the time since which a name is missing.
	stored, err := figures.Read(ctx, o.State, o.Watcher)
	return outboxes.KeepSince(found, stored.Figures.Unreadable, time.Time{}), err
}
