package httpapi

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/tasks"
)

// Collection restricts a request to one outbox.
type Collection struct {
	Collection string `query:"collection" maxLength:"255" doc:"Only this outbox, as database.collection."`
}

// FilterAction is an action on all that matches a filter.
type FilterAction[F any] struct {
	Scope
	Body struct {
		Filter F `json:"filter"`
		Preview
	}
}

// FailedAction is an action on envelopes that Kafka rejected.
type FailedAction = FilterAction[admin.WaitingFilter]

// HandlerAction is an action on messages that handlers retry.
type HandlerAction = FilterAction[admin.HandlerWaitingFilter]

// actIfExpected plans an action, and carries it out as the task unless the request wants only the plan, or expects another number than
// count finds in the plan.
func actIfExpected[F, T any](
	ctx context.Context, input *FilterAction[F], task *tasks.Task, act func(ctx context.Context, filter F, effect admin.Effect) (T, error), count func(plan T) int64,
) (T, error) {
	plan, err := act(ctx, input.Body.Filter, admin.DryRun)
	if err != nil || input.Body.DryRun {
		return plan, err
	}

	matched := count(plan)
	if err := input.Body.checkExpected(matched); err != nil {
		return plan, err
	}
	task.SetTotal(matched)
	return act(ctx, input.Body.Filter, admin.ForReal)
}

// retryFailed makes failed envelopes due now.
func retryFailed(
	ctx context.Context, op admin.Operator, input *FailedAction, task *tasks.Task, attempts admin.Attempts,
) (admin.FailedOutcome, error) {
	act := func(ctx context.Context, filter admin.WaitingFilter, effect admin.Effect) (admin.FailedOutcome, error) {
		return op.Waiting().Retry(ctx, filter, attempts, effect)
	}
	return actIfExpected(ctx, input, task, act, func(plan admin.FailedOutcome) int64 { return plan.Failed })
}

func (a *api) addWaiting() {
	addList(a, "/waiting/topics", "waiting-topics", "Count the waiting envelopes by topic, with the reason if a topic cannot be written, oldest first", "topics",
		func(ctx context.Context, op admin.Operator, _ *Empty) ([]admin.WaitingTopic, error) {
			return op.Waiting().Topics(ctx)
		})

	addList(a, "/waiting/summary", "summarize-waiting", "Count waiting, scheduled and dead envelopes by collection, reason and topic", "groups",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Collection
		},
		) ([]admin.WaitingGroup, error) {
			return op.Waiting().Summary(ctx, input.Collection.Collection)
		})

	addQuery(a, "/waiting", "list-waiting", "List the envelopes that are parked, blocked or queued, or wait for a retry; failed=true lists the rejected ones",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Paging
			admin.WaitingFilter
		},
		) (admin.Page[admin.WaitingEnvelope], error) {
			return op.Waiting().List(ctx, input.WaitingFilter, input.Limit, input.After)
		})

	addLongAction(a, "/failed/reset", "reset-failed", "Reset the attempts of failed envelopes, and retry them now",
		func(ctx context.Context, op admin.Operator, input *FailedAction, task *tasks.Task) (admin.FailedOutcome, error) {
			return retryFailed(ctx, op, input, task, admin.ResetAttempts)
		})

	addLongAction(a, "/failed/retry", "retry-failed", "Retry failed envelopes now; their failed attempts still count",
		func(ctx context.Context, op admin.Operator, input *FailedAction, task *tasks.Task) (admin.FailedOutcome, error) {
			return retryFailed(ctx, op, input, task, admin.KeepAttempts)
		})
}

