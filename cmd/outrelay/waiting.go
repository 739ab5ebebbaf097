package main

import (
	"context"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/admin"
)

func newWaitingCommand(p *program) *cobra.Command {
	return newGroup(&cobra.Command{
		Use:   "waiting",
		Short: "Count and list the envelopes that wait in the outbox",
		Long: `An envelope that cannot be sent waits in its outbox. It is parked until its topic can be written,
waits for a retry because Kafka rejected its record, is blocked by an earlier envelope of its key,
or is scheduled. These commands show how many envelopes wait, since when, and which ones.`,
	}, newWaitingListCommand(p), newWaitingSummaryCommand(p))
}

func newWaitingSummaryCommand(p *program) *cobra.Command {
	var collection string
	c := &cobra.Command{
		Use:   "summary",
		Short: "Count waiting envelopes and dead letters by collection, state and topic",
		Long: `Count the waiting envelopes, and the dead letters that were not requeued, by collection, state and
topic.`,
		Args: noArgs,
	}

	a := p.addReadFlags(c)
	addCollectionFlag(c, &collection)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return show(c.Context(), a, func(ctx context.Context, op admin.Operator) (waitingGroups, error) {
			groups, err := op.Waiting().Summary(ctx, collection)
			return waitingGroups{groups}, err
		}, printWaitingGroups)
	}
	return c
}

// waitingGroups is the output of `outrelay waiting summary --json`.
type waitingGroups struct {
	Groups []admin.WaitingGroup `json:"groups"`
}

func printWaitingGroups(w io.Writer, all waitingGroups) error {
	head := "COUNT\tSTATE\tTOPIC\tCOLLECTION\tOLDEST, OR FIRST DUE"
	return writeList(w, "no envelope waits", head, all.Groups, func(g admin.WaitingGroup, row func(...any)) {
		row(formatThousands(g.Count), g.State, g.Topic, g.Collection, formatLocal(g.Oldest))
	})
}

func newWaitingListCommand(p *program) *cobra.Command {
	var f admin.WaitingFilter
	var limit int
	c := &cobra.Command{
		Use:   "list",
		Short: "List waiting envelopes by key in the order of sending, without payloads",
		Args:  noArgs,
	}

	a := p.addReadFlags(c)
	addCollectionFlag(c, &f.Collection)
	c.Flags().StringVar(&f.State, "state", "", "retry, blocked or parked; default: any")
	c.Flags().StringVar(&f.Topic, "topic", "", "only envelopes that wait for this `topic`")
	c.Flags().StringVar(&f.Key, "key", "", "only envelopes with this ordering `key`")
	addLimitFlag(c, &limit, admin.DefaultPage, admin.MaxWaiting, "maximum number of envelopes")

	c.RunE = func(c *cobra.Command, _ []string) error {
		return show(c.Context(), a, func(ctx context.Context, op admin.Operator) (waitingList, error) {
			list, err := op.Waiting().List(ctx, f, limit)
			return waitingList{list}, err
		}, printWaiting)
	}
	return c
}

// waitingList is the output of `outrelay waiting list --json`.
type waitingList struct {
	Waiting []admin.WaitingEnvelope `json:"waiting"`
}

func printWaiting(w io.Writer, all waitingList) error {
	head := "KEY\tID\tTYPE\tSTATE\tTOPICS\tATTEMPTS\tNEXT\tREASON"
	return writeList(w, "no envelope waits", head, all.Waiting, func(e admin.WaitingEnvelope, row func(...any)) {
		next := ""
		if e.NextAt != nil {
			next = e.NextAt.Local().Format(time.TimeOnly)
		}
		row(truncate(e.Key, 40), quoteArgument(e.ID), e.Type, e.State, strings.Join(e.Topics, " "), e.Attempts, next, truncate(e.Reason, 100))
	})
}
