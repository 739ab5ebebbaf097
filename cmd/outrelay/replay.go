package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// maxListedReplays is the number of replays that list shows.
const maxListedReplays = 50

// replayFlags holds the flags of a replay order and of its execution.
type replayFlags struct {
	order   admin.ReplayOrder
	resume  string
	wait    bool
	maxOpen int64
}

func newReplayCommand(program *program) *cobra.Command {
	replayFlags := &replayFlags{}
	cmd := &cobra.Command{
		Use:   "replay",
		Short: "Send delivered envelopes that are still in the outbox again",
		Long: `Send envelopes again that were delivered in a time range and that retention has not removed yet.
Flags restrict them to ids, ordering keys, types or topics. The envelopes keep their ids and, within
a key, their order. Each is marked as outrelay-redelivered and has the next outrelay-delivery
number. The relay sends them in parallel with new envelopes.

Times are delivery times by the server's clock, or commit times if no delivery time is recorded, in
whole seconds. --to is excluded. The time of a replayed envelope is its latest delivery. Envelopes
that are not delivered yet, wait, or are past their expiresAt are left out. So are envelopes without
a ts, unless recording is mark.

At most --open envelopes are queued at a time, so the command runs until all are sent. With
--wait=false it queues all of them and ends. The command may be interrupted at any time; --resume ID
continues the replay.`,
		Example: `  outrelay replay --from 2026-11-20T08:00Z --to 2026-11-20T08:10Z --type OrderPlaced --dry-run
  outrelay replay --from 2h --key customer-17 --topic audit
  outrelay replay --resume 20261120T081500-1f2e`,
		Args: noArgs,
	}

	action := program.addChangeFlags(cmd)
	flags := cmd.Flags()
	addTimeFlag(cmd, &replayFlags.order.From, "from", "delivered at or after this `time`, or so long ago, such as 2h", parsePastTime)
	addTimeFlag(cmd, &replayFlags.order.To, "to", "delivered before this `time`; default: the position of the watcher", parsePastTime)
	flags.StringArrayVar(&replayFlags.order.IDs, "id", nil, "only the envelope with this `id`; may be repeated")
	flags.StringArrayVar(&replayFlags.order.Keys, "key", nil, "only this ordering `key`; may be repeated")
	flags.StringSliceVar(&replayFlags.order.Types, "type", nil, "only these event `types`")
	flags.StringSliceVar(&replayFlags.order.AggregateTypes, "aggregate-type", nil, "only these aggregate `types`")
	flags.StringSliceVar(&replayFlags.order.Topics, "topic", nil, "only to these `topics`")
	flags.StringSliceVar(&replayFlags.order.Collections, "collection", nil, "only from these `collections`, as database.collection")
	flags.Float64Var(&replayFlags.order.Rate, "rate", 0, "maximum `envelopes` per second; 0: no limit")
	flags.BoolVar(&replayFlags.order.Force, "force", false,
		"also send to compacted topics, where an old event becomes the newest of its key")
	flags.BoolVar(&replayFlags.wait, "wait", true, "wait until all are sent")
	flags.Int64Var(&replayFlags.maxOpen, "open", admin.DefaultReplayOpen, "maximum number of envelopes that are queued but not sent")
	flags.StringVar(&replayFlags.resume, "resume", "", "continue the replay with this `id`")

	// A resumed replay continues with the order that it was started with.
	selecting := []string{
		"from", "to", "id", "key", "type", "aggregate-type", "topic", "collection", "rate", "force", "dry-run",
	}
	for _, name := range selecting {
		cmd.MarkFlagsMutuallyExclusive("resume", name)
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return replayFlags.runReplay(cmd.Context(), action) }
	cmd.AddCommand(newReplayListCommand(program), newReplayCancelCommand(program))
	return cmd
}

// check returns an error if the flags contradict each other, or if a number is out of range.
func (f *replayFlags) check() error {
	switch {
	case f.order.Rate < 0:
		return errors.New("--rate must not be negative; pass 0 for no limit")
	case f.maxOpen < 1:
		return errors.New("--open must be at least 1")
	case !f.order.To.IsZero() && !f.order.From.Before(f.order.To):
		return errors.New("--from must be before --to")
	}
	return nil
}

