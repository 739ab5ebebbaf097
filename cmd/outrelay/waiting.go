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
		Short: "Count and list the envelopes that wait, and act on the messages that handlers retry",
		Long: `An envelope that cannot be sent waits in the state database. It is parked until its topic can be
written, waits for a retry because Kafka rejected its record, or is blocked by an earlier envelope of
its key. A scheduled envelope that is due, and one that was requeued or replayed, is queued until it
is sent. These commands show how many envelopes wait, since when, and which ones.

With --source handler, list and summary show the messages that handlers of consumers retry, and the
later messages of their keys. They are in the databases of the outboxes and of consumers.databases,
in the collection inbox_waiting. retry and discard act on these messages; outrelay failed acts on envelopes.`,
	}, newWaitingListCommand(program), newWaitingSummaryCommand(program), newWaitingRetryCommand(program), newWaitingDiscardCommand(program))
}

func newWaitingSummaryCommand(program *program) *cobra.Command {
	var collection, source string
	cmd := &cobra.Command{
		Use:   "summary",
		Short: "Count waiting and scheduled envelopes, or the messages of each handler",
		Long: `Count the waiting and scheduled envelopes by collection, reason and topic. With --source handler, count the
messages that handlers retry by group, handler and topic; the handler that fails for the longest time comes first.
outrelay dead summary counts dead letters.`,
		Args: noArgs,
	}

	action := program.addReadFlags(cmd)
	// It reads every envelope that waits.
	action.limit = 0
	addCollectionFlag(cmd, &collection)
	handlers := addHandlerWaitingFlags(cmd, &source, admin.FromRelay)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		isHandler, err := checkSource(cmd, source, handlers, "collection")
		if err != nil {
			return err
		}
		if isHandler {
			return showList(cmd.Context(), action, handlerWaitingGroups, func(ctx context.Context, op admin.Operator) ([]admin.HandlerWaitingGroup, error) {
				return op.HandlerWaiting().Summary(ctx, *handlers)
			})
		}
		return showList(cmd.Context(), action, waitingGroups, func(ctx context.Context, op admin.Operator) ([]admin.WaitingGroup, error) {
			return op.Waiting().Summary(ctx, collection)
		})
	}
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
	var source string
	cmd := &cobra.Command{
		Use:   "list [ID...]",
		Short: "List waiting envelopes, or the messages that handlers retry, without payloads",
		Long: `List waiting envelopes by key in the order of sending. With --source handler, list the messages that
handlers retry by group, handler, topic and key: their attempts, the last reason and the next attempt.
A message without attempts follows the message of its key above it.`,
	}

	action := program.addReadFlags(cmd)
	// The total counts all envelopes that match.
	action.limit = 0
	addCollectionFlag(cmd, &filter.Collection)
	handlers := addHandlerWaitingFlags(cmd, &source, admin.FromRelay)
	cmd.Flags().StringVar(&filter.Reason, "reason", "", "retry, blocked, parked or queued; default: any")
	paging := addPagingFlags(cmd, admin.DefaultPage, admin.MaxPage, "envelopes or messages")

	action.setRun(cmd, func(ctx context.Context, op admin.Operator, ids []string) error {
		isHandler, err := checkSource(cmd, source, handlers, "collection", "reason")
		if err != nil {
			return err
		}
		if isHandler {
			handlers.IDs = toFilterIDs(ids)
			page, err := op.HandlerWaiting().List(ctx, *handlers, paging.limit, paging.after)
			if err != nil {
				return err
			}
			return handlerListing.show(ctx, action, op, page)
		}

		filter.Topic, filter.Key, filter.IDs = handlers.Topic, handlers.Key, toFilterIDs(ids)
		page, err := listWaiting(ctx, op, filter, paging)
		if err != nil {
			return err
		}
		return waitingListing.show(ctx, action, op, page)
	})
	return cmd
}

// listWaiting reads a page of waiting envelopes. If none waits, it returns an error for a watcher that has read no collection: its
// name may be wrong.
func listWaiting(
	ctx context.Context, op admin.Operator, filter admin.WaitingFilter, paging *paging,
) (admin.Page[admin.WaitingEnvelope], error) {
	page, err := op.Waiting().List(ctx, filter, paging.limit, paging.after)
	if err == nil && page.Total == 0 {
		_, err = op.Collections(ctx, "")
	}
	return page, err
}

var waitingListing = listing[admin.WaitingEnvelope]{
	noun: "waiting envelope", empty: "no envelope waits", head: "KEY\tID\tTYPE\tREASON\tTOPICS\tATTEMPTS\tNEXT\tWHY",
	cells: func(e admin.WaitingEnvelope) cells {
		return cells{
			truncate(e.Key, 40), quoteArgument(e.ID), e.Type, e.Reason, strings.Join(e.Topics, " "), e.Attempts, formatNext(e.NextAt),
			truncate(e.Why, 100),
		}
	},
}
