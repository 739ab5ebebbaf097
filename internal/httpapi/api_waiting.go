package httpapi

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/admin"
)

// pendingList is the answer of pending.
type pendingList struct {
	Topics []admin.PendingTopic `json:"topics"`
}

// waitingGroups is the answer of the summary of what waits.
type waitingGroups struct {
	Groups []admin.WaitingGroup `json:"groups"`
}

// failedList is the answer of failed.
type failedList struct {
	Failed []admin.FailedEnvelope `json:"failed"`
}

// Collection narrows a request to one outbox.
type Collection struct {
	Collection string `query:"collection" maxLength:"255" doc:"Only this outbox, as database.collection."`
}

// FailedAction is what is done to failed envelopes.
type FailedAction struct {
	Scope
	Body struct {
		Collection string   `json:"collection,omitempty" maxLength:"255"`
		IDs        []string `json:"ids,omitempty" maxItems:"1000"`
		DryRun     bool     `json:"dry_run,omitempty"`
	}
}

func (a *api) waiting() {
	look(a, "/pending", "pending", "What waits, by topic, the oldest first, with what the owner says of topics that cannot be written", func(ctx context.Context, op admin.Operator, _ *Empty) (pendingList, error) {
		list, err := op.Waiting().Topics(ctx)
		return pendingList{list}, err
	})
	look(a, "/waiting/summary", "summarize-waiting", "Counts by collection, state and topic, scheduled and dead ones too", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Collection
	},
	) (waitingGroups, error) {
		list, err := op.Waiting().Summary(ctx, in.Collection.Collection)
		return waitingGroups{list}, err
	})
	look(a, "/waiting", "list-waiting", "Envelopes that could not be sent in their turn", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Paging
		Collection
		State string `query:"state" enum:"retry,blocked,parked"`
		Topic string `query:"topic" maxLength:"255"`
		Key   string `query:"key" maxLength:"4096"`
	},
	) (admin.WaitingPage, error) {
		return op.Waiting().Page(ctx, admin.WaitingFilter{Collection: in.Collection.Collection, State: in.State, Topic: in.Topic, Key: in.Key}, in.Limit, in.After)
	})
	look(a, "/failed", "list-failed", "Envelopes that were refused and will be tried again, those that failed last first", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Collection
		Limit int `query:"limit" minimum:"1" maximum:"100" default:"100"`
	},
	) (failedList, error) {
		list, err := op.Waiting().Failed(ctx, in.Collection.Collection, in.Limit)
		return failedList{list}, err
	})
	act(a, "/failed/reset", "reset-failed", "Take the failed attempts off envelopes: they are tried again at once, as often as new ones", func(ctx context.Context, op admin.Operator, in *FailedAction) (admin.FailedOutcome, error) {
		return op.Waiting().Reset(ctx, in.Body.Collection, in.Body.IDs, in.Body.DryRun)
	})
	act(a, "/failed/retry", "retry-failed", "Try failed envelopes now instead of when they are due; without ids one batch of them", func(ctx context.Context, op admin.Operator, in *FailedAction) (admin.FailedOutcome, error) {
		return op.Waiting().Retry(ctx, in.Body.Collection, in.Body.IDs, in.Body.DryRun)
	})
}

// ScheduledQuery says which scheduled envelopes, in a query.
type ScheduledQuery struct {
	Collection
	IDs           []string  `query:"id" maxItems:"1000" doc:"Only these, separated by commas."`
	Type          string    `query:"type" maxLength:"255"`
	AggregateType string    `query:"aggregate_type" maxLength:"255"`
	From          time.Time `query:"due_from"`
	To            time.Time `query:"due_before"`
}

func (q ScheduledQuery) filter() admin.ScheduledFilter {
	return admin.ScheduledFilter{Collection: q.Collection.Collection, IDs: q.IDs, Type: q.Type, AggregateType: q.AggregateType, From: q.From, To: q.To}
}

// ScheduledSelection says which scheduled envelopes, in a body.
type ScheduledSelection struct {
	Collection    string     `json:"collection,omitempty" maxLength:"255"`
	IDs           []string   `json:"ids,omitempty" maxItems:"1000"`
	Type          string     `json:"type,omitempty" maxLength:"255"`
	AggregateType string     `json:"aggregate_type,omitempty" maxLength:"255"`
	DueFrom       *time.Time `json:"due_from,omitempty"`
	DueBefore     *time.Time `json:"due_before,omitempty"`
	All           bool       `json:"all,omitempty" doc:"Everything is meant, where there is no condition."`
}

func (s ScheduledSelection) filter() admin.ScheduledFilter {
	return admin.ScheduledFilter{Collection: s.Collection, IDs: s.IDs, Type: s.Type, AggregateType: s.AggregateType, From: or(s.DueFrom), To: or(s.DueBefore), All: s.All}
}

// or is the time, or the zero time.
func or(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return *t
}

// scheduledGroups is the answer of the summary.
type scheduledGroups struct {
	Groups []admin.ScheduledGroup `json:"groups"`
}

// cancelled is the answer to a cancellation.
type cancelled struct {
	DryRun    bool  `json:"dry_run"`
	Matched   int64 `json:"matched"`
	Cancelled int64 `json:"cancelled"`
}

func (a *api) scheduled() {
	look(a, "/scheduled", "list-scheduled", "Envelopes that wait for their time, by collection and due time", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Paging
		ScheduledQuery
	},
	) (admin.ScheduledPage, error) {
		return op.Schedule().List(ctx, in.filter(), in.Limit, in.After)
	})
	look(a, "/scheduled/summary", "summarize-scheduled", "Counts by type, with the first and the last due time", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		ScheduledQuery
	},
	) (scheduledGroups, error) {
		list, err := op.Schedule().Summary(ctx, in.filter())
		return scheduledGroups{list}, err
	})
	act(a, "/scheduled/cancel", "cancel-scheduled", "Take back scheduled envelopes that no watcher has taken yet", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Body struct {
			Filter ScheduledSelection `json:"filter"`
			Preview
		}
	},
	) (cancelled, error) {
		out := cancelled{DryRun: in.Body.DryRun}
		f := in.Body.Filter.filter()
		if f.Empty() && !f.All {
			return out, admin.ErrNoCondition
		}
		first, err := op.Schedule().List(ctx, f, 1, "")
		if out.Matched = first.Total; err != nil || in.Body.DryRun {
			return out, err
		}
		if err := in.Body.expected(out.Matched); err != nil {
			return out, err
		}
		out.Cancelled, err = op.Schedule().Cancel(ctx, f, nil)
		return out, err
	})
	act(a, "/scheduled/reschedule", "reschedule", "Move scheduled envelopes to another time", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Body struct {
			Collection string    `json:"collection,omitempty" maxLength:"255"`
			IDs        []string  `json:"ids" minItems:"1" maxItems:"1000"`
			To         time.Time `json:"to"`
		}
	},
	) (admin.Rescheduled, error) {
		return op.Schedule().Move(ctx, admin.ScheduledFilter{Collection: in.Body.Collection, IDs: in.Body.IDs}, in.Body.To)
	})
}
