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

// controlResult is the answer of `outrelay pause --json` and the like.
type controlResult struct {
	Watcher string `json:"watcher"`
	Slot    string `json:"slot,omitempty"` // only that one
	Done    string `json:"done"`
}

// runControlAction runs one action on the configured watcher, and says what was done.
func (a *operatorCommand) runControlAction(ctx context.Context, done string, action func(context.Context, admin.Operator) error) error {
	return a.withOperatorBriefly(ctx, func(ctx context.Context, o admin.Operator) error {
		o.Slot = a.slot
		if err := action(ctx, o); err != nil {
			if !errors.Is(err, context.DeadlineExceeded) {
				err = markTemporary(err) // such as a watcher that has not run yet
			}
			return err
		}
		name := o.Watcher
		if o.Slot != "" {
			name += "/" + o.Slot
		}
		return a.printResult(controlResult{Watcher: o.Watcher, Slot: o.Slot, Done: done}, func(w io.Writer) error {
			_, err := fmt.Fprintf(w, "watcher %s: %s\n", sanitizeLine(name), done)
			return err
		})
	})
}

// addControlFlags adds the flags of a command that tells the watcher what to do.
func (p *program) addControlFlags(c *cobra.Command) *operatorCommand {
	a := p.addReadFlags(c)
	c.Flags().StringVar(&a.actor, "actor", "", "`name` that the events log gets; default: the user's")
	addSlotFlag(c, &a.slot)
	return a
}

// addSlotFlag adds the flag that narrows a command to one slot.
func addSlotFlag(c *cobra.Command, slot *string) {
	c.Flags().StringVar(slot, "slot", "", "only this `slot` of the watcher, such as 0of2; default: all")
}

func newPauseCommand(p *program) *cobra.Command {
	var a *operatorCommand
	c := &cobra.Command{
		Use:   "pause",
		Short: "Stop the watcher, whoever runs it, until resume; nothing is lost meanwhile",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.runControlAction(c.Context(), "paused; its owner drains and releases at its next renewal", func(ctx context.Context, o admin.Operator) error { return o.Pause(ctx) })
		},
	}
	a = p.addControlFlags(c)
	return c
}

func newResumeCommand(p *program) *cobra.Command {
	var a *operatorCommand
	c := &cobra.Command{
		Use:   "resume",
		Short: "End a pause",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.runControlAction(c.Context(), "resumed", func(ctx context.Context, o admin.Operator) error { return o.Resume(ctx) })
		},
	}
	a = p.addControlFlags(c)
	return c
}

func newPinCommand(p *program) *cobra.Command {
	var a *operatorCommand
	var off bool
	c := &cobra.Command{
		Use:               "pin NODE",
		Short:             "Hand the watcher to a node and keep it there while the node lives; --off ends it",
		ValidArgsFunction: p.completeNodes,
		Args: func(_ *cobra.Command, args []string) error {
			if off != (len(args) == 0) {
				return fmt.Errorf("pin takes the name of a node, or --off")
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			node, done := "", "the pin is off"
			if !off {
				node, done = args[0], "pinned to "+args[0]
			}
			return a.runControlAction(c.Context(), done, func(ctx context.Context, o admin.Operator) error { return o.Pin(ctx, node) })
		},
	}
	a = p.addControlFlags(c)
	c.Flags().BoolVar(&off, "off", false, "end the pin")
	return c
}

func newStepDownCommand(p *program) *cobra.Command {
	var a *operatorCommand
	var hold time.Duration
	c := &cobra.Command{
		Use:   "step-down",
		Short: "Make the present owner hand the watcher over",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if hold <= 0 {
				return fmt.Errorf("--hold must be a positive duration such as 30s")
			}
			return a.runControlAction(c.Context(), fmt.Sprintf("its owner releases now and stays away for %s", hold), func(ctx context.Context, o admin.Operator) error { return o.StepDown(ctx, hold) })
		},
	}
	a = p.addControlFlags(c)
	c.Flags().DurationVar(&hold, "hold", 30*time.Second, "how long the owner of now keeps away")
	return c
}
