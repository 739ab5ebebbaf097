package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/relay/offline"
)

func newResliceCommand(program *program) *cobra.Command {
	want := offline.ResliceOptions{}
	cmd := &cobra.Command{
		Use:   "reslice",
		Short: "Change the number of slots of a watcher",
		Long: `Divide the watcher into another number of slots. The command pauses all slots and waits until their
owners have drained and released them. It fences the owners' producers, and then replaces the
watcher documents in one transaction. No event is lost, repeated or reordered. No event is delivered
while the command runs, which takes some seconds.

Processes that are configured for the old number then wait and report it. Set slots in their
configuration and restart them.

A new slot stays paused if an old slot that had some of its keys was paused. It stays pinned if all
old slots that had its keys were pinned to the same node. The command lists pins that end. A
step-down continues until its time is over.

Slots divide envelopes by their field slot, which pkg/outbox writes. The command rejects more than one
slot if more than a tenth of the newest envelopes lack it, because these all stay in the first slot.
Use --allow-undivided to divide the others.

If an owner does not release in time, or a partition cannot be fenced, nothing is changed and the
slots continue. If the command is killed, the slots stay paused. In that case, run it again, or run
outrelay resume.`,
		Args: noArgs,
	}

	action := program.addChangeFlags(cmd)
	cmd.Flags().IntVar(&want.Slots, "slots", 0, "the new `number` of slots")
	cmd.Flags().DurationVar(&want.Wait, "wait", time.Minute, "time limit for owners to drain and release, and for brokers to fence")
	cmd.Flags().BoolVar(&want.AllowUndivided, "allow-undivided", false, "allow several slots although more than a tenth of the envelopes lack the field slot")
	if err := cmd.MarkFlagRequired("slots"); err != nil {
		panic("outrelay: " + err.Error())
	}

	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if want.Wait <= 0 {
			return fmt.Errorf("--wait must be a positive duration such as 1m")
		}
		return action.runReslice(cmd.Context(), want)
	}
	return cmd
}

// runReslice plans the division, asks for confirmation and performs it.
func (a *operatorCommand) runReslice(ctx context.Context, want offline.ResliceOptions) error {
	cfg, log, err := a.p.loadWithLogger()
	if err != nil {
		return err
	}

	// The first call checks and plans. It reports a watcher that already has this number as done.
	want.DryRun, want.Actor = true, a.actorName()
	report, err := offline.Reslice(ctx, cfg, log, want)
	if err != nil {
		return explainError(ctx, cfg, err)
	}
	if a.dryRun || report.Done {
		return a.printResult(report, func(out io.Writer) { writeReslice(out, report) })
	}

	action := fmt.Sprintf("stop watcher %s for some seconds and divide it into %s instead of %d",
		report.Watcher, countNoun(int64(want.Slots), "slot"), report.From)
	if err := a.confirm(ctx, action); err != nil {
		return err
	}

	want.DryRun = false
	want.OnStep = func(text string) {
		if !a.json {
			fmt.Fprintln(a.p.errOut, text)
		}
	}
	if report, err = offline.Reslice(ctx, cfg, log, want); err != nil {
		return explainError(ctx, cfg, err)
	}
	return a.printResult(report, func(out io.Writer) { writeReslice(out, report) })
}

func writeReslice(out io.Writer, report offline.ResliceReport) {
	for _, s := range report.Slots {
		owner, at := "no owner", "-"
		if s.Owner != "" {
			owner = "owned by " + s.Owner
		}
		if s.Position != nil {
			at = s.Position.Format(time.RFC3339)
		}
		fmt.Fprintf(out, "%s/%s: %s, position %s\n", report.Watcher, s.Slot, owner, at)
	}
	writeKeptOrders(out, report)
	for _, u := range report.Undivided {
		fmt.Fprintln(out, u)
	}

	slots := countNoun(int64(report.To), "slot")
	text := fmt.Sprintf("now has %s; set slots: %d in its configuration and restart its processes", slots, report.To)
	// Nothing was divided if the number is the same.
	switch {
	case report.From == report.To:
		text = fmt.Sprintf("already has %s", slots)
	case report.DryRun:
		text = fmt.Sprintf("would be divided into %s instead of %d; nothing was done", slots, report.From)
	}
	fmt.Fprintf(out, "watcher %s: %s\n", report.Watcher, text)
}

// writeKeptOrders lists the pauses and pins of the new slots, and the pins that end.
func writeKeptOrders(out io.Writer, report offline.ResliceReport) {
	for _, s := range report.New {
		if s.Paused {
			fmt.Fprintf(out, "%s/%s: stays paused\n", report.Watcher, s.Slot)
		}
		if s.Pin != "" {
			fmt.Fprintf(out, "%s/%s: stays pinned to %s\n", report.Watcher, s.Slot, s.Pin)
		}
	}
	for _, s := range report.Unpinned {
		fmt.Fprintf(out, "%s/%s: its pin ends: a new slot also has keys of slots without this pin; pin the new slots if needed\n", report.Watcher, s)
	}
}
