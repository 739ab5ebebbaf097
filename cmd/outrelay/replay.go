package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/app"
)

// maxListedReplays is how many replays list shows.
const maxListedReplays = 50

// replayFlags are those of an order, and of how it is carried out.
type replayFlags struct {
	order    admin.ReplayOrder
	from, to string
	resume   string
	wait     bool
	maxOpen  int64
}

func newReplayCommand(p *program) *cobra.Command {
	f := &replayFlags{}
	c := &cobra.Command{
		Use:   "replay",
		Short: "Send delivered envelopes that are still in the outbox again",
		Long: `Send envelopes that were delivered, and that retention has not removed yet, again: those of a time, and if you like of some
ids, ordering keys, types or topics alone. They keep their ids and, within a key, their order; each is flagged
outrelay-redelivered and has the next outrelay-delivery number. The relay sends them beside the new ones.

Times are those of the delivery by the server's clock, else of the commit, in whole seconds; --to is excluded. An envelope
that was replayed counts from that delivery on. What is not delivered yet, waits, or is past its expiresAt is left out.

At most --open envelopes are queued at a time, so the command runs until all are sent; with --wait=false it queues them
all at once. It may be interrupted at any moment, and --resume ID goes on where it was.`,
		Example: `  outrelay replay --from 2026-11-20T08:00Z --to 2026-11-20T08:10Z --type OrderPlaced --dry-run
  outrelay replay --from 2h --key customer-17 --topic audit
  outrelay replay --resume 20261120T081500-1f2e`,
		Args: cobra.NoArgs,
	}
	a := p.addChangeFlags(c)
	flags := c.Flags()
	flags.StringVar(&f.from, "from", "", "`time` to begin at, or so long ago, as 2h")
	flags.StringVar(&f.to, "to", "", "`time` to end before; default: where the watcher is")
	flags.StringArrayVar(&f.order.IDs, "id", nil, "only the envelope of this `id`; may be repeated")
	flags.StringArrayVar(&f.order.Keys, "key", nil, "only this ordering `key`; may be repeated")
	flags.StringSliceVar(&f.order.Types, "type", nil, "only these `types`")
	flags.StringSliceVar(&f.order.AggregateTypes, "aggregate-type", nil, "only these aggregate `types`")
	flags.StringSliceVar(&f.order.Topics, "topic", nil, "only to these `topics`")
	flags.StringSliceVar(&f.order.Collections, "collection", nil, "only of these `collections`, as database.collection")
	flags.Float64Var(&f.order.Rate, "rate", 0, "`envelopes` a second at most; 0: as fast as the relay takes them")
	flags.BoolVar(&f.order.Force, "force", false, "also into compacted topics, where an old event becomes the newest of its key")
	flags.BoolVar(&f.wait, "wait", true, "wait until all are sent")
	flags.Int64Var(&f.maxOpen, "open", admin.DefaultReplayOpen, "envelopes that may be queued and not sent at a time")
	flags.StringVar(&f.resume, "resume", "", "go on with the replay of this `id`")
	for _, name := range []string{"from", "to", "id", "key", "type", "aggregate-type", "topic", "collection", "rate", "force", "dry-run"} {
		c.MarkFlagsMutuallyExclusive("resume", name)
	}
	c.RunE = func(c *cobra.Command, _ []string) error { return f.runReplay(c.Context(), a) }
	c.AddCommand(newReplayListCommand(p), newReplayCancelCommand(p))
	return c
}

// withReplayer runs do with the configured watcher's replayer.
func (a *operatorCommand) withReplayer(ctx context.Context, do func(ctx context.Context, r admin.Replayer) error) error {
	return a.withOperator(ctx, func(ctx context.Context, o admin.Operator) error {
		cfg, _, err := a.p.loadConfig()
		if err != nil {
			return err
		}
		router, err := app.Router(cfg)
		if err != nil {
			return err
		}
		return do(ctx, admin.Replayer{Operator: o, Router: router, Compacted: func(ctx context.Context, topics []string) ([]string, error) {
			return app.CompactedTopics(ctx, cfg, topics)
		}})
	})
}

