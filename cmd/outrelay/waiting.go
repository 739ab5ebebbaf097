package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/admin"
)

func newWaitingCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "waiting",
		Short: "Count and list the envelopes that wait in the outbox",
		Long: `An envelope that cannot be sent waits in its outbox. It is parked until its topic can be written,
waits for a retry because Kafka rejected its record, is blocked by an earlier envelope of its key,
or is scheduled. These commands show how many envelopes wait, since when, and which ones.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newWaitingListCommand(p), newWaitingSummaryCommand(p))
	return c
}

func newWaitingSummaryCommand(p *program) *cobra.Command {
	var collection string
	c := &cobra.Command{
		Use:   "summary",
		Short: "Count waiting envelopes and dead letters by collection, state and topic",
		Long: `Count the waiting envelopes, and the dead letters that were not requeued, by collection, state and
topic.`,
		Args: cobra.NoArgs,
	}

	a := p.addReadFlags(c)
	addCollectionFlag(c, &collection)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return a.withOperator(c.Context(), func(ctx context.Context, o admin.Operator) error {
			groups, err := o.Waiting().Summary(ctx, collection)
			if err != nil {
				return err
			}

			result := struct {
				Groups []admin.WaitingGroup `json:"groups"`
			}{groups}
			return a.printResult(result, func(w io.Writer) error { return printWaitingGroups(w, groups) })
		})
	}
	return c
}

func printWaitingGroups(w io.Writer, groups []admin.WaitingGroup) error {
	if len(groups) == 0 {
		_, err := fmt.Fprintln(w, "no envelope waits")
		return err
	}

	return writeTable(w, "COUNT\tSTATE\tTOPIC\tCOLLECTION\tOLDEST, OR FIRST DUE", func(row func(...any)) {
		for _, g := range groups {
			at := ""
			if g.Oldest != nil {
				at = g.Oldest.Local().Format(time.DateTime)
			}
			row(formatThousands(g.Count), g.State, g.Topic, g.Collection, at)
		}
	})
}

func newWaitingListCommand(p *program) *cobra.Command {
	var f admin.WaitingFilter
	var limit int
	c := &cobra.Command{
		Use:   "list",
		Short: "List waiting envelopes by key in the order of sending, without payloads",
		Args:  cobra.NoArgs,
	}

	a := p.addReadFlags(c)
	addCollectionFlag(c, &f.Collection)
	c.Flags().StringVar(&f.State, "state", "", "retry, blocked or parked; default: any")
	c.Flags().StringVar(&f.Topic, "topic", "", "only envelopes that wait for this `topic`")
	c.Flags().StringVar(&f.Key, "key", "", "only envelopes with this ordering `key`")
	c.Flags().IntVar(&limit, "limit", 100, fmt.Sprintf("maximum number of envelopes, at most %d", admin.MaxWaiting))

	c.RunE = func(c *cobra.Command, _ []string) error {
		return a.withOperator(c.Context(), func(ctx context.Context, o admin.Operator) error {
			list, err := o.Waiting().List(ctx, f, limit)
			if err != nil {
				return err
			}

			result := struct {
				Waiting []admin.WaitingEnvelope `json:"waiting"`
			}{list}
			return a.printResult(result, func(w io.Writer) error { return printWaiting(w, list) })
		})
	}
	return c
}

func printWaiting(w io.Writer, list []admin.WaitingEnvelope) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(w, "no envelope waits")
		return err
	}

	return writeTable(w, "KEY\tID\tTYPE\tSTATE\tTOPICS\tATTEMPTS\tNEXT\tREASON", func(row func(...any)) {
		for _, e := range list {
			next := ""
			if e.NextAt != nil {
				next = e.NextAt.Local().Format(time.TimeOnly)
			}
			row(truncate(e.Key, 40), e.ID, e.Type, e.State, strings.Join(e.Topics, " "), e.Attempts, next, truncate(e.Reason, 100))
		}
	})
}
