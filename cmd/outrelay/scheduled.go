package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/admin"
)

func newScheduledCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "scheduled",
		Short: "Look at envelopes that wait for their time, cancel them or move them",
		Long: `An envelope with a due time waits in its outbox until then. Until a watcher takes it to send it can be cancelled or
moved; what is on its way is not shown here and cannot be had any more.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newScheduledListCommand(p), newScheduledSummaryCommand(p), newScheduledCancelCommand(p), newScheduledRescheduleCommand(p))
	return c
}

// scheduledFilter are the flags that say which envelopes.
type scheduledFilter struct {
	admin.ScheduledFilter
	from, before string
}

func addScheduledFilterFlags(c *cobra.Command) *scheduledFilter {
	f := &scheduledFilter{}
	flags := c.Flags()
	flags.StringVar(&f.Collection, "collection", "", "only those of this `outbox`, as database.collection; default: all of the watcher's")
	flags.StringVar(&f.Type, "type", "", "of this event `type`")
	flags.StringVar(&f.AggregateType, "aggregate-type", "", "of this aggregate `type`")
	flags.StringVar(&f.from, "due-from", "", "due at this `time` or later, or as in 2h so long from now at least")
	flags.StringVar(&f.before, "due-before", "", "due before this `time`, or as in 2h less than so long from now")
	return f
}

// parseArgs takes what needs parsing. The ids are the arguments of the command.
func (f *scheduledFilter) parseArgs(ids []string) (err error) {
	f.IDs = ids
	now := time.Now()
	if f.From, err = parseFutureTime("due-from", f.from, now); err == nil {
		f.To, err = parseFutureTime("due-before", f.before, now)
	}
	return err
}

// parseFutureTime reads the value of a flag that is a time or, as in 2h, so long from now. "" is the zero time. Without a zone it is
// UTC.
func parseFutureTime(flag, text string, now time.Time) (time.Time, error) {
	if d, err := time.ParseDuration(text); err == nil {
		return now.Add(d), nil
	}
	at, err := parsePastTime(flag, text, now)
	if err != nil {
		return at, fmt.Errorf("--%s %q is neither a time such as 2026-11-20T08:00:00Z nor a duration from now such as 2h", flag, text)
	}
	return at, nil
}

func newScheduledListCommand(p *program) *cobra.Command {
	var limit int
	var after string
	c := &cobra.Command{
		Use:   "list [ID...]",
		Short: "List scheduled envelopes, the next due first, without their payloads",
	}
	a, f := p.addReadFlags(c), addScheduledFilterFlags(c)
	c.Flags().IntVar(&limit, "limit", 100, "envelopes on a page, at most 10000")
	c.Flags().StringVar(&after, "after", "", "the `cursor` that the page before ended with")
	c.RunE = func(c *cobra.Command, ids []string) error {
		if err := f.parseArgs(ids); err != nil {
			return err
		}
		if limit < 1 || limit > 10_000 {
			return errors.New("--limit must be from 1 to 10000")
		}
		return a.withOperator(c.Context(), func(ctx context.Context, o admin.Operator) error {
			page, err := o.ScheduledList(ctx, f.ScheduledFilter, limit, after)
			if err != nil {
				return err
			}
			return a.printResult(page, func(w io.Writer) error { return printScheduled(w, page) })
		})
	}
	return c
}

func printScheduled(w io.Writer, page admin.ScheduledPage) error {
	if page.Total == 0 {
		_, err := fmt.Fprintln(w, "no scheduled envelope matches")
		return err
	}
	err := writeTable(w, "DUE\tID\tTYPE\tAGGREGATE\tCOLLECTION\tEXPIRES", func(row func(...any)) {
		for _, e := range page.Events {
			expires := "-"
			if !e.ExpiresAt.IsZero() {
				expires = e.ExpiresAt.Local().Format(time.DateTime)
			}
			row(e.DueAt.Local().Format(time.DateTime), e.ID, e.Type, e.AggregateType+"/"+e.AggregateID, e.Collection, expires)
		}
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "%s of %s\n", formatThousands(int64(len(page.Events))), countNoun(page.Total, "scheduled envelope"))
	if page.Next != "" {
		fmt.Fprintf(w, "next page: --after %s\n", page.Next)
	}
	return nil
}

// scheduledGroups is the answer of `outrelay scheduled summary --json`, and of a dry run.
type scheduledGroups struct {
	Groups []admin.ScheduledGroup `json:"groups"`
	Count  int64                  `json:"count"`
}

func countScheduled(ctx context.Context, o admin.Operator, f admin.ScheduledFilter) (scheduledGroups, error) {
	groups, err := o.ScheduledSummary(ctx, f)
	g := scheduledGroups{Groups: groups}
	for _, x := range groups {
		g.Count += x.Count
	}
	return g, err
}

func (g scheduledGroups) printGroups(w io.Writer) error {
	if g.Count == 0 {
		_, err := fmt.Fprintln(w, "no scheduled envelope matches")
		return err
	}
	err := writeTable(w, "COUNT\tTYPE\tEARLIEST\tLATEST", func(row func(...any)) {
		for _, x := range g.Groups {
			row(formatThousands(x.Count), x.Type, x.Earliest.Local().Format(time.DateTime), x.Latest.Local().Format(time.DateTime))
		}
	})
	if err == nil {
		_, err = fmt.Fprintln(w, countNoun(g.Count, "scheduled envelope"))
	}
	return err
}

func newScheduledSummaryCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "summary [ID...]",
		Short: "Count scheduled envelopes by type, with the earliest and the latest due time of each",
	}
	a, f := p.addReadFlags(c), addScheduledFilterFlags(c)
	c.RunE = func(c *cobra.Command, ids []string) error {
		if err := f.parseArgs(ids); err != nil {
			return err
		}
		return a.withOperator(c.Context(), func(ctx context.Context, o admin.Operator) error {
			g, err := countScheduled(ctx, o, f.ScheduledFilter)
			if err != nil {
				return err
			}
			return a.printResult(g, g.printGroups)
		})
	}
	return c
}

// cancelledScheduled is the answer of `outrelay scheduled cancel --json`.
type cancelledScheduled struct {
	Cancelled int64 `json:"cancelled"`
}

func newScheduledCancelCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "cancel [ID...]",
		Short: "Take scheduled envelopes back for good",
		Long: `Remove the scheduled envelopes that match, as long as no watcher has taken them to send; then they will never be
