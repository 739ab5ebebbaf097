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
	return a.withOperator(ctx, func(ctx context.Context, operator admin.Operator) error {
		operator.Slot = a.slot
		if err := action(operator.Lease(), ctx); err != nil {
			return err
		}

		name := operator.Watcher
		if operator.Slot != "" {
			name += "/" + operator.Slot
		}
		return a.printLine(controlResult{Watcher: operator.Watcher, Slot: operator.Slot, Done: done}, "watcher %s: %s", sanitizeLine(name), done)
	})
}

// addControlFlags adds the flags of a command that controls the watcher.
func (p *program) addControlFlags(cmd *cobra.Command) *operatorCommand {
	action := p.addReadFlags(cmd)
	action.addActorFlag(cmd)
	addSlotFlag(cmd, &action.slot)
	return action
}

// addSlotFlag adds the flag that restricts a command to one slot.
func addSlotFlag(cmd *cobra.Command, slot *string) {
	cmd.Flags().StringVar(slot, "slot", "", "only this `slot` of the watcher, such as 0of2; default: all")
}

func newPauseCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "pause",
		Short: "Stop the watcher on all nodes until resume; no event is lost",
		Args:  noArgs,
	}

	action := program.addControlFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		const done = "paused; `outrelay status` reports pausing until its owner has drained and released the lease"
		return action.runControlAction(cmd.Context(), done, admin.Lease.Pause)
	}
	return cmd
}

func newResumeCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "resume",
		Short: "End a pause",
		Args:  noArgs,
	}

	action := program.addControlFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return action.runControlAction(cmd.Context(), "resumed", admin.Lease.Resume)
	}
	return cmd
}

func newPinCommand(program *program) *cobra.Command {
	var off, force bool
	cmd := &cobra.Command{
		Use:               "pin NODE",
		Short:             "Move the watcher to a node and keep it there while the node is alive",
		ValidArgsFunction: program.completeNodes,
		Args:              nameOrOff("node", &off),
	}

	action := program.addControlFlags(cmd)
	cmd.Flags().BoolVar(&off, "off", false, "end the pin")
	cmd.Flags().BoolVar(&force, "force", false, "also pin to a node that has never run, before its first start")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		node, done := "", "the pin is off"
		if !off {
			node, done = args[0], "pinned to "+args[0]
		}
		return action.runControlAction(cmd.Context(), done, func(lease admin.Lease, ctx context.Context) error {
			if force {
				return lease.PinAhead(ctx, node)
			}
			// An unknown name is usually a typing error.
			err := lease.Pin(ctx, node)
			if errors.Is(err, admin.ErrUnknownNode) {
				err = fmt.Errorf("%w; to pin a node before its first start, pass --force", err)
			}
			return err
		})
	}
	return cmd
}

func newStepDownCommand(program *program) *cobra.Command {
	var order admin.StepDownOrder
	cmd := &cobra.Command{
		Use:   "step-down",
		Short: "Make the current owner release the watcher, so that a standby takes over",
		Args:  noArgs,
	}

	action := program.addControlFlags(cmd)
	cmd.Flags().DurationVar(&order.Hold, "hold", 30*time.Second, "how long the current owner must not take over again")
	cmd.Flags().BoolVar(&order.Force, "force", false, "also if no other node can take over, so that nothing is sent")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if order.Hold <= 0 {
			return fmt.Errorf("--hold must be a positive duration such as 30s")
		}

		done := fmt.Sprintf("its owner releases the lease now and does not acquire it for %s", order.Hold)
		return action.runControlAction(cmd.Context(), done, func(lease admin.Lease, ctx context.Context) error {
			err := lease.StepDown(ctx, order)
			if errors.Is(err, admin.ErrNoStandby) {
				err = fmt.Errorf("%w; to step down nevertheless, pass --force", err)
			}
			return err
		})
	}
	return cmd
}
