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
	Topics         []string   `json:"topics,omitempty" maxItems:"100" doc:"Send only to these topics."`
	Collections    []string   `json:"collections,omitempty" maxItems:"100"`
	Rate           float64    `json:"rate,omitempty" minimum:"0" maximum:"1000000" doc:"Envelopes per second; 0 means as fast as the relay accepts them."`
	Force          bool       `json:"force,omitempty" doc:"Also send to compacted topics."`
}

func (b ReplayBody) order() admin.ReplayOrder {
	return admin.ReplayOrder{
		From: timeOrZero(b.From), To: timeOrZero(b.To), IDs: b.IDs, Keys: b.Keys,
		Types: b.Types, AggregateTypes: b.AggregateTypes, Topics: b.Topics, Collections: b.Collections,
		Rate: b.Rate, Force: b.Force,
	}
}

// ReplayRequest is a request with an order.
type ReplayRequest struct {
	Scope
	Body ReplayBody
}

// ReplayRef identifies one replay.
type ReplayRef struct {
	Scope
	ID string `path:"id" pattern:"^[A-Za-z0-9-]{1,64}$"`
}

// replayList is the response of the list.
type replayList struct {
	Replays []admin.ReplayInfo `json:"replays"`
}

func (a *api) addReplays() {
	addQuery(a, "/replays", "list-replays", "List the latest replays of the watcher",
		func(ctx context.Context, op admin.Operator, in *struct {
			Scope
			Limit int `query:"limit" minimum:"1" maximum:"1000" default:"100"`
		},
		) (replayList, error) {
			list, err := op.Replays().List(ctx, in.Limit)
			return replayList{list}, err
		})

	addQuery(a, "/replays/{id}", "show-replay", "Show one replay, with the number of queued envelopes",
		func(ctx context.Context, op admin.Operator, in *ReplayRef) (admin.ReplayInfo, error) {
			return op.Replays().Get(ctx, in.ID)
		})

	addAction(a, "/replays/plan", "plan-replay", "Count the envelopes that an order would send again, by topic",
		func(ctx context.Context, op admin.Operator, in *ReplayRequest) (admin.ReplayPlan, error) {
			return op.Replays().Plan(ctx, in.Body.order())
		}, forViewers)

	addAction(a, "/replays", "start-replay", "Start a replay of delivered envelopes in this process",
		func(ctx context.Context, op admin.Operator, in *ReplayRequest) (admin.ReplayInfo, error) {
			return op.Replays().Start(ctx, in.Body.order())
		})

	addAction(a, "/replays/{id}/cancel", "cancel-replay", "Cancel a replay; envelopes that are already queued are sent",
		func(ctx context.Context, op admin.Operator, in *ReplayRef) (done, error) {
			return done{true, "canceled; envelopes that were queued are sent"}, op.Replays().Cancel(ctx, in.ID)
		})

	addAction(a, "/replays/{id}/resume", "resume-replay", "Continue an interrupted replay in this process",
		func(ctx context.Context, op admin.Operator, in *ReplayRef) (admin.ReplayInfo, error) {
			return op.Replays().Resume(ctx, in.ID)
		})
}
