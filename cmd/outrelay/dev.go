package main

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/demo"
	"github.com/outrelay/outrelay/internal/devstack"
)

func newDevCommand(p *program) *cobra.Command {
	var (
		o      demo.Options
		asJSON bool
	)
	c := &cobra.Command{
		Use:   "dev",
		Short: "Try it: MongoDB, Kafka, two relays and a sample service on this machine, checked live",
		Long: `Start a MongoDB replica set and Kafka on this machine (fetched once if they are not there), a sample order service that
appends events in transactions, a relay with a standby, and a consumer that checks each promise: nothing lost, nothing
twice, order kept per key. Kill the relay and see the standby go on.

Keys: k kills the owner with -9, s stops it gracefully, b appends a burst, p pauses and resumes, q quits.

With --events it ends when all have arrived, and exits with 0 only if nothing was lost, twice or out of order.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := checkDev(o); err != nil {
				return err
			}
			return p.dev(c, o, asJSON)
		},
	}
	f := c.Flags()
	f.IntVar(&o.Events, "events", 0, "end after `N` events; 0 goes on until q or Ctrl-C")
	f.IntVar(&o.Rate, "rate", demo.DefaultRate, "events per second of the sample service")
	f.DurationVar(&o.KillEvery, "kill-every", 0, "kill the owner with -9 in this rhythm, for example 4s")
	f.BoolVar(&o.Keep, "keep", false, "leave relays and servers up at the end, until Ctrl-C")
	f.BoolVar(&asJSON, "json", false, "print one JSON object on standard output at the end")
	return c
}

func checkDev(o demo.Options) error {
	var errs []error
	if o.Events < 0 {
		errs = append(errs, fmt.Errorf("--events %d: found a negative number; expected 0 or more", o.Events))
	}
	if o.Rate < 1 || o.Rate > 100_000 {
		errs = append(errs, fmt.Errorf("--rate %d: expected between 1 and 100000", o.Rate))
	}
	if o.KillEvery < 0 || o.KillEvery > 0 && o.KillEvery < time.Second {
		errs = append(errs, fmt.Errorf("--kill-every %v: expected 0 or at least 1s", o.KillEvery))
	}
	return errors.Join(errs...)
}

func (p *program) dev(c *cobra.Command, o demo.Options, asJSON bool) error {
	binary, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding this program, which is to be the relay: %w", err)
	}
	o.Binary, o.Env, o.Out, o.Stopper = binary, p.env, p.errOut, p.onHardStop
	o.Terminal = demo.OpenTerminal(p.in, p.errOut)
	var printed error
	o.Result = func(r demo.Result) {
		if asJSON {
			printed = printJSON(p.out, r)
		}
	}
	r, err := demo.Run(c.Context(), o)
	var none *devstack.UnavailableError
	switch {
	case errors.As(err, &none):
		return err
	case err != nil:
		return temporary(fmt.Errorf("dev: %w", err))
	case printed != nil:
		return printed
	case r.Err() != nil:
		fmt.Fprintf(p.errOut, "outrelay: %v\n", r.Err())
		return silent(exitConfig)
	}
	return nil
}
