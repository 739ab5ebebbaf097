package main

import (
	"context"
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/admin"
)

func newFailedCommand(p *program) *cobra.Command {
	return newGroup(&cobra.Command{
		Use:   "failed",
		Short: "List envelopes that wait for a retry, retry them now, or reset them",
		Long: `If Kafka rejects the record of an envelope, the envelope is retried with growing delays. Later
envelopes of its key are blocked until then. After the last attempt the envelope becomes a dead
letter: see outrelay dead.`,
	}, newFailedListCommand(p), newFailedResetCommand(p), newFailedRetryCommand(p))
}

func newFailedListCommand(p *program) *cobra.Command {
	var collection string
	var limit int
	c := &cobra.Command{
		Use:   "list",
		Short: "List failed envelopes, the latest failures first, at most 100",
		Args:  noArgs,
	}

	a := p.addReadFlags(c)
	addCollectionFlag(c, &collection)
	addLimitFlag(c, &limit, 100, 100, "maximum number of envelopes")
	setList(c, a, failedListing, func(ctx context.Context, op admin.Operator, _ []string) ([]admin.FailedEnvelope, error) {
		return op.Waiting().Failed(ctx, collection, limit)
	})
	return c
}

func addCollectionFlag(c *cobra.Command, collection *string) {
	c.Flags().StringVar(collection, "collection", "", "only this `outbox`, as database.collection; default: all of the watcher")
}

var failedListing = listing[admin.FailedEnvelope]{
	name: "failed", empty: "no envelope has failed", head: "FAILED\tID\tTYPE\tKEY\tATTEMPTS\tNEXT\tTOPIC\tCLASS\tREASON",
	cells: func(e admin.FailedEnvelope) cells {
		return cells{
			formatLocal(&e.FailedAt), quoteArgument(e.ID), e.Type, truncate(e.Key, 40), e.Attempts,
			e.NextAt.Local().Format(time.TimeOnly), e.Topic, e.Class, truncate(e.Reason, 100),
		}
	},
}

func newFailedResetCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "reset ID...",
		Short: "Reset the attempts of failed envelopes and retry them now",
		Long: `Set the number of failed attempts back to 0 and retry the envelopes at once. Envelopes that wait for
another reason, or that were sent in the meantime, are left alone.`,
		Args: minArgs(1),
	}
	return p.newFailedAction(c, "reset", admin.Waiting.Reset)
}

func newFailedRetryCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "retry [ID...]",
		Short: "Retry failed envelopes now; their attempts still count",
		Long:  "Without ids, retry the envelopes that `outrelay failed list` shows (at most 100).",
	}
	return p.newFailedAction(c, "retried", admin.Waiting.Retry)
}

// failedAction is Reset or Retry of admin.Waiting: (waiting, ctx, collection, ids, dryRun).
type failedAction func(admin.Waiting, context.Context, string, []string, bool) (admin.FailedOutcome, error)

// newFailedAction makes c count the failed envelopes, ask for confirmation and act on them. done is the
// past participle for the output.
func (p *program) newFailedAction(c *cobra.Command, done string, act failedAction) *cobra.Command {
	var collection string
	a := p.addChangeFlags(c)
	addCollectionFlag(c, &collection)

	a.setRun(c, func(ctx context.Context, o admin.Operator, ids []string) error {
		// The first call only counts, so that the question can name the number.
		got, err := actConfirmed(ctx, a, func(dryRun bool) (admin.FailedOutcome, error) {
			return act(o.Waiting(), ctx, collection, ids, dryRun)
		}, func(found admin.FailedOutcome) string {
			if found.Failed == 0 {
				return ""
			}
			return "retry " + countNoun(found.Failed, "failed envelope") + " now"
		})
		if err != nil {
			return err
		}

		// Named ids that match nothing are a mistake of the user. Without ids, there is nothing to retry.
		if len(ids) > 0 && got.Failed == 0 {
			return errors.New("no failed envelope has one of these ids; outrelay failed list lists the envelopes")
		}
		got.DryRun = a.dryRun
		text := a.chooseText(countNoun(got.Done, "failed envelope"), countNoun(got.Failed, "failed envelope")+" would be")
		return a.printLine(got, "%s %s", text, done)
	})
	return c
}
