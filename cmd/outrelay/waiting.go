package main

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func newWaitingCommand(program *program) *cobra.Command {
	return newGroup(&cobra.Command{
		Use:   "waiting",
		Short: "Count and list the envelopes that wait",
		Long: `An envelope that cannot be sent waits in the state database. It is parked until its topic can be
written, waits for a retry because Kafka rejected its record, or is blocked by an earlier envelope of
its key. A scheduled envelope that is due, and one that was requeued or replayed, is queued until it
is sent. These commands show how many envelopes wait, since when, and which ones.`,
	}, newWaitingListCommand(program), newWaitingSummaryCommand(program))
}

func newWaitingSummaryCommand(program *program) *cobra.Command {
	var collection string
	cmd := &cobra.Command{
		Use:   "summary",
		Short: "Count waiting envelopes and dead letters by collection, reason and topic",
		Long: `Count the waiting and scheduled envelopes, and the dead letters that were not requeued, by collection,
reason and topic.`,
		Args: noArgs,
	}

	action := program.addReadFlags(cmd)
	// It reads every envelope that waits.
	action.limit = 0
	addCollectionFlag(cmd, &collection)
	setList(cmd, action, waitingGroups, func(ctx context.Context, op admin.Operator, _ []string) ([]admin.WaitingGroup, error) {
		return op.Waiting().Summary(ctx, collection)
	})
	return cmd
}

var waitingGroups = listing[admin.WaitingGroup]{
	name: "groups", empty: "no envelope waits", head: "COUNT\tREASON\tTOPIC\tCOLLECTION\tOLDEST, OR FIRST DUE",
	cells: func(g admin.WaitingGroup) cells {
		return cells{formatThousands(g.Count), g.Reason, g.Topic, g.Collection, formatLocal(g.Oldest)}
	},
}

func newWaitingListCommand(program *program) *cobra.Command {
	var filter admin.WaitingFilter
	var limit int
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List waiting envelopes by key in the order of sending, without payloads",
		Args:  noArgs,
	}

	action := program.addReadFlags(cmd)
	// The list may have 10,000 envelopes.
	action.limit = 0
	addWaitingFlags(cmd, &filter)
	cmd.Flags().StringVar(&filter.Reason, "reason", "", "retry, blocked, parked or queued; default: any")
	addLimitFlag(cmd, &limit, admin.DefaultPage, admin.MaxWaiting, "maximum number of envelopes")

	setList(cmd, action, waitingListing, func(ctx context.Context, op admin.Operator, _ []string) ([]admin.WaitingEnvelope, error) {
		return op.Waiting().List(ctx, filter, limit)
	})
	return cmd
}

var waitingListing = listing[admin.WaitingEnvelope]{
	name: "waiting", empty: "no envelope waits", head: "KEY\tID\tTYPE\tREASON\tTOPICS\tATTEMPTS\tNEXT\tWHY",
	cells: func(e admin.WaitingEnvelope) cells {
		return cells{
			truncate(e.Key, 40), quoteArgument(e.ID), e.Type, e.Reason, strings.Join(e.Topics, " "), e.Attempts, formatNext(e.NextAt),
			truncate(e.Why, 100),
		}
	},
}