func (a *api) addHandlerWaiting() {
	addQuery(a, "/handlers/waiting", "list-handler-waiting", "List the messages that handlers retry, with their attempts, the last reason and the next attempt",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Paging
			admin.HandlerWaitingFilter
		},
		) (admin.Page[admin.HandlerMessage], error) {
			return op.HandlerWaiting().List(ctx, input.HandlerWaitingFilter, input.Limit, input.After)
		})

	addList(a, "/handlers/waiting/summary", "summarize-handler-waiting", "Count the messages that handlers retry by group, handler and topic, the longest failure first", "groups",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			admin.HandlerWaitingFilter
		},
		) ([]admin.HandlerWaitingGroup, error) {
			return op.HandlerWaiting().Summary(ctx, input.HandlerWaitingFilter)
		})

	addLongAction(a, "/handlers/waiting/retry", "retry-handler-waiting", "Let handlers try messages now that wait for a retry",
		func(ctx context.Context, op admin.Operator, input *HandlerAction, task *tasks.Task) (admin.HandlerRetried, error) {
			return actIfExpected(ctx, input, task, op.HandlerWaiting().Retry, func(plan admin.HandlerRetried) int64 { return plan.Retried })
		})

	addLongAction(a, "/handlers/waiting/discard", "discard-handler-waiting", "Make messages that handlers retry dead letters, without another attempt",
		func(ctx context.Context, op admin.Operator, input *HandlerAction, task *tasks.Task) (admin.HandlerDiscarded, error) {
			return actIfExpected(ctx, input, task, op.HandlerWaiting().Discard, func(plan admin.HandlerDiscarded) int64 { return plan.Matched })
		})
}

// ScheduledBody selects scheduled envelopes for an action.
type ScheduledBody struct {
	Filter admin.ScheduledFilter `json:"filter"`
	Preview
}

// ScheduledAction is an action on scheduled envelopes.
type ScheduledAction struct {
	Scope
	Body ScheduledBody
}

// count sets the total of the task to the number of the envelopes, and compares it with the expected number, if there is one.
func (b *ScheduledBody) count(ctx context.Context, op admin.Operator, task *tasks.Task) (int64, error) {
	// An empty filter is usually a mistake of a program.
	if err := admin.CheckSelection(b.Filter, b.Filter.All); err != nil {
		return 0, err
	}

	// A page of one envelope has the total of all.
	first, err := op.Schedule().List(ctx, b.Filter, 1, "")
	if err != nil || b.DryRun {
		return first.Total, err
	}
	task.SetTotal(first.Total)
	return first.Total, b.checkExpected(first.Total)
}

// rescheduled is the response to a move.
type rescheduled struct {
	DryRun  bool  `json:"dry_run"`
	Matched int64 `json:"matched"`
	admin.Rescheduled
}

// cancelled is the response to a cancellation.
type cancelled struct {
	DryRun  bool  `json:"dry_run"`
	Matched int64 `json:"matched"`
	admin.Cancelled
}

func (a *api) addScheduled() {
	addQuery(a, "/scheduled", "list-scheduled", "List scheduled envelopes by collection and due time",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Paging
			admin.ScheduledFilter
		},
		) (admin.Page[admin.Scheduled], error) {
			return op.Schedule().List(ctx, input.ScheduledFilter, input.Limit, input.After)
		})

	addList(a, "/scheduled/summary", "summarize-scheduled", "Count scheduled envelopes by type, with the first and last due time", "groups",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			admin.ScheduledFilter
		},
		) ([]admin.ScheduledGroup, error) {
			return op.Schedule().Summary(ctx, input.ScheduledFilter)
		})

	addLongAction(a, "/scheduled/cancel", "cancel-scheduled", "Cancel scheduled envelopes that no watcher has claimed yet",
		func(ctx context.Context, op admin.Operator, input *ScheduledAction, task *tasks.Task) (cancelled, error) {
			out := cancelled{DryRun: input.Body.DryRun, Cancelled: admin.Cancelled{NotScheduled: []string{}}}
			matched, err := input.Body.count(ctx, op, task)
			out.Matched = matched
			if err != nil || input.Body.DryRun {
				return out, err
			}
			out.Cancelled, err = op.Schedule().Cancel(ctx, input.Body.Filter, task.SetDone)
			return out, err
		})

	addLongAction(a, "/scheduled/reschedule", "reschedule", "Move scheduled envelopes that no watcher has claimed yet to another due time",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Body struct {
				ScheduledBody
				To time.Time `json:"to"`
			}
		}, task *tasks.Task,
		) (rescheduled, error) {
			body := &input.Body
			out := rescheduled{DryRun: body.DryRun, Rescheduled: admin.Rescheduled{To: body.To.UTC(), NotScheduled: []string{}}}
			matched, err := body.count(ctx, op, task)
			out.Matched = matched
			if err != nil || body.DryRun {
				return out, err
			}
			out.Rescheduled, err = op.Schedule().Move(ctx, body.Filter, body.To, task.SetDone)
			return out, err
		})
}
