//go:build !release

package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/demo"
	"github.com/outrelay/outrelay/internal/devstack"
)

func newDevCommand(p *program) *cobra.Command {
	var (
		o        demo.Options
		scenario string
		asJSON   bool
	)
	c := &cobra.Command{
		Use:   "dev",
		Short: "Try it: MongoDB, Kafka, two relays and a sample service on this machine, checked live",
		Long: `Start a MongoDB replica set and Kafka on this machine (fetched once if they are not there), a sample order service that
appends events in transactions, a relay with a standby, and a consumer that checks each promise: nothing lost, nothing
twice, order kept per key. Kill the relay and see the standby go on.

Keys: k kills the owner with -9, s stops it gracefully, b appends a burst, p pauses and resumes, q quits.

Where OUTRELAY_TEST_MONGODB_URI and OUTRELAY_TEST_KAFKA name servers, those are taken: with a database and topics of names
that nobody else has, which are removed at the end. Scenarios that break servers, or measure them, start their own.

With --events it ends when all have arrived, and exits with 0 only if nothing was lost, twice or out of order.

With --scenario it shows one promise under one fault, each within a minute or two, and exits with 0 only if the promise
held; --events and --rate then change how much of it there is:
` + scenarioList(),
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := checkDev(o); err != nil {
				return err
			}
			if c.Flags().Changed("scenario") {
				return p.scenario(c, scenario, o, asJSON)
			}
			if o.RebalanceEvery > 0 {
				return errors.New("--rebalance-every is for --scenario consumer")
			}
			return p.dev(c, o, asJSON)
		},
	}
	f := c.Flags()
	f.IntVar(&o.Events, "events", 0, "end after `N` events; 0 goes on until q or Ctrl-C")
	f.IntVar(&o.Rate, "rate", demo.DefaultRate, "events per second of the sample service")
	f.DurationVar(&o.KillEvery, "kill-every", 0, "kill the owner, or in scenario consumer a consumer, with -9 in this rhythm, for example 4s")
	f.DurationVar(&o.RebalanceEvery, "rebalance-every", 0, "in scenario consumer, let one more consumer join or leave in this rhythm, for example 1s")
	f.BoolVar(&o.Keep, "keep", false, "leave relays and servers up at the end, until Ctrl-C")
	f.StringVar(&scenario, "scenario", "", "show one promise under one fault: `NAME` is one of "+strings.Join(scenarioNames(), ", "))
	f.BoolVar(&asJSON, "json", false, "print one JSON object on standard output at the end")
	c.AddCommand(newDevCleanCommand(p))
	return c
}

func newDevCleanCommand(p *program) *cobra.Command {
	return &cobra.Command{
		Use:   "clean",
		Short: "Remove the servers and the browser that dev and the tests have fetched",
		Long: `Remove the programs that outrelay dev and the tests have fetched (MongoDB, Kafka, and Chromium for the tests of the page)
and the data of runs that have ended. The next run fetches again what it needs.

While servers of dev or of a test run, nothing is removed.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			cleaned, err := devstack.Clean(c.Context())
			for _, e := range cleaned {
				fmt.Fprintf(p.out, "removed %s, %.0f MB\n", e.Name, e.MB)
			}
			if err != nil {
				return fmt.Errorf("cleaning %s: %w", devstack.CacheDir(), err)
			}
			if len(cleaned) == 0 {
				fmt.Fprintf(p.out, "nothing to remove in %s\n", devstack.CacheDir())
			}
			return nil
		},
	}
}

func checkDev(o demo.Options) error {
	var errs []error
	if o.Events < 0 {
		errs = append(errs, fmt.Errorf("--events %d: found a negative number; expected 0 or more", o.Events))
	}
	if o.Rate < 1 || o.Rate > 100_000 {
		errs = append(errs, fmt.Errorf("--rate %d: expected between 1 and 100000", o.Rate))
	}
	for _, f := range []struct {
		name string
		is   time.Duration
	}{{"kill-every", o.KillEvery}, {"rebalance-every", o.RebalanceEvery}} {
		if f.is < 0 || f.is > 0 && f.is < time.Second {
			errs = append(errs, fmt.Errorf("--%s %v: expected 0 or at least 1s", f.name, f.is))
		}
	}
	return errors.Join(errs...)
}

func scenarioNames() []string {
	var names []string
	for _, s := range demo.Scenarios() {
		names = append(names, s.Name)
	}
	return names
}

// scenarioList is one line for each scenario.
func scenarioList() string {
	var b strings.Builder
	for _, s := range demo.Scenarios() {
		fmt.Fprintf(&b, "  %-14s %s\n", s.Name, s.Promise)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// scenario runs one: its account, or with asJSON one object, goes to standard output, what happens on the way to standard
// error.
func (p *program) scenario(c *cobra.Command, name string, o demo.Options, asJSON bool) error {
	s, err := demo.FindScenario(name)
	if err != nil {
		return fmt.Errorf("--scenario: %w", err)
	}
	for _, flag := range []string{"keep", "kill-every", "rebalance-every"} {
		if c.Flags().Changed(flag) && (flag == "keep" || !s.Kills()) {
			return fmt.Errorf("--%s does not go with --scenario %s: it ends by itself and breaks what it has to break", flag, name)
		}
	}
	if !c.Flags().Changed("rate") {
		o.Rate = 0 // the scenario's own
	}
	if err := p.here(&o); err != nil {
		return err
	}
	f, err := demo.RunScenario(c.Context(), s, o)
	if err != nil {
		return devError(err)
	}
	if asJSON {
		err = printJSON(p.out, f)
	} else {
		_, err = fmt.Fprintln(p.out, demo.Account(s, f))
	}
	if err == nil && f.Err() != nil {
		fmt.Fprintf(p.errOut, "outrelay: %v\n", f.Err())
		err = silent(exitConfig)
	}
	return err
}

// here fills in what a run needs of this process.
func (p *program) here(o *demo.Options) error {
	binary, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding this program, which is to be the relay: %w", err)
	}
	o.Binary, o.Env, o.Out, o.Stopper = binary, p.env, p.errOut, p.onHardStop
	o.Terminal = demo.OpenTerminal(p.in, p.errOut)
	return nil
}

// devError is an error of the surroundings: servers that this machine cannot have are the user's to provide, others may go
// away.
func devError(err error) error {
	var none *devstack.UnavailableError
	if errors.As(err, &none) {
		return err
	}
	return temporary(fmt.Errorf("dev: %w", err))
}

func (p *program) dev(c *cobra.Command, o demo.Options, asJSON bool) error {
	if err := p.here(&o); err != nil {
		return err
	}
	var printed error
	o.Result = func(r demo.Result) {
		if asJSON {
			printed = printJSON(p.out, r)
		}
	}
	r, err := demo.Run(c.Context(), o)
	switch {
	case err != nil:
		return devError(err)
	case printed != nil:
		return printed
	case r.Err() != nil:
		fmt.Fprintf(p.errOut, "outrelay: %v\n", r.Err())
		return silent(exitConfig)
	}
	return nil
}
