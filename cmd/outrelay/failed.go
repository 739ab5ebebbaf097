package main

import (
	"context"
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func newFailedCommand(program *program) *cobra.Command {
	return newGroup(&cobra.Command{
		Use:   "failed",
		Short: "List envelopes that wait for a retry, retry them now, or reset them",
		Long: `If Kafka rejects the record of an envelope, the envelope is retried with growing delays. Later
envelopes of its key are blocked until then. After the last attempt the envelope becomes a dead
letter: see outrelay dead.`,
	}, newFailedListCommand(program), newFailedResetCommand(program), newFailedRetryCommand(program))
}

func newFailedListCommand(program *program) *cobra.Command {
	filter := admin.WaitingFilter{Failed: true}
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List failed envelopes by key in the order of sending, without payloads",
		Args:  noArgs,
	}

	action := program.addReadFlags(cmd)
	addWaitingFlags(cmd, &filter)
	paging := addPagingFlags(cmd, admin.DefaultPage, admin.MaxPage, "envelopes")
	setPages(cmd, action, failedListing, func(ctx context.Context, op admin.Operator, _ []string) (admin.Page[admin.WaitingEnvelope], error) {
		return listWaiting(ctx, op, filter, paging)
	})
	return cmd
}

// addWaitingFlags adds the flags of a filter, except those for reasons and ids.
func addWaitingFlags(cmd *cobra.Command, filter *admin.WaitingFilter) {
	addCollectionFlag(cmd, &filter.Collection)
	cmd.Flags().StringVar(&filter.Topic, "topic", "", "only envelopes that wait for this `topic`")
	cmd.Flags().StringVar(&filter.Key, "key", "", "only envelopes with this ordering `key`")
}

func addCollectionFlag(cmd *cobra.Command, collection *string) {
	cmd.Flags().StringVar(collection, "collection", "", "only this `outbox`, as database.collection; default: all of the watcher")
}

var failedListing = listing[admin.WaitingEnvelope]{
	noun: "failed envelope", empty: "no envelope has failed", head: "FAILED\tID\tTYPE\tKEY\tATTEMPTS\tNEXT\tTOPIC\tCLASS\tREASON",
	cells: func(e admin.WaitingEnvelope) cells {
		var at *time.Time
		var last admin.WaitingError
		if e.Error != nil {
			last = *e.Error
			at = &last.At
		}
		return cells{
			formatLocal(at), quoteArgument(e.ID), e.Type, truncate(e.Key, 40), e.Attempts, formatNext(e.NextAt), last.Topic, last.Class,
			truncate(last.Reason, 100),
		}
	},
}

// formatNext formats the time of the next attempt, which is near.
func formatNext(next *time.Time) string {
	if next == nil {
		return ""
	}
	return next.Local().Format(time.TimeOnly)
}

func newFailedResetCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "reset [ID...]",
		Short: "Reset the attempts of failed envelopes and retry them now",
		Long: `Set the number of failed attempts back to 0 and retry the envelopes at once. Envelopes that wait for
another reason, or that were sent in the meantime, are left alone.`,
	}
	return program.newFailedAction(cmd, "reset", admin.ResetAttempts)
}

func newFailedRetryCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "retry [ID...]",
		Short: "Retry failed envelopes now; their attempts still count",
	}
	return program.newFailedAction(cmd, "retried", admin.KeepAttempts)
}

// newFailedAction makes cmd count the failed envelopes, ask for confirmation and act on them. done is the
// past participle for the output.
func (p *program) newFailedAction(cmd *cobra.Command, done string, attempts admin.Attempts) *cobra.Command {
	var filter admin.WaitingFilter
	action := p.addChangeFlags(cmd)
	addWaitingFlags(cmd, &filter)
	cmd.Flags().BoolVar(&filter.All, "all", false, "all failed envelopes, if there is no id and no other condition")

	action.setRun(cmd, func(ctx context.Context, operator admin.Operator, ids []string) error {
		filter.IDs = toFilterIDs(ids)
		if filter.Empty() && !filter.All {
			return errors.New("give ids or conditions, or --all for all failed envelopes; outrelay failed list lists them")
		}
		// The first call only counts, so that the question can name the number.
		got, err := actConfirmed(ctx, action, func(dryRun bool) (admin.FailedOutcome, error) {
			return operator.Waiting().Retry(ctx, filter, attempts, admin.Effect(dryRun))
		}, func(found admin.FailedOutcome) string {
			if found.Failed == 0 {
				return ""
			}
			return "retry " + countNoun(found.Failed, "failed envelope") + " now"
		})
		if err != nil {
			return err
		}

		got.DryRun = action.dryRun
		text := nothingMatches
		if got.Failed > 0 {
			text = action.chooseText(countNoun(got.Done, "failed envelope"), countNoun(got.Failed, "failed envelope")+" would be") + " " + done
		}
		return action.printNamed(got, nil, text, "matches no failed envelope; outrelay failed list lists the envelopes", got.NotFound)
	})
	return cmd
}
