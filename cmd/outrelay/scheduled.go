package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func newScheduledCommand(program *program) *cobra.Command {
	return newGroup(&cobra.Command{
		Use:   "scheduled",
		Short: "List scheduled envelopes, cancel them or change their due time",
		Long: `An envelope with a due time waits in its outbox until then. It can be canceled or rescheduled until
a watcher claims it for sending. Envelopes that are being sent are not listed and cannot be changed.`,
	}, newScheduledListCommand(program), newScheduledSummaryCommand(program), newScheduledCancelCommand(program),
		newScheduledRescheduleCommand(program))
}

// addScheduledFilterFlags adds the flags that select scheduled envelopes.
func addScheduledFilterFlags(cmd *cobra.Command) *admin.ScheduledFilter {
	filter := &admin.ScheduledFilter{}
	addCollectionFlag(cmd, &filter.Collection)
	flags := cmd.Flags()
	flags.StringVar(&filter.Type, "type", "", "only with this event `type`")
	flags.StringVar(&filter.AggregateType, "aggregate-type", "", "only with this aggregate `type`")
	addTimeFlag(cmd, &filter.From, "due-from", "due at or after this `time`, or at least so long from now, such as 2h", parseFutureTime)
	addTimeFlag(cmd, &filter.To, "due-before", "due before this `time`, or less than so long from now, such as 2h", parseFutureTime)
	return filter
}

func newScheduledListCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list [ID...]",
		Short: "List scheduled envelopes by due time, without their payloads",
	}

	action, filter := program.addReadFlags(cmd), addScheduledFilterFlags(cmd)
	// The total counts all envelopes that match.
	action.limit = 0
	paging := addPagingFlags(cmd, admin.DefaultPage, admin.MaxScheduledPage, "envelopes")
	setPages(cmd, action, scheduledListing, func(ctx context.Context, op admin.Operator, ids []string) (admin.Page[admin.Scheduled], error) {
		filter.IDs = toFilterIDs(ids)
		return op.Schedule().List(ctx, *filter, paging.limit, paging.after)
	})
	return cmd
}

var scheduledListing = listing[admin.Scheduled]{
	noun: "scheduled envelope", empty: "no scheduled envelope matches", head: "DUE\tID\tTYPE\tAGGREGATE\tCOLLECTION\tEXPIRES",
	cells: func(scheduled admin.Scheduled) cells {
		return cells{
			formatLocal(&scheduled.DueAt), quoteArgument(scheduled.ID), scheduled.Type, scheduled.AggregateType + "/" + scheduled.AggregateID, scheduled.Collection,
			formatLocal(&scheduled.ExpiresAt),
		}
	},
}

// scheduledGroups is the output of `outrelay scheduled summary --json`, and of a dry run.
type scheduledGroups struct {
	Groups []admin.ScheduledGroup `json:"groups"`
	Count  int64                  `json:"count"`
}

// countScheduled counts the envelopes that filter selects, by type and in all.
func countScheduled(ctx context.Context, operator admin.Operator, filter admin.ScheduledFilter) (scheduledGroups, error) {
	groups, err := operator.Schedule().Summary(ctx, filter)
	scheduledGroups := scheduledGroups{Groups: groups}
	for _, x := range groups {
		scheduledGroups.Count += x.Count
	}
	return scheduledGroups, err
}

// showScheduledCounts prints the envelopes that filter selects, by type. A dry run prints only these.
func (a *operatorCommand) showScheduledCounts(ctx context.Context, filter admin.ScheduledFilter) error {
	return show(ctx, a, func(ctx context.Context, operator admin.Operator) (scheduledGroups, error) {
		return countScheduled(ctx, operator, filter)
	}, writeScheduledGroups)
}

func writeScheduledGroups(out io.Writer, groups scheduledGroups) {
	if groups.Count == 0 {
		fmt.Fprintln(out, "no scheduled envelope matches")
		return
	}

	writeTable(out, "COUNT\tTYPE\tEARLIEST\tLATEST", groups.Groups, func(group admin.ScheduledGroup) cells {
		return cells{formatThousands(group.Count), group.Type, formatLocal(&group.Earliest), formatLocal(&group.Latest)}
	})
	fmt.Fprintln(out, countNoun(groups.Count, "scheduled envelope"))
}

func newScheduledSummaryCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "summary [ID...]",
		Short: "Count scheduled envelopes by type, with their earliest and latest due time",
	}

	action, filter := program.addReadFlags(cmd), addScheduledFilterFlags(cmd)
	// Grouping reads all envelopes that match.
	action.limit = 0
	cmd.RunE = func(cmd *cobra.Command, ids []string) error {
		filter.IDs = toFilterIDs(ids)
		return action.showScheduledCounts(cmd.Context(), *filter)
	}
	return cmd
}

var errNoneScheduled = errors.New("no envelopes selected; pass ids, flags or --all")

func newScheduledCancelCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cancel [ID...]",
		Short: "Cancel scheduled envelopes for good",
		Long: `Remove the matching scheduled envelopes, unless a watcher has claimed them for sending. They will
never be delivered. If both ids and flags are given, an envelope must match all of them. The exit
code is 1 if an envelope with one of the ids is not canceled.`,
	}

	action, filter := program.addChangeFlags(cmd), addScheduledFilterFlags(cmd)
	cmd.Flags().BoolVar(&filter.All, "all", false, "all scheduled envelopes; required without another condition")
	cmd.RunE = func(cmd *cobra.Command, ids []string) error {
		filter.IDs = toFilterIDs(ids)
		// A mistyped flag must not cancel everything.
		if filter.Empty() && !filter.All && !action.dryRun {
			return errNoneScheduled
		}

		if action.dryRun {
			return action.showScheduledCounts(cmd.Context(), *filter)
		}
		return action.withOperator(cmd.Context(), func(ctx context.Context, operator admin.Operator) error {
			return action.cancelScheduled(ctx, operator, *filter)
		})
	}
	return cmd
}

// cancelScheduled counts the envelopes that filter selects, asks for confirmation and cancels them.
func (a *operatorCommand) cancelScheduled(ctx context.Context, operator admin.Operator, filter admin.ScheduledFilter) error {
	groups, err := countScheduled(ctx, operator, filter)
	if err != nil {
		return err
	}

	if groups.Count == 0 && len(filter.IDs) == 0 {
		return a.printLine(admin.Cancelled{NotScheduled: []string{}}, nothingMatches)
	}
	if groups.Count > 0 {
		action := "cancel " + countNoun(groups.Count, "scheduled envelope") + ", which will never be delivered"
		if err := a.confirm(ctx, action); err != nil {
			return err
		}
	}

	bar := a.startProgress("canceling", groups.Count)
	done, err := operator.Schedule().Cancel(ctx, filter, bar.setDone)
	bar.clear()
	// If some envelopes are gone, the result counts them even though an error ended the command.
	if err != nil && done.Cancelled == 0 {
		return err
	}
	return a.printNamed(done, err, "canceled "+countNoun(done.Cancelled, "scheduled envelope"), notScheduled, done.NotScheduled)
}

// notScheduled states why an action on scheduled envelopes did nothing with an id.
const notScheduled = "is not scheduled, or is being sent already"

func newScheduledRescheduleCommand(program *program) *cobra.Command {
	var at time.Time
	cmd := &cobra.Command{
		Use:   "reschedule [ID...] --to TIME",
		Short: "Change the due time of scheduled envelopes",
		Long: `Change the due time of the matching scheduled envelopes, unless a watcher has claimed them for
sending. If both ids and flags are given, an envelope must match all of them. The exit code is 1 if
an envelope with one of the ids is not scheduled any more.`,
	}

	action, filter := program.addChangeFlags(cmd), addScheduledFilterFlags(cmd)
	addTimeFlag(cmd, &at, "to", "the new `time`, or so long from now, such as 2h; 0s is now", parseFutureTime)
	cmd.Flags().BoolVar(&filter.All, "all", false, "all scheduled envelopes; required without another condition")
	cmd.RunE = func(cmd *cobra.Command, ids []string) error {
		filter.IDs = toFilterIDs(ids)
		switch {
		case at.IsZero():
			return errors.New("--to is missing: pass the new time, such as 2026-11-20T08:00:00Z or 2h")
		case action.dryRun:
			return action.showScheduledCounts(cmd.Context(), *filter)
		case filter.Empty() && !filter.All:
			return errNoneScheduled
		}
		return action.withOperator(cmd.Context(), func(ctx context.Context, operator admin.Operator) error {
			return action.reschedule(ctx, operator, *filter, at)
		})
	}
	return cmd
}

// reschedule moves the envelopes that filter selects. A selection by flags is counted first, and confirmed.
func (a *operatorCommand) reschedule(ctx context.Context, operator admin.Operator, filter admin.ScheduledFilter, dueAt time.Time) error {
	groups, err := countScheduled(ctx, operator, filter)
	if err != nil {
		return err
	}
	if len(filter.IDs) == 0 && groups.Count > 0 {
		if err := a.confirm(ctx, fmt.Sprintf("move %s to %s", countNoun(groups.Count, "scheduled envelope"), formatLocal(&dueAt))); err != nil {
			return err
		}
	}

	bar := a.startProgress("rescheduling", groups.Count)
	moved, err := operator.Schedule().Move(ctx, filter, dueAt, bar.setDone)
	bar.clear()
	if err != nil && moved.Moved == 0 {
		return err
	}
	text := fmt.Sprintf("moved %s to %s", countNoun(moved.Moved, "scheduled envelope"), moved.To.Format(time.RFC3339))
	if groups.Count == 0 && len(filter.IDs) == 0 {
		text = nothingMatches
	}
	return a.printNamed(moved, err, text, notScheduled, moved.NotScheduled)
}
