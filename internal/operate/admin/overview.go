package admin

import (
	"context"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/mongodb"
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
	WaitingTopics []WaitingTopic `json:"waiting_topics"` // waiting envelopes by topic; the topic with the oldest one comes first
	LagS          float64        `json:"lag_s"`          // the greatest lag of the slots of the watcher
	OldestS       float64        `json:"oldest_s"`       // age of the oldest waiting envelope of the watcher: parked, blocked, or before a retry
	RateS         float64        `json:"rate"`           // acked records per second of all slots of the watcher
	// Problems is the list of everything that is wrong, failures first: of the watcher, and of the slots of the others.
	Problems []Problem `json:"problems"`
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
	BlockedKeys int64 `json:"blocked_keys"` // ordering keys with any of these, counted for each topic; 0 if more than 50,000 envelopes wait
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

// Overview reads the watchers and nodes with two small queries. All counts come from the figures,
// which [Operator.Run] renews about every two seconds while an operator reads them. So the cost
// does not depend on the size of the outbox.
func (o Operator) Overview(ctx context.Context) (Overview, error) {
	status, err := ReadStatus(ctx, o.State)
	if err != nil {
		return Overview{}, err
	}
	members, err := o.Nodes().read(ctx)
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
	if !slices.ContainsFunc(mine, func(slot SlotStatus) bool { return slot.HasOwner() }) {
		if figures.watched, err = o.inspectWatched(ctx, false); err != nil {
			return Overview{}, err
		}
	}

	view := Overview{
		At:            time.Now().UTC(),
		CountedAt:     figures.at,
		Watcher:       o.Watcher,
		Slots:         status.Slots,
		Nodes:         newNodes(members, status),
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

	facts := newFacts(o, &view, members)
	facts.Unreadable, facts.Health, facts.Letters = figures.watched, figures.health, figures.letters
	facts.Oplog = problems.Oplog{Oldest: figures.oldest, Newest: figures.newest}
	for _, topic := range view.WaitingTopics {
		facts.Waiting[topic.Topic] = problems.Waiting{Events: topic.Retry + topic.Blocked + topic.Parked, Oldest: topic.Oldest}
	}
	view.Problems = problems.List(facts)
	return view, nil
}

// newFacts returns the facts that every overview has.
func newFacts(op Operator, view *Overview, members []nodes.Node) problems.Facts {
	return problems.Facts{Now: view.At, Watcher: op.Watcher, Slots: view.Slots, Nodes: members, Waiting: map[string]problems.Waiting{}, TopicCommand: op.TopicCommand}
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
	facts := newFacts(o, &view, nil)
	facts.CountsFail = problem
	// The reason may be that the watched names cannot be read. This is a second opinion, so its own failure is none.
	facts.Unreadable, _ = o.inspectWatched(ctx, false)
	view.Problems = problems.List(facts)
	return view, nil
}

// inspectWatched returns the names of the configuration whose events are not delivered, or may get lost. The names of another watcher are
// unknown.
func (o Operator) inspectWatched(ctx context.Context, owned bool) ([]outboxes.Finding, error) {
	if o.Inspect == nil || !o.isConfigured() {
		return nil, nil
	}
	found, err := o.Inspect(ctx, owned)
	// Without the privilege to list, the names are unknown.
	if mongodb.HasCode(err, mongodb.CodeUnauthorized) {
		return nil, nil
	}
	return found, err
}
