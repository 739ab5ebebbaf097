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

// recoverResult is the output of outrelay recover --json.
type recoverResult struct {
	Watcher string `json:"watcher"`
	Action  string `json:"action"` // sweep, accept-copy, release or skip
	DryRun  bool   `json:"dry_run"`
	Done    bool   `json:"done"`
	// Collections are the collections that a sweep delivers again. They are counted only for a dry run
	// or a confirmation.
	Collections []admin.SweepCount `json:"collections,omitempty"`
	Envelopes   int64              `json:"envelopes,omitempty"` // of all collections
	Released    string             `json:"released,omitempty"`  // the collection

	Skipped *admin.SkippedEvent `json:"skipped,omitempty"`
}

func newRecoverCommand(program *program) *cobra.Command {
	var acceptCopy, skip bool
	var release, slot string
	var event admin.SkipOrder
	var from time.Time
	cmd := &cobra.Command{
		Use:   "recover",
		Short: "Order a sweep after lost state, accept copied state, or release a collection",
		Long: `Without a flag, order a sweep. The next owner of the watcher delivers each envelope of the watched
collections that was written at or after --from (default: all envelopes), marks it as
outrelay-redelivered, and continues with the change stream. Use it if the document of the watcher is
lost, or if the watcher halted because of a gap or a dropped collection. Consumers may get envelopes
a second time, with the same id.

If the document has a position, the sweep begins there at the latest. If the document is lost, earlier
envelopes count as delivered and are purged after the retention, also if they waited: choose a time
before the lag began and before the oldest event that waited. The sweep starts some minutes earlier
because of transactions that were open. --dry-run counts by the same rules.

--accept-copy accepts state that was copied from another replica set, and orders a sweep from the stored
position on: the envelopes of the copy arrive marked. --release NS lets another watcher read NS.

--skip passes over one event that the change stream cannot read or the relay cannot deliver: the event
that --collection and --id name, or without them the event at which the stream stands. The event
becomes a dead letter of class skipped, and the owner continues after it.`,
		Args: noArgs,
	}

	action := program.addChangeFlags(cmd)
	cmd.Flags().BoolVar(&acceptCopy, "accept-copy", false, "accept state that was copied from another replica set")
	cmd.Flags().StringVar(&release, "release", "", "release the claim on a `collection`, as database.collection")
	cmd.Flags().BoolVar(&skip, "skip", false, "pass over one event, which becomes a dead letter")
	cmd.Flags().StringVar(&event.Collection, "collection", "", "with --skip: the `collection` of the event, as database.collection")
	cmd.Flags().StringVar(&event.ID, "id", "", "with --skip: the `id` of the event")
	addTimeFlag(cmd, &from, "from",
		"sweep from this `time`, with its zone, or from so long ago, such as 2h; default: everything", parseZonedPastTime)
	addSlotFlag(cmd, &slot)
	cmd.MarkFlagsMutuallyExclusive("accept-copy", "release", "from", "skip")
	cmd.MarkFlagsRequiredTogether("collection", "id")

	action.setRun(cmd, func(ctx context.Context, operator admin.Operator, _ []string) error {
		// The slot is a property of the operator, not an argument of the three actions.
		operator.Slot = slot
		result := recoverResult{Watcher: operator.Watcher, DryRun: action.dryRun, Released: release}
		var err error
		switch {
		case acceptCopy:
			result.Action = "accept-copy"
			err = action.orderSweep(ctx, &result, sweepOrder{
				plan: func() ([]admin.SweepCount, error) { return operator.Recovery().PlanAdoption(ctx) },
				give: func() error { return operator.Recovery().Adopt(ctx) },
			})
		case skip:
			result.Action = "skip"
			err = action.skipEvent(ctx, operator, event, &result)
		case event.ID != "":
			err = errors.New("--collection and --id need --skip")
		case release != "":
			result.Action = "release"
			err = action.releaseCollection(ctx, operator, release)
		default:
			result.Action = "sweep"
			err = action.orderSweep(ctx, &result, sweepOrder{
				plan: func() ([]admin.SweepCount, error) { return operator.Recovery().PlanSweep(ctx, from) },
				give: func() error { return operator.Recovery().OrderSweep(ctx, from) },
			})
		}
		if err != nil {
			return err
		}

		result.Done = !action.dryRun
		return action.printResult(result, result.writeRecovery)
	})
	return cmd
}

