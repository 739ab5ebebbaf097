package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/admin"
)

func newFailedCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "failed",
		Short: "Look at envelopes that were refused and wait for another attempt, and reset them",
		Long: `An envelope that a topic refused for its own reason is tried again with growing pauses, and later ones of its key wait
behind it. After the last attempt it is a dead letter: see outrelay dead.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newFailedListCommand(p), newFailedResetCommand(p), newFailedRetryCommand(p))
	return c
}

func newFailedListCommand(p *program) *cobra.Command {
	var collection string
	var limit int
	c := &cobra.Command{
		Use:   "list",
		Short: "List failed envelopes, those that failed last first, at most 100",
		Args:  cobra.NoArgs,
	}
	a := p.addReadFlags(c)
	addCollectionFlag(c, &collection)
	c.Flags().IntVar(&limit, "limit", 100, "envelopes, at most 100")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if limit < 1 || limit > 100 {
			return fmt.Errorf("--limit must be from 1 to 100")
		}
		return a.withOperatorBriefly(c.Context(), func(ctx context.Context, o admin.Operator) error {
			list, err := o.FailedList(ctx, collection, limit)
			if err != nil {
				return err
			}
			return a.printResult(struct {
				Failed []admin.FailedEnvelope `json:"failed"`
			}{list}, func(w io.Writer) error { return printFailed(w, list) })
		})
	}
	return c
}

func addCollectionFlag(c *cobra.Command, collection *string) {
	c.Flags().StringVar(collection, "collection", "", "only those of this `outbox`, as database.collection; default: all of the watcher's")
}

func printFailed(w io.Writer, list []admin.FailedEnvelope) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(w, "no envelope has failed")
		return err
	}
	return writeTable(w, "FAILED\tID\tTYPE\tKEY\tATTEMPTS\tNEXT\tTOPIC\tCLASS\tREASON", func(row func(...any)) {
		for _, e := range list {
			row(e.FailedAt.Local().Format(time.DateTime), e.ID, e.Type, truncate(e.Key, 40), e.Attempts, e.NextAt.Local().Format(time.TimeOnly), e.Topic, e.Class, truncate(e.Reason, 100))
		}
	})
}

func newFailedResetCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "reset ID...",
		Short: "Take the failed attempts off envelopes: they are tried again at once, as often as new ones",
		Long:  `Envelopes of these ids that wait for another reason, or were sent meanwhile, are left alone.`,
		Args:  cobra.MinimumNArgs(1),
	}
	return p.newFailedAction(c, "reset", admin.Operator.FailedReset)
}

func newFailedRetryCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "retry [ID...]",
		Short: "Try failed envelopes again now instead of when they are due; their attempts still count",
		Long:  `Without an id it is one batch: those that outrelay failed list shows.`,
	}
	return p.newFailedAction(c, "retried", admin.Operator.FailedRetry)
}

func (p *program) newFailedAction(c *cobra.Command, done string, act func(admin.Operator, context.Context, string, []string, bool) (admin.FailedOutcome, error)) *cobra.Command {
	var collection string
	a := p.addChangeFlags(c)
	addCollectionFlag(c, &collection)
	c.RunE = func(c *cobra.Command, ids []string) error {
		return a.withOperator(c.Context(), func(ctx context.Context, o admin.Operator) error {
			before, err := act(o, ctx, collection, ids, true)
			if err != nil {
				return err
			}
			got := before
			if before.Failed > 0 && !a.dryRun {
				if err := a.confirm(ctx, "try "+countNoun(before.Failed, "failed envelope")+" again now"); err != nil {
					return err
				}
				if got, err = act(o, ctx, collection, ids, false); err != nil {
					return err
				}
			}
			got.DryRun = a.dryRun
			return a.printResult(got, func(w io.Writer) error {
				if a.dryRun {
					_, err := fmt.Fprintf(w, "%s would be %s\n", countNoun(got.Failed, "failed envelope"), done)
					return err
				}
				_, err := fmt.Fprintf(w, "%s %s\n", countNoun(got.Done, "failed envelope"), done)
				return err
			})
		})
	}
	return c
}