// runReplay plans a replay, asks for confirmation, starts the replay and carries it out. With --resume,
// it only carries out the existing replay.
func (f *replayFlags) runReplay(ctx context.Context, command *operatorCommand) error {
	if err := f.check(); err != nil {
		return err
	}

	return command.withOperator(ctx, func(ctx context.Context, op admin.Operator) error {
		replays := op.Replays()
		// The order is stored, so a resumed replay needs neither a plan nor a confirmation.
		if f.resume != "" {
			return f.carryOut(ctx, command, replays, f.resume, -1)
		}

		plan, err := replays.Plan(ctx, f.order)
		if errors.Is(err, admin.ErrUnboundedReplay) {
			return errors.New("no range selected; pass --from TIME, or envelopes with --id")
		}
		if err != nil {
			return err
		}
		if command.dryRun {
			return command.printResult(plan, func(out io.Writer) { writeReplayPlan(out, plan) })
		}

		// A plan without envelopes is ordered as well, so that the list of replays shows the attempt.
		if plan.Found > 0 {
			action := fmt.Sprintf("send %s of watcher %s again", countNoun(plan.Found, "envelope"), plan.Watcher)
			if err := command.confirm(ctx, action); err != nil {
				return err
			}
		}
		i, err := replays.Order(ctx, plan, f.order)
		if i.ID == "" {
			return err
		}
		// The id is needed to resume the replay if the command is interrupted.
		if !command.json {
			fmt.Fprintf(command.p.errOut, "replay %s is ordered\n", i.ID)
		}
		// A stored replay runs, even if the audit log lacks it.
		return errors.Join(err, f.carryOut(ctx, command, replays, i.ID, i.Found))
	})
}

// carryOut runs a replay until it ends or is interrupted. found is the number of envelopes for the
// progress bar, or -1.
func (f *replayFlags) carryOut(ctx context.Context, action *operatorCommand, replays admin.Replays, id string, found int64) error {
	bar := action.startProgress("sent", found)
	defer bar.clear()
	showProgress := func(i admin.ReplayInfo) { bar.setDone(i.Queued + i.Skipped - i.Outstanding) }
	until := admin.WaitForNothing
	if f.wait {
		until = admin.WaitUntilSent
	}
	i, err := replays.Run(ctx, id, admin.ReplayRun{Wait: until, Open: f.maxOpen, Progress: showProgress})
	bar.clear()

	if err != nil {
		// Only an interruption or a temporary error can be resumed.
		if i.ID != "" && (ctx.Err() != nil || exitCode(classifyError(err)) == exitTemporary) {
			err = fmt.Errorf("replay stopped after queuing %s: %w; to continue, run `outrelay replay --resume %s`",
				countNoun(i.Queued, "envelope"), err, id)
		}
		return err
	}

	done := "queued; the relay sends them"
	if f.wait {
		done = "sent again"
	}
	return action.printLine(i, "replay %s: %s %s, %s skipped", i.ID, countNoun(i.Queued, "envelope"), done, formatThousands(i.Skipped))
}

func writeReplayPlan(out io.Writer, plan admin.ReplayPlan) {
	fmt.Fprintf(out, "%s would be sent again", countNoun(plan.Found, "envelope"))
	if plan.LeftOut > 0 {
		fmt.Fprintf(out, ", %s left out because they go to other topics", formatThousands(plan.LeftOut))
	}
	fmt.Fprintf(out, "; the range ends at %s\n", formatLocal(&plan.Until))
	if plan.Unstamped > 0 {
		fmt.Fprintf(out, "%s without a ts cannot be sent again, because nothing shows when they were delivered; "+
			"recording: mark gives each delivered envelope a ts\n", countNoun(plan.Unstamped, "envelope"))
	}
	if plan.Found == 0 {
		return
	}

	writeTable(out, "TOPIC\tRECORDS\t", plan.Topics, func(topic admin.ReplayTopic) cells {
		note := " "
		if topic.Compacted {
			note = "compacted: needs --force"
		}
		return cells{topic.Name, formatThousands(topic.Found), note}
	})
	writeTable(out, "COLLECTION\tENVELOPES", plan.Collections, func(count admin.ReplayCount) cells {
		return cells{count.Name, formatThousands(count.Found)}
	})
}

func newReplayListCommand(program *program) *cobra.Command {
	return newListCommand(program, &cobra.Command{
		Use:   "list",
		Short: "List the latest replays of the watcher",
	}, replayListing, func(ctx context.Context, op admin.Operator) ([]admin.ReplayInfo, error) {
		return op.Replays().List(ctx, maxListedReplays)
	})
}

var replayListing = listing[admin.ReplayInfo]{
	name: "replays", empty: "there are no replays", head: "ID\tSTATE\tBY\tSTARTED\tFOUND\tQUEUED\tSKIPPED",
	cells: func(i admin.ReplayInfo) cells {
		return cells{
			i.ID, i.State, i.Actor, formatLocal(&i.StartedAt),
			formatThousands(i.Found), formatThousands(i.Queued), formatThousands(i.Skipped),
		}
	},
}

func newReplayCancelCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cancel ID",
		Short: "End an interrupted replay; only envelopes already queued are sent",
		Args:  exactArgs(1),
	}

	action := program.addReadFlags(cmd)
	action.addActorFlag(cmd)
	action.setRun(cmd, func(ctx context.Context, operator admin.Operator, args []string) error {
		if err := operator.Replays().Cancel(ctx, args[0]); err != nil {
			return err
		}
		return action.printLine(map[string]string{"cancelled": args[0]}, "replay %s is canceled", args[0])
	})
	return cmd
}
