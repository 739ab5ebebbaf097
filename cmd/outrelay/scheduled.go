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

func newScheduledCommand(p *program) *cobra.Command {
	return newGroup(&cobra.Command{
		Use:   "scheduled",
		Short: "List scheduled envelopes, cancel them or change their due time",
		Long: `An envelope with a due time waits in its outbox until then. It can be canceled or rescheduled until
a watcher claims it for sending. Envelopes that are being sent are not listed and cannot be changed.`,
	}, newScheduledListCommand(p), newScheduledSummaryCommand(p), newScheduledCancelCommand(p),
		newScheduledRescheduleCommand(p))
}

// addScheduledFilterFlags adds the flags that select scheduled envelopes.
func addScheduledFilterFlags(c *cobra.Command) *admin.ScheduledFilter {
	f := &admin.ScheduledFilter{}
	addCollectionFlag(c, &f.Collection)
	flags := c.Flags()
	flags.StringVar(&f.Type, "type", "", "only with this event `type`")
	flags.StringVar(&f.AggregateType, "aggregate-type", "", "only with this aggregate `type`")
	addTimeFlag(c, &f.From, "due-from", "due at or after this `time`, or at least so long from now, such as 2h", parseFutureTime)
	addTimeFlag(c, &f.To, "due-before", "due before this `time`, or less than so long from now, such as 2h", parseFutureTime)
	return f
}

func newScheduledListCommand(p *program) *cobra.Command {
	var limit int
	var after string
	c := &cobra.Command{
		Use:   "list [ID...]",
		Short: "List scheduled envelopes by due time, without their payloads",
	}

	a, f := p.addReadFlags(c), addScheduledFilterFlags(c)
	// The total counts all envelopes that match.
	a.limit = 0
	addLimitFlag(c, &limit, admin.DefaultPage, admin.MaxScheduledPage, "envelopes on a page")
	c.Flags().StringVar(&after, "after", "", "the `cursor` that the previous page ended with")
	setShow(c, a, func(ctx context.Context, op admin.Operator, ids []string) (admin.ScheduledPage, error) {
		f.IDs = ids
		return op.Schedule().List(ctx, *f, limit, after)
	}, writeScheduled)
	return c
}

func writeScheduled(w io.Writer, page admin.ScheduledPage) {
	cellsOf := func(e admin.Scheduled) cells {
		return cells{
			formatLocal(&e.DueAt), quoteArgument(e.ID), e.Type, e.AggregateType + "/" + e.AggregateID, e.Collection,
			formatLocal(&e.ExpiresAt),
		}
	}
	writePage(w, "no scheduled envelope matches", "DUE\tID\tTYPE\tAGGREGATE\tCOLLECTION\tEXPIRES",
		page.Events, page.Total, "scheduled envelope", page.Next, cellsOf)
}

// scheduledGroups is the output of `outrelay scheduled summary --json`, and of a dry run.
type scheduledGroups struct {
	Groups []admin.ScheduledGroup `json:"groups"`
	Count  int64                  `json:"count"`
}

// countScheduled counts the envelopes that f selects, by type and in all.
func countScheduled(ctx context.Context, o admin.Operator, f admin.ScheduledFilter) (scheduledGroups, error) {
	groups, err := o.Schedule().Summary(ctx, f)
	g := scheduledGroups{Groups: groups}
	for _, x := range groups {
		g.Count += x.Count
	}
	return g, err
}

// showScheduledCounts prints the envelopes that f selects, by type. A dry run prints only these.
func (a *operatorCommand) showScheduledCounts(ctx context.Context, f admin.ScheduledFilter) error {
	return show(ctx, a, func(ctx context.Context, o admin.Operator) (scheduledGroups, error) {
		return countScheduled(ctx, o, f)
	}, writeScheduledGroups)
}

func writeScheduledGroups(w io.Writer, g scheduledGroups) {
	if g.Count == 0 {
		fmt.Fprintln(w, "no scheduled envelope matches")
		return
	}

	writeTable(w, "COUNT\tTYPE\tEARLIEST\tLATEST", g.Groups, func(x admin.ScheduledGroup) cells {
		return cells{formatThousands(x.Count), x.Type, formatLocal(&x.Earliest), formatLocal(&x.Latest)}
	})
	fmt.Fprintln(w, countNoun(g.Count, "scheduled envelope"))
}

func newScheduledSummaryCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "summary [ID...]",
		Short: "Count scheduled envelopes by type, with their earliest and latest due time",
	}

	a, f := p.addReadFlags(c), addScheduledFilterFlags(c)
	// Grouping reads all envelopes that match.
	a.limit = 0
	c.RunE = func(c *cobra.Command, ids []string) error {
		f.IDs = ids
		return a.showScheduledCounts(c.Context(), *f)
	}
	return c
}

// cancelledScheduled is the output of `outrelay scheduled cancel --json`.
type cancelledScheduled struct {
	Cancelled int64 `json:"cancelled"`
}

func newScheduledCancelCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "cancel [ID...]",
		Short: "Cancel scheduled envelopes for good",
		Long: `Remove the matching scheduled envelopes, unless a watcher has claimed them for sending. They will
never be delivered. If both ids and flags are given, an envelope must match all of them.`,
	}

	a, f := p.addChangeFlags(c), addScheduledFilterFlags(c)
	c.Flags().BoolVar(&f.All, "all", false, "all scheduled envelopes; required without another condition")
	c.RunE = func(c *cobra.Command, ids []string) error {
		f.IDs = ids
		// A mistyped flag must not cancel everything.
		if f.Empty() && !f.All && !a.dryRun {
			return errors.New("no envelopes selected; pass ids, flags or --all")
		}

		if a.dryRun {
			return a.showScheduledCounts(c.Context(), *f)
		}
		return a.withOperator(c.Context(), func(ctx context.Context, o admin.Operator) error {
			return a.cancelScheduled(ctx, o, *f)
		})
	}
	return c
}

// cancelScheduled counts the envelopes that f selects, asks for confirmation and cancels them.
func (a *operatorCommand) cancelScheduled(ctx context.Context, o admin.Operator, f admin.ScheduledFilter) error {
	g, err := countScheduled(ctx, o, f)
	if err != nil {
		return err
	}

	var done cancelledScheduled
	if g.Count > 0 {
		action := "cancel " + countNoun(g.Count, "scheduled envelope") + ", which will never be delivered"
		if err := a.confirm(ctx, action); err != nil {
			return err
		}

		bar := a.startProgress("canceling", g.Count)
		done.Cancelled, err = o.Schedule().Cancel(ctx, f, bar.setDone)
		bar.clear()
		if err != nil {
			return err
		}
	}

	text := "canceled " + countNoun(done.Cancelled, "scheduled envelope")
	// Some ids may have become due between the count and the cancellation.
	missing := int64(len(f.IDs)) - done.Cancelled
	if missing > 0 {
		text += fmt.Sprintf("; %s of the ids are not scheduled, or are being sent already", formatThousands(missing))
	}
	err = a.printLine(done, "%s", text)
	if err == nil && missing > 0 {
		err = reportedError(exitConfig)
	}
	return err
}

func newScheduledRescheduleCommand(p *program) *cobra.Command {
	var collection string
	var at time.Time
	c := &cobra.Command{
		Use:   "reschedule ID... --to TIME",
		Short: "Change the due time of scheduled envelopes",
		Long: `Change the due time of the scheduled envelopes with these ids, unless a watcher has claimed them for
sending. The exit code is 1 if one of them is not scheduled any more.`,
		Args: minArgs(1),
	}

	a := p.addChangeFlags(c)
	c.Flags().StringVar(&collection, "collection", "",
		"the `outbox`, as database.collection; default: the outbox of the watcher that has the envelope")
	addTimeFlag(c, &at, "to", "the new `time`, or so long from now, such as 2h; 0s is now", parseFutureTime)
	c.RunE = func(c *cobra.Command, ids []string) error {
		if at.IsZero() {
			return errors.New("--to is missing: pass the new time, such as 2026-11-20T08:00:00Z or 2h")
		}

		f := admin.ScheduledFilter{Collection: collection, IDs: ids}
		if a.dryRun {
			return a.showScheduledCounts(c.Context(), f)
		}
		return a.withOperator(c.Context(), func(ctx context.Context, o admin.Operator) error {
			// Each id is moved on its own, so some may succeed and others not.
			r, err := o.Schedule().Move(ctx, f, at)
			if err != nil {
				return err
			}
			err = a.printResult(r, func(w io.Writer) {
				for _, id := range r.NotScheduled {
					fmt.Fprintf(w, "%s is not scheduled, or is being sent already\n", sanitizeLine(id))
				}
				moved := countNoun(int64(len(r.Moved)), "scheduled envelope")
				fmt.Fprintf(w, "moved %s to %s\n", moved, r.To.Format(time.RFC3339))
			})

			if err == nil && len(r.NotScheduled) > 0 {
				err = reportedError(exitConfig)
			}
			return err
		})
	}
	return c
}
