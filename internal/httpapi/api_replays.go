package httpapi

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/admin"
)

// ReplayBody is an order to send delivered envelopes again.
type ReplayBody struct {
	From           *time.Time `json:"from,omitempty"`
	To             *time.Time `json:"to,omitempty"`
	IDs            []string   `json:"ids,omitempty" maxItems:"1000"`
	Keys           []string   `json:"keys,omitempty" maxItems:"1000"`
	Types          []string   `json:"types,omitempty" maxItems:"100"`
	AggregateTypes []string   `json:"aggregate_types,omitempty" maxItems:"100"`
	Topics         []string   `json:"topics,omitempty" maxItems:"100" doc:"Only to these."`
	Collections    []string   `json:"collections,omitempty" maxItems:"100"`
	Rate           float64    `json:"rate,omitempty" minimum:"0" maximum:"1000000" doc:"Envelopes a second; 0 is as fast as the relay takes them."`
	Force          bool       `json:"force,omitempty" doc:"Also into compacted topics."`
}

func (b ReplayBody) order() admin.ReplayOrder {
	return admin.ReplayOrder{
		From: or(b.From), To: or(b.To), IDs: b.IDs, Keys: b.Keys, Types: b.Types, AggregateTypes: b.AggregateTypes,
		Topics: b.Topics, Collections: b.Collections, Rate: b.Rate, Force: b.Force,
	}
}

// ReplayRequest is one with an order.
type ReplayRequest struct {
	Scope
	Body ReplayBody
}

// ReplayRef names one replay.
type ReplayRef struct {
	Scope
	ID string `path:"id" pattern:"^[A-Za-z0-9-]{1,64}$"`
}

// replayList is the answer of the list.
type replayList struct {
	Replays []admin.ReplayInfo `json:"replays"`
}

func (a *api) replays() {
	look(a, "/replays", "list-replays", "The latest replays of the watcher", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Limit int `query:"limit" minimum:"1" maximum:"1000" default:"100"`
	},
	) (replayList, error) {
		list, err := op.Replays().List(ctx, in.Limit)
		return replayList{list}, err
	})
	look(a, "/replays/{id}", "show-replay", "One replay, with how much is queued and not sent", func(ctx context.Context, op admin.Operator, in *ReplayRef) (admin.ReplayInfo, error) {
		return op.Replays().Get(ctx, in.ID)
	})
	act(a, "/replays/plan", "plan-replay", "Count what an order would send again, and to which topics", func(ctx context.Context, op admin.Operator, in *ReplayRequest) (admin.ReplayPlan, error) {
		return op.Replays().Plan(ctx, in.Body.order())
	}, viewers)
	act(a, "/replays", "start-replay", "Send delivered envelopes again; this process carries it out", func(ctx context.Context, op admin.Operator, in *ReplayRequest) (admin.ReplayInfo, error) {
		return op.Replays().Start(ctx, in.Body.order())
	})
	act(a, "/replays/{id}/cancel", "cancel-replay", "End a replay; what it has queued is sent", func(ctx context.Context, op admin.Operator, in *ReplayRef) (done, error) {
		return done{true, "cancelled; what was queued is sent"}, op.Replays().Cancel(ctx, in.ID)
	})
	act(a, "/replays/{id}/resume", "resume-replay", "Have this process go on with a replay that broke off", func(ctx context.Context, op admin.Operator, in *ReplayRef) (admin.ReplayInfo, error) {
		return op.Replays().Resume(ctx, in.ID)
	})
}
