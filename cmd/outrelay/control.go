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

// operated is the answer of `outrelay pause --json` and the like.
type operated struct {
	Watcher string `json:"watcher"`
	Slot    string `json:"slot,omitempty"` // only that one
	Done    string `json:"done"`
}

// operate runs one action on the configured watcher, and says what was done.
func (a *acting) operate(ctx context.Context, done string, action func(context.Context, admin.Operator) error) error {
	return a.brief(ctx, func(ctx context.Context, o admin.Operator) error {
		o.Slot = a.slot
		if err := action(ctx, o); err != nil {
			if !errors.Is(err, context.DeadlineExceeded) {
				err = temporary(err) // such as a watcher that has not run yet
			}
			return err
		}
		name := o.Watcher
		if o.Slot != "" {
			name += "/" + o.Slot
		}
		return a.show(operated{Watcher: o.Watcher, Slot: o.Slot, Done: done}, func(w io.Writer) error {
			_, err := fmt.Fprintf(w, "watcher %s: %s\n", oneLine(name), done)
			return err
		})
	})
}

// controlling adds the flags of a command that tells the watcher what to do.
func (p *program) controlling(c *cobra.Command) *acting {
	a := p.looking(c)
	c.Flags().StringVar(&a.actor, "actor", "", "`name` that the events log gets; default: the user's")
	ofSlot(c, &a.slot)
	return a
}

// ofSlot adds the flag that narrows a command to one slot.
func ofSlot(c *cobra.Command, slot *string) {
	c.Flags().StringVar(slot, "slot", "", "only this `slot` of the watcher, such as 0of2; default: all")
}

func newPauseCommand(p *program) *cobra.Command {
	var a *acting
	c := &cobra.Command{
		Use:   "pause",
		Short: "Stop the watcher, whoever runs it, until resume; nothing is lost meanwhile",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.operate(c.Context(), "paused; its owner drains and releases at its next renewal", func(ctx context.Context, o admin.Operator) error { return o.Pause(ctx) })
		},
	}
	a = p.controlling(c)
	return c
}

func newResumeCommand(p *program) *cobra.Command {
	var a *acting
	c := &cobra.Command{
		Use:   "resume",
		Short: "End a pause",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.operate(c.Context(), "resumed", func(ctx context.Context, o admin.Operator) error { return o.Resume(ctx) })
		},
	}
	a = p.controlling(c)
	return c
}

func newPinCommand(p *program) *cobra.Command {
	var a *acting
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
			return a.operate(c.Context(), done, func(ctx context.Context, o admin.Operator) error { return o.Pin(ctx, node) })
		},
	}
	a = p.controlling(c)
	c.Flags().BoolVar(&off, "off", false, "end the pin")
	return c
}

func newStepDownCommand(p *program) *cobra.Command {
	var a *acting
	var hold time.Duration
	c := &cobra.Command{
		Use:   "step-down",
		Short: "Make the present owner hand the watcher over",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if hold <= 0 {
				return fmt.Errorf("--hold must be a positive duration such as 30s")
			}
			return a.operate(c.Context(), fmt.Sprintf("its owner releases now and stays away for %s", hold), func(ctx context.Context, o admin.Operator) error { return o.StepDown(ctx, hold) })
		},
	}
	a = p.controlling(c)
	c.Flags().DurationVar(&hold, "hold", 30*time.Second, "how long the owner of now keeps away")
	return c
}