delivered. Ids and flags must hold all together.`,
	}
	a, f := p.addChangeFlags(c), addScheduledFilterFlags(c)
	c.Flags().BoolVar(&f.All, "all", false, "all of them; needed where nothing else says which")
	c.RunE = func(c *cobra.Command, ids []string) error {
		if err := f.parseArgs(ids); err != nil {
			return err
		}
		if f.Empty() && !f.All && !a.dryRun {
			return errors.New("nothing says which; give ids or flags, or --all")
		}
		return a.withOperator(c.Context(), func(ctx context.Context, o admin.Operator) error {
			g, err := countScheduled(ctx, o, f.ScheduledFilter)
			if err != nil || a.dryRun {
				if err == nil {
					err = a.printResult(g, g.printGroups)
				}
				return err
			}
			var done cancelledScheduled
			if g.Count > 0 {
				if err := a.confirm(ctx, "cancel "+countNoun(g.Count, "scheduled envelope")+", which will never be delivered"); err != nil {
					return err
				}
				bar := a.startProgress("cancelling", g.Count)
				done.Cancelled, err = o.ScheduledCancel(ctx, f.ScheduledFilter, bar.setDone)
				bar.clear()
				if err != nil {
					return err
				}
			}
			return a.printResult(done, func(w io.Writer) error {
				_, err := fmt.Fprintln(w, "cancelled "+countNoun(done.Cancelled, "scheduled envelope"))
				return err
			})
		})
	}
	return c
}

func newScheduledRescheduleCommand(p *program) *cobra.Command {
	var collection, to string
	c := &cobra.Command{
		Use:   "reschedule ID... --to TIME",
		Short: "Move scheduled envelopes to another time",
		Long: `Give the scheduled envelopes of these ids another due time, as long as no watcher has taken them to send. The exit code is
1 if one of them is not scheduled any more.`,
		Args: cobra.MinimumNArgs(1),
	}
	a := p.addChangeFlags(c)
	c.Flags().StringVar(&collection, "collection", "", "the `outbox`, as database.collection; default: whichever of the watcher's has it")
	c.Flags().StringVar(&to, "to", "", "the new `time`, or as in 2h so long from now; 0s is now")
	c.RunE = func(c *cobra.Command, ids []string) error {
		at, err := parseFutureTime("to", to, time.Now())
		if err != nil {
			return err
		}
		if at.IsZero() {
			return errors.New("--to must say when, such as 2026-11-20T08:00:00Z or 2h")
		}
		f := admin.ScheduledFilter{Collection: collection, IDs: ids}
		return a.withOperator(c.Context(), func(ctx context.Context, o admin.Operator) error {
			if a.dryRun {
				g, err := countScheduled(ctx, o, f)
				if err == nil {
					err = a.printResult(g, g.printGroups)
				}
				return err
			}
			r, err := o.Reschedule(ctx, f, at)
			if err != nil {
				return err
			}
			err = a.printResult(r, func(w io.Writer) error {
				for _, id := range r.NotScheduled {
					fmt.Fprintf(w, "%s is not scheduled, or on its way already\n", sanitizeLine(id))
				}
				_, err := fmt.Fprintf(w, "moved %s to %s\n", countNoun(int64(len(r.Moved)), "scheduled envelope"), r.To.Format(time.RFC3339))
				return err
			})
			if err == nil && len(r.NotScheduled) > 0 {
				err = reportedError(exitConfig)
			}
			return err
		})
	}
	return c
}
