package opspage

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/admin"
)

// UseCases is what the page asks for and does; [admin.Desk] has all of it.
type UseCases interface {
	looking
	deadLetters
	running
	keeping
}

var _ UseCases = admin.Desk{}

// looking changes nothing.
type looking interface {
	Overview(ctx context.Context) (admin.Overview, error)
	Nodes(ctx context.Context) ([]admin.Node, error)
	Events(ctx context.Context, f admin.EventFilter, limit int, after string) (admin.EventPage, error)
	Pending(ctx context.Context) ([]admin.PendingTopic, error)
	WaitingPage(ctx context.Context, f admin.WaitingFilter, limit int, after string) (admin.WaitingPage, error)
	Lookup(ctx context.Context, q admin.LookupQuery) (admin.LookupResult, error)
	ScheduledList(ctx context.Context, f admin.ScheduledFilter, limit int, after string) (admin.ScheduledPage, error)
	ScheduledSummary(ctx context.Context, f admin.ScheduledFilter) ([]admin.ScheduledGroup, error)
	SagaTypes(ctx context.Context) ([]admin.SagaType, error)
	Sagas(ctx context.Context, database, saga string, limit int, after string) (admin.SagaPage, error)
	Saga(ctx context.Context, database, saga, id string, payload bool) (admin.Saga, error)
	Inboxes(ctx context.Context) ([]admin.InboxCounts, error)
	InboxMarks(ctx context.Context, database, collection string) ([]admin.InboxMark, error)
	ReplayList(ctx context.Context, limit int) ([]admin.ReplayInfo, error)
	Collections(ctx context.Context, only string) ([]string, error)
}

// deadLetters are read, given back, changed and thrown away.
type deadLetters interface {
	DeadList(ctx context.Context, f admin.DeadFilter, limit int, after string) (admin.DeadPage, error)
	DeadCount(ctx context.Context, f admin.DeadFilter) (int64, error)
	DeadSummary(ctx context.Context, f admin.DeadFilter) ([]admin.DeadGroup, error)
	DeadShow(ctx context.Context, ref admin.DeadRef, payload bool) (admin.DeadLetter, error)
	DeadRequeue(ctx context.Context, f admin.DeadFilter, opts admin.DeadOptions, did func(int64)) (admin.DeadOutcome, error)
	DeadDiscard(ctx context.Context, f admin.DeadFilter, dryRun bool, did func(int64)) (admin.DeadDiscarded, error)
	DeadEdit(ctx context.Context, ref admin.DeadRef, e admin.DeadEdit, opts admin.DeadOptions) (admin.DeadEdited, error)
}

// running is who works, and whether.
type running interface {
	Slots(ctx context.Context) ([]admin.Watcher, error)
	Pause(ctx context.Context) error
	Resume(ctx context.Context) error
	Pin(ctx context.Context, node string) error
	StepDown(ctx context.Context, hold time.Duration) error
	NodeRemove(ctx context.Context, node string, force bool) error
	NodeRelease(ctx context.Context, node string, hold time.Duration) ([]string, error)
}

// keeping is what lies in the collections.
type keeping interface {
	ScheduledCancel(ctx context.Context, f admin.ScheduledFilter, progress func(int64)) (int64, error)
	Reschedule(ctx context.Context, f admin.ScheduledFilter, to time.Time) (admin.Rescheduled, error)
	Purge(ctx context.Context, p admin.Purge) (admin.PurgeReport, error)
	ReplayPlan(ctx context.Context, o admin.ReplayOrder) (admin.ReplayPlan, error)
	ReplayStart(ctx context.Context, o admin.ReplayOrder) (admin.ReplayInfo, error)
	ReplayCancel(ctx context.Context, id string) error
	ReplayResume(ctx context.Context, id string) (admin.ReplayInfo, error)
	InboxPurge(ctx context.Context, p admin.InboxPurge) (admin.InboxPurged, error)
	InboxRelease(ctx context.Context, database, collection string, force, dryRun bool) (admin.InboxReleased, error)
	IndexesVerify(ctx context.Context) (admin.Verification, error)
	IndexesRebuild(ctx context.Context) (admin.Verification, error)
	Clear(ctx context.Context, c admin.ClearOrder) (admin.Cleared, error)
	FailedRetry(ctx context.Context, collection string, ids []string, dryRun bool) (admin.FailedOutcome, error)
	FailedReset(ctx context.Context, collection string, ids []string, dryRun bool) (admin.FailedOutcome, error)
}
