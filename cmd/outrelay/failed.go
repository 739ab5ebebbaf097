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
	c.RunE = func(c *cobra.Command, _ []string) error {
		return showBriefly(c.Context(), a, func(ctx context.Context, op admin.Operator) (failedList, error) {
			list, err := op.Waiting().Failed(ctx, collection, limit)
			return failedList{list}, err
		}, printFailed)
	}
	return c
}

func addCollectionFlag(c *cobra.Command, collection *string) {
	c.Flags().StringVar(collection, "collection", "", "only this `outbox`, as database.collection; default: all of the watcher")
}

// failedList is the output of `outrelay failed list --json`.
type failedList struct {
	Failed []admin.FailedEnvelope `json:"failed"`
}

func printFailed(w io.Writer, list failedList) error {
	head := "FAILED\tID\tTYPE\tKEY\tATTEMPTS\tNEXT\tTOPIC\tCLASS\tREASON"
	return writeList(w, "no envelope has failed", head, list.Failed, func(e admin.FailedEnvelope, row func(...any)) {
		row(formatLocal(&e.FailedAt), quoteArgument(e.ID), e.Type, truncate(e.Key, 40), e.Attempts,
			e.NextAt.Local().Format(time.TimeOnly), e.Topic, e.Class, truncate(e.Reason, 100))
	})
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

	c.RunE = func(c *cobra.Command, ids []string) error {
		return a.withOperator(c.Context(), func(ctx context.Context, o admin.Operator) error {
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
