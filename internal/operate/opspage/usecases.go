package opspage

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// UseCases are the use-cases that the page offers, by subject. Tests of the page replace them.
type UseCases struct {
	Operator operatorUseCases
	Lease    leaseUseCases
	Nodes    nodeUseCases
	Activity activityUseCases
	Letters  letterUseCases
	Waiting  waitingUseCases
	Handlers handlerUseCases
	Schedule scheduleUseCases
	Recovery recoveryUseCases
	Replays  replayUseCases
	Groups   groupUseCases
	Inboxes  inboxUseCases
	Sagas    sagaUseCases
}

// Of returns the use-cases of an operator.
func Of(op admin.Operator) UseCases {
	return UseCases{
		Operator: op,
		Lease:    op.Lease(),
		Nodes:    op.Nodes(),
		Activity: op.Activity(),
		Letters:  op.Letters(),
		Waiting:  op.Waiting(),
		Handlers: op.HandlerWaiting(),
		Schedule: op.Schedule(),
		Recovery: op.Recovery(),
		Replays:  op.Replays(),
		Groups:   op.Groups(),
		Inboxes:  op.Inboxes(),
		Sagas:    op.Sagas(),
	}
}

type operatorUseCases interface {
	Overview(ctx context.Context) (admin.Overview, error)
	Audit(ctx context.Context, f admin.AuditFilter, limit int, after string) (admin.Page[admin.AuditEntry], error)
	Lookup(ctx context.Context, q admin.LookupQuery) (admin.LookupResult, error)
	Conversation(ctx context.Context, q admin.ConversationQuery) (admin.Conversation, error)
	Collections(ctx context.Context, only string) ([]string, error)
	Acknowledge(ctx context.Context, problem string) error

	Purge(ctx context.Context, p admin.Purge) (admin.PurgeReport, error)
	Clear(ctx context.Context, c admin.ClearOrder) (admin.Cleared, error)
}

type leaseUseCases interface {
	Slots(ctx context.Context) ([]admin.SlotStatus, error)
	Pause(ctx context.Context) error
	Resume(ctx context.Context) error
	Pin(ctx context.Context, node string) error
	CheckStandby(ctx context.Context, hold time.Duration) error
	StepDown(ctx context.Context, order admin.StepDownOrder) error
}

type nodeUseCases interface {
	List(ctx context.Context) ([]admin.Node, error)
	Release(ctx context.Context, node string, hold time.Duration) ([]string, error)
	Remove(ctx context.Context, node string, removable admin.Removable) error
}

type activityUseCases interface {
	Minutes(ctx context.Context, watcher string, newest int) ([]admin.Minute, error)
	Topics(ctx context.Context) (admin.TopicList, error)
	Recent(ctx context.Context, topic string) (admin.RecentEvents, error)
	CreateTopic(ctx context.Context, order admin.TopicOrder) (admin.TopicCreated, error)
}

type letterUseCases interface {
	List(ctx context.Context, f admin.DeadFilter, limit int, after string) (admin.Page[admin.DeadLetter], error)
	Summary(ctx context.Context, f admin.DeadFilter) ([]admin.DeadGroup, error)
	Show(ctx context.Context, ref admin.DeadRef, detail admin.Detail) (admin.DeadLetter, error)
	Requeue(ctx context.Context, f admin.DeadFilter, opts admin.DeadOptions, did func(int64)) (admin.DeadOutcome, error)
	Discard(ctx context.Context, f admin.DeadFilter, effect admin.Effect, did func(int64)) (admin.DeadDiscarded, error)
	Edit(ctx context.Context, ref admin.DeadRef, e admin.DeadEdit, opts admin.DeadOptions) (admin.DeadEdited, error)
}

type waitingUseCases interface {
	Topics(ctx context.Context) ([]admin.WaitingTopic, error)
	List(ctx context.Context, f admin.WaitingFilter, limit int, after string) (admin.Page[admin.WaitingEnvelope], error)
	Retry(ctx context.Context, f admin.WaitingFilter, attempts admin.Attempts, effect admin.Effect) (admin.FailedOutcome, error)
}

type handlerUseCases interface {
	List(ctx context.Context, f admin.HandlerWaitingFilter, limit int, after string) (admin.Page[admin.HandlerMessage], error)
	Summary(ctx context.Context, f admin.HandlerWaitingFilter) ([]admin.HandlerWaitingGroup, error)
	Retry(ctx context.Context, f admin.HandlerWaitingFilter, effect admin.Effect) (admin.HandlerRetried, error)
	Discard(ctx context.Context, f admin.HandlerWaitingFilter, effect admin.Effect) (admin.HandlerDiscarded, error)
}

type scheduleUseCases interface {
	List(ctx context.Context, f admin.ScheduledFilter, limit int, after string) (admin.Page[admin.Scheduled], error)
	Summary(ctx context.Context, f admin.ScheduledFilter) ([]admin.ScheduledGroup, error)
	Cancel(ctx context.Context, f admin.ScheduledFilter, progress func(int64)) (admin.Cancelled, error)
	Move(ctx context.Context, f admin.ScheduledFilter, to time.Time, progress func(int64)) (admin.Rescheduled, error)
}

type recoveryUseCases interface {
	PassOver(ctx context.Context, order admin.SkipOrder) (admin.SkippedEvent, error)
}

type replayUseCases interface {
	List(ctx context.Context, limit int) ([]admin.ReplayInfo, error)
	Plan(ctx context.Context, o admin.ReplayOrder) (admin.ReplayPlan, error)
	Start(ctx context.Context, o admin.ReplayOrder) (admin.ReplayInfo, error)
	Cancel(ctx context.Context, id string) error
	Resume(ctx context.Context, id string) (admin.ReplayInfo, error)
}

type groupUseCases interface {
	List(ctx context.Context, all bool) (admin.GroupList, error)
	Show(ctx context.Context, group string) (admin.Group, error)
}

type inboxUseCases interface {
	List(ctx context.Context) ([]admin.InboxCounts, error)
	Marks(ctx context.Context, database, collection string) ([]admin.InboxMark, error)
	Purge(ctx context.Context, p admin.InboxPurge) (admin.InboxPurged, error)
	Release(ctx context.Context, database, collection string, force bool, effect admin.Effect) (admin.InboxReleased, error)
}

type sagaUseCases interface {
	Types(ctx context.Context) ([]admin.SagaType, error)
	List(ctx context.Context, database, saga string, limit int, after string) (admin.Page[admin.Saga], error)
	Show(ctx context.Context, database, saga, id string, payload bool) (admin.Saga, error)
}
