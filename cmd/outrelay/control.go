package main

import (
	"context"
	"errors"
	"fmt"
	"os/user"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/app"
)

// operate runs one action on the configured watcher, and says what was done.
func (p *program) operate(ctx context.Context, done string, action func(context.Context, admin.Operator) error) error {
	cfg, _, err := p.loadAndLog()
	if err != nil {
		return err
	}
	state, closeClient, err := app.StateDatabase(cfg)
	if err != nil {
		return err
	}
	defer closeClient()
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	actor := "unknown"
	if u, err := user.Current(); err == nil {
		actor = u.Username
	}
	if err := action(ctx, admin.Operator{State: state, Watcher: cfg.Watcher, Actor: actor, Source: source}); err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			err = unanswered(err)
		}
		return temporary(err)
	}
	fmt.Fprintf(p.errOut, "watcher %s: %s\n", cfg.Watcher, done)
	return nil
}

func newPauseCommand(p *program) *cobra.Command {
	return &cobra.Command{
		Use:   "pause",
		Short: "Stop the watcher, whoever runs it, until resume; nothing is lost meanwhile",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return p.operate(c.Context(), "paused; its owner drains and releases at its next renewal", func(ctx context.Context, o admin.Operator) error { return o.Pause(ctx) })
		},
	}
}

func newResumeCommand(p *program) *cobra.Command {
	return &cobra.Command{
		Use:   "resume",
		Short: "End a pause",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return p.operate(c.Context(), "resumed", func(ctx context.Context, o admin.Operator) error { return o.Resume(ctx) })
		},
	}
}

func newPinCommand(p *program) *cobra.Command {
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
			return p.operate(c.Context(), done, func(ctx context.Context, o admin.Operator) error { return o.Pin(ctx, node) })
		},
	}
	c.Flags().BoolVar(&off, "off", false, "end the pin")
	return c
}

func newStepDownCommand(p *program) *cobra.Command {
	var hold time.Duration
	c := &cobra.Command{
		Use:   "step-down",
		Short: "Make the present owner hand the watcher over",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if hold <= 0 {
				return fmt.Errorf("--hold must be a positive duration such as 30s")
			}
			return p.operate(c.Context(), fmt.Sprintf("its owner releases now and stays away for %s", hold), func(ctx context.Context, o admin.Operator) error { return o.StepDown(ctx, hold) })
		},
	}
	c.Flags().DurationVar(&hold, "hold", 30*time.Second, "how long the owner of now keeps away")
	return c
}
