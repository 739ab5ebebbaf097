package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// controlResult is the output of `outrelay pause --json` and similar commands.
type controlResult struct {
	Watcher string `json:"watcher"`
	Slot    string `json:"slot,omitempty"` // "" if the action was on all slots
	Done    string `json:"done"`
}

// runControlAction runs an action on the lease of the configured watcher and prints done.
func (a *operatorCommand) runControlAction(ctx context.Context, done string, action func(admin.Lease, context.Context) error) error {
	return a.withOperator(ctx, func(ctx context.Context, o admin.Operator) error {
		o.Slot = a.slot
		if err := action(o.Lease(), ctx); err != nil {
			return err
		}

		name := o.Watcher
		if o.Slot != "" {
			name += "/" + o.Slot
		}
		return a.printLine(controlResult{Watcher: o.Watcher, Slot: o.Slot, Done: done}, "watcher %s: %s", sanitizeLine(name), done)
	})
}

// addControlFlags adds the flags of a command that controls the watcher.
func (p *program) addControlFlags(c *cobra.Command) *operatorCommand {
	a := p.addReadFlags(c)
	a.changes = true
	a.addActorFlag(c)
	addSlotFlag(c, &a.slot)
	return a
}

// addSlotFlag adds the flag that restricts a command to one slot.
func addSlotFlag(c *cobra.Command, slot *string) {
	c.Flags().StringVar(slot, "slot", "", "only this `slot` of the watcher, such as 0of2; default: all")
}

func newPauseCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "pause",
		Short: "Stop the watcher on all nodes until resume; no event is lost",
		Args:  noArgs,
	}

	a := p.addControlFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		const done = "paused; `outrelay status` reports pausing until its owner has drained and released the lease"
		return a.runControlAction(c.Context(), done, admin.Lease.Pause)
	}
	return c
}

func newResumeCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "resume",
		Short: "End a pause",
		Args:  noArgs,
	}

	a := p.addControlFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return a.runControlAction(c.Context(), "resumed", admin.Lease.Resume)
	}
	return c
}

func newPinCommand(p *program) *cobra.Command {
	var off, force bool
	c := &cobra.Command{
		Use:               "pin NODE",
		Short:             "Move the watcher to a node and keep it there while the node is alive",
		ValidArgsFunction: p.completeNodes,
		Args:              nameOrOff("node", &off),
	}

	a := p.addControlFlags(c)
	c.Flags().BoolVar(&off, "off", false, "end the pin")
	c.Flags().BoolVar(&force, "force", false, "also pin to a node that has never run, before its first start")
	c.RunE = func(c *cobra.Command, args []string) error {
		node, done := "", "the pin is off"
		if !off {
			node, done = args[0], "pinned to "+args[0]
		}
		return a.runControlAction(c.Context(), done, func(l admin.Lease, ctx context.Context) error {
			if force {
				return l.PinAhead(ctx, node)
			}
			// An unknown name is usually a typing error.
			err := l.Pin(ctx, node)
			if errors.Is(err, admin.ErrUnknownNode) {
				err = fmt.Errorf("%w; to pin a node before its first start, pass --force", err)
			}
			return err
		})
	}
	return c
}

func newStepDownCommand(p *program) *cobra.Command {
	var hold time.Duration
	c := &cobra.Command{
		Use:   "step-down",
		Short: "Make the current owner release the watcher, so that a standby takes over",
		Args:  noArgs,
	}

	a := p.addControlFlags(c)
	c.Flags().DurationVar(&hold, "hold", 30*time.Second, "how long the current owner must not take over again")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if hold <= 0 {
			return fmt.Errorf("--hold must be a positive duration such as 30s")
		}

		done := fmt.Sprintf("its owner releases the lease now and does not acquire it for %s", hold)
		return a.runControlAction(c.Context(), done, func(l admin.Lease, ctx context.Context) error { return l.StepDown(ctx, hold) })
	}
	return c
}
