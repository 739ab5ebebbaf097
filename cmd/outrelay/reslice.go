package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/app"
)

func newResliceCommand(p *program) *cobra.Command {
	want := app.Reslice{}
	c := &cobra.Command{
		Use:   "reslice",
		Short: "Change the number of slots that a watcher is divided into",
		Long: `Divide the watcher into another number of slots. It pauses all slots, waits until their owners have drained and released,
fences what they have sent with, and puts new watcher documents in the place of the old ones, in one transaction. Nothing is
lost, repeated or out of order; nothing is delivered meanwhile, which takes some seconds.

Processes that are configured for the old number then wait and say so: set slots in their configuration and restart them.

A new slot stays paused if one that had some of its keys was paused. It stays pinned if all that had its keys were pinned to
the same node; pins that end are listed. A step-down goes on until its time is over.

If an owner does not release in time, or a partition cannot be fenced, nothing is changed and the slots go on. If the
command is killed, the slots stay paused: run it again, or run outrelay resume.`,
		Args: cobra.NoArgs,
	}
	a := p.addChangeFlags(c)
	c.Flags().IntVar(&want.Slots, "slots", 0, "the `number` of slots that it is to have")
	c.Flags().DurationVar(&want.Wait, "wait", time.Minute, "how long the owners may take to drain and release, and the brokers to fence")
	if err := c.MarkFlagRequired("slots"); err != nil {
		panic("outrelay: " + err.Error())
	}
	c.RunE = func(c *cobra.Command, _ []string) error {
		if want.Wait <= 0 {
			return fmt.Errorf("--wait must be a positive duration such as 1m")
		}
		return a.runReslice(c.Context(), want)
	}
	return c
}

func (a *operatorCommand) runReslice(ctx context.Context, want app.Reslice) error {
	cfg, log, err := a.p.loadWithLogger()
	if err != nil {
		return err
	}
	want.DryRun, want.Actor = true, a.actorName()
	r, err := app.RunReslice(ctx, cfg, log, want)
	if err != nil {
		return classifyError(err)
	}
	if a.dryRun || r.Done {
		return a.printResult(r, func(w io.Writer) error { return printReslice(w, r) })
	}
	if err := a.confirm(ctx, fmt.Sprintf("stop watcher %s for some seconds and divide it into %s instead of %d", r.Watcher, countNoun(int64(want.Slots), "slot"), r.From)); err != nil {
		return err
	}
	want.DryRun = false
	want.Say = func(text string) {
		if !a.json {
			fmt.Fprintln(a.p.errOut, text)
		}
	}
	if r, err = app.RunReslice(ctx, cfg, log, want); err != nil {
		return classifyError(err)
	}
	return a.printResult(r, func(w io.Writer) error { return printReslice(w, r) })
}

func printReslice(w io.Writer, r app.ResliceReport) error {
	for _, s := range r.Slots {
		owner, at := "nobody runs it", "-"
		if s.Owner != "" {
			owner = s.Owner + " runs it"
		}
		if s.Position != nil {
			at = s.Position.Format(time.RFC3339)
		}
		if _, err := fmt.Fprintf(w, "%s/%s: %s, position %s\n", r.Watcher, s.Slot, owner, at); err != nil {
			return err
		}
	}
	if err := printKeptOrders(w, r); err != nil {
		return err
	}
	text := fmt.Sprintf("has %s now; set slots: %d in its configuration and restart its processes", countNoun(int64(r.To), "slot"), r.To)
	switch {
	case r.From == r.To:
		text = fmt.Sprintf("has %s already", countNoun(int64(r.To), "slot"))
	case r.DryRun:
		text = fmt.Sprintf("would be divided into %s instead of %d; nothing was done", countNoun(int64(r.To), "slot"), r.From)
	}
	_, err := fmt.Fprintf(w, "watcher %s: %s\n", r.Watcher, text)
	return err
}

// printKeptOrders lists the pauses and pins that go on, and the pins that do not.
func printKeptOrders(w io.Writer, r app.ResliceReport) error {
	var lines []string
	add := func(slot, text string) { lines = append(lines, r.Watcher+"/"+slot+": "+text) }
	for _, s := range r.New {
		if s.Paused {
			add(s.Slot, "stays paused")
		}
		if s.Pin != "" {
			add(s.Slot, "stays pinned to "+s.Pin)
		}
	}
	for _, s := range r.Unpinned {
		add(s, "its pin ends where its keys join those of slots without that pin; pin the new slots anew")
	}
	for _, line := range lines {
		if _, err := fmt.Fprintln(w, line); err != nil {
			return err
		}
	}
	return nil
}