func (f *replayFlags) runReplay(ctx context.Context, a *operatorCommand) (err error) {
	now := time.Now()
	if f.order.From, err = parsePastTime("from", f.from, now); err != nil {
		return err
	}
	if f.order.To, err = parsePastTime("to", f.to, now); err != nil {
		return err
	}
	switch {
	case f.order.Rate < 0:
		return errors.New("--rate must not be negative; 0 is as fast as the relay takes them")
	case f.maxOpen < 1:
		return errors.New("--open must be at least 1")
	case !f.order.To.IsZero() && !f.order.From.Before(f.order.To):
		return errors.New("--from must be before --to")
	}
	return a.withReplayer(ctx, func(ctx context.Context, r admin.Replayer) error {
		if f.resume != "" {
			return f.carryOut(ctx, a, r, f.resume, -1)
		}
		plan, err := r.Plan(ctx, f.order)
		if errors.Is(err, admin.ErrNoBound) {
			return errors.New("say --from TIME, or name envelopes by --id")
		}
		if err != nil {
			return err
		}
		if a.dryRun {
			return a.printResult(plan, func(w io.Writer) error { return printReplayPlan(w, plan) })
		}
		if plan.Found > 0 {
			if err := a.confirm(ctx, fmt.Sprintf("send %s of watcher %s again", countNoun(plan.Found, "envelope"), plan.Watcher)); err != nil {
				return err
			}
		}
		i, err := r.StartPlan(ctx, plan, f.order)
		if err != nil {
			return err
		}
		if !a.json {
			fmt.Fprintf(a.p.errOut, "replay %s is ordered\n", i.ID)
		}
		return f.carryOut(ctx, a, r, i.ID, i.Found)
	})
}

// carryOut runs a replay to its end, or until it is interrupted.
func (f *replayFlags) carryOut(ctx context.Context, a *operatorCommand, r admin.Replayer, id string, found int64) error {
	bar := a.startProgress("sent", found)
	defer bar.clear()
	i, err := r.Run(ctx, id, admin.ReplayRun{Wait: f.wait, Open: f.maxOpen, Progress: func(i admin.ReplayInfo) {
		bar.setDone(i.Queued + i.Skipped - i.Outstanding)
	}})
	bar.clear()
	if err != nil {
		if i.ID != "" && (ctx.Err() != nil || exitCode(classifyError(err)) == exitTemporary) {
			err = fmt.Errorf("%s queued so far; go on with outrelay replay --resume %s (%w)", countNoun(i.Queued, "envelope"), id, err)
		}
		return err
	}
	return a.printResult(i, func(w io.Writer) error {
		done := "queued; the relay sends them"
		if f.wait {
			done = "sent again"
		}
		_, err := fmt.Fprintf(w, "replay %s: %s %s, %s skipped\n", i.ID, countNoun(i.Queued, "envelope"), done, formatThousands(i.Skipped))
		return err
	})
}

func printReplayPlan(w io.Writer, p admin.ReplayPlan) error {
	fmt.Fprintf(w, "%s would be sent again", countNoun(p.Found, "envelope"))
	if p.LeftOut > 0 {
		fmt.Fprintf(w, ", %s left out for no wanted topic", formatThousands(p.LeftOut))
	}
	fmt.Fprintf(w, "; the watcher has passed %s\n", p.Until.Local().Format(time.DateTime))
	if p.Found == 0 {
		return nil
	}
	if err := writeTable(w, "TOPIC\tRECORDS\t", func(row func(cells ...any)) {
		for _, t := range p.Topics {
			note := " "
			if t.Compacted {
				note = "compacted: needs --force"
			}
			row(t.Name, formatThousands(t.Found), note)
		}
	}); err != nil {
		return err
	}
	return writeTable(w, "COLLECTION\tENVELOPES", func(row func(cells ...any)) {
		for _, c := range p.Collections {
			row(c.Name, formatThousands(c.Found))
		}
	})
}

func newReplayListCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "list",
		Short: "Show the latest replays of the watcher",
		Args:  cobra.NoArgs,
	}
	a := p.addReadFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return a.withOperatorBriefly(c.Context(), func(ctx context.Context, o admin.Operator) error {
			list, err := admin.Replayer{Operator: o}.List(ctx, maxListedReplays)
			if err != nil {
				return err
			}
			return a.printResult(map[string]any{"replays": list}, func(w io.Writer) error {
				return writeTable(w, "ID\tSTATE\tBY\tSTARTED\tFOUND\tQUEUED\tSKIPPED", func(row func(cells ...any)) {
					for _, i := range list {
						row(i.ID, i.State, i.Actor, i.StartedAt.Local().Format(time.DateTime), formatThousands(i.Found), formatThousands(i.Queued), formatThousands(i.Skipped))
					}
				})
			})
		})
	}
	return c
}

func newReplayCancelCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "cancel ID",
		Short: "End a replay that was broken off: what it has queued is sent, the rest is not",
		Args:  cobra.ExactArgs(1),
	}
	a := p.addReadFlags(c)
	c.Flags().StringVar(&a.actor, "actor", "", "`name` that the events log gets; default: the user's")
	c.RunE = func(c *cobra.Command, args []string) error {
		return a.withOperatorBriefly(c.Context(), func(ctx context.Context, o admin.Operator) error {
			if err := (admin.Replayer{Operator: o}).Cancel(ctx, args[0]); err != nil {
				return err
			}
			return a.printResult(map[string]string{"cancelled": args[0]}, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "replay %s is cancelled\n", args[0])
				return err
			})
		})
	}
	return c
}
