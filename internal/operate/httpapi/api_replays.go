package httpapi

import (
	"context"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// ReplayRequest is a request with an order.
type ReplayRequest struct {
	Scope
	Body admin.ReplayOrder
}

// ReplayRef identifies one replay.
type ReplayRef struct {
	Scope
	ID string `path:"id" pattern:"^[A-Za-z0-9-]{1,64}$"`
}

func (a *api) addReplays() {
	addList(a, "/replays", "list-replays", "List the latest replays of the watcher", "replays",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Limit int `query:"limit" minimum:"1" maximum:"1000" default:"100"`
		},
		) ([]admin.ReplayInfo, error) {
			return op.Replays().List(ctx, input.Limit)
		})

	addQuery(a, "/replays/{id}", "show-replay", "Show one replay, with the number of queued envelopes",
		func(ctx context.Context, op admin.Operator, input *ReplayRef) (admin.ReplayInfo, error) {
			return op.Replays().Get(ctx, input.ID)
		})

	addAction(a, "/replays/plan", "plan-replay", "Count the envelopes that an order would send again, by topic",
		func(ctx context.Context, op admin.Operator, input *ReplayRequest) (admin.ReplayPlan, error) {
			return op.Replays().Plan(ctx, input.Body)
		}, forViewers)

	addAction(a, "/replays", "start-replay", "Start a replay of delivered envelopes in this process",
		func(ctx context.Context, op admin.Operator, input *ReplayRequest) (admin.ReplayInfo, error) {
			return op.Replays().Start(ctx, input.Body)
		})

	addAction(a, "/replays/{id}/cancel", "cancel-replay", "Cancel a replay; envelopes that are already queued are sent",
		func(ctx context.Context, op admin.Operator, input *ReplayRef) (done, error) {
			return done{true, "canceled; envelopes that were queued are sent"}, op.Replays().Cancel(ctx, input.ID)
		})

	addAction(a, "/replays/{id}/resume", "resume-replay", "Continue an interrupted replay in this process",
		func(ctx context.Context, op admin.Operator, input *ReplayRef) (admin.ReplayInfo, error) {
			return op.Replays().Resume(ctx, input.ID)
		})
}