// releaseCollection releases the claim on ns. It returns an error if there is no such claim, also for a
// dry run.
func (a *operatorCommand) releaseCollection(ctx context.Context, operator admin.Operator, ns string) error {
	namespaces, err := operator.Collections(ctx, ns)
	if err != nil || a.dryRun || len(namespaces) == 0 {
		return err
	}
	_, err = operator.Recovery().ReleaseCollection(ctx, ns)
	return err
}

// skipEvent shows the event, asks for confirmation, and orders to pass over it.
func (a *operatorCommand) skipEvent(ctx context.Context, operator admin.Operator, event admin.SkipOrder, result *recoverResult) error {
	act := func(dryRun bool) (admin.SkippedEvent, error) {
		event.DryRun = dryRun
		found, err := operator.Recovery().PassOver(ctx, event)
		// The event that was confirmed is the one that is passed over.
		if err == nil && dryRun && event.ID == "" {
			event.Collection, event.ID = found.Collection, found.ID
		}
		return found, err
	}
	skipped, err := actConfirmed(ctx, a, act, func(found admin.SkippedEvent) string { return "pass over " + describeSkipped(&found) })
	result.Skipped = &skipped
	return err
}

func describeSkipped(event *admin.SkippedEvent) string {
	text := fmt.Sprintf("the event %s of %s", quoteArgument(event.ID), sanitizeLine(event.Collection))
	if event.Bytes == 0 {
		return text + ", whose document does not exist any more"
	}
	return fmt.Sprintf("%s (%s)", text, countNoun(int64(event.Bytes), "byte"))
}

// sweepOrder is an action that orders a sweep.
type sweepOrder struct {
	plan func() ([]admin.SweepCount, error) // counts the envelopes of the sweep
	give func() error
}

// orderSweep counts the envelopes, asks for confirmation and gives the order. It adds the counts to result.
func (a *operatorCommand) orderSweep(ctx context.Context, result *recoverResult, order sweepOrder) error {
	// With --yes there is no question, so the count would only delay the order.
	if a.dryRun || !a.yes {
		// A lost watcher document may leave no collections to count.
		var err error
		if result.Collections, err = order.plan(); err != nil && !errors.Is(err, admin.ErrNoCollections) {
			return err
		}
		for _, s := range result.Collections {
			result.Envelopes += s.Envelopes
		}
	}
	if a.dryRun {
		return nil
	}

	envelopes := countNoun(result.Envelopes, "envelope")
	if result.Collections == nil {
		envelopes = "all envelopes of the watcher"
	}
	action := "deliver " + envelopes + " again, with the same ids; consumers may have handled them before"
	if result.Action == "accept-copy" {
		action = "accept the copied state and " + action
	}
	if err := a.confirm(ctx, action); err != nil {
		return err
	}
	return order.give()
}

func (r *recoverResult) writeRecovery(out io.Writer) {
	if r.DryRun {
		for _, s := range r.Collections {
			fmt.Fprintf(out, "%s: %s\n", s.Collection, countNoun(s.Envelopes, "envelope"))
		}
	}

	var planned, done string
	switch r.Action {
	case "accept-copy":
		planned, done = "the copied state would be accepted and a sweep ordered; nothing was done", "the copied state is accepted and a sweep is ordered; start outrelay run"
	case "release":
		planned, done = r.Released+" would be released", r.Released+" is released"
	case "skip":
		what := describeSkipped(r.Skipped)
		planned = what + " would be passed over; nothing was done"
		done = what + " is passed over by the next owner; its dead letter is " + r.Skipped.Letter
	case "sweep":
		planned, done = "a sweep would be ordered; nothing was done", "a sweep is ordered; the next owner performs it"
	}
	text := done
	if r.DryRun {
		text = planned
	}
	fmt.Fprintf(out, "watcher %s: %s\n", r.Watcher, text)
}
