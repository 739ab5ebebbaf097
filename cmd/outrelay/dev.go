//go:build !release

package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/lab/demo"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/operate/doctor"
)

func newDevCommand(program *program) *cobra.Command {
	var (
		options  demo.Options
		scenario string
		asJSON   bool
	)
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run a demo with MongoDB, Kafka, two relays and a sample service on this machine",
		Long: `Start a MongoDB replica set and Kafka on this machine, a sample order service that appends events in
transactions, a relay with a standby, and a consumer that checks the promises: no event is lost, no
event arrives twice, and events of a key stay in order. Kill the relay and watch the standby take
over. The line "servers" shows their origin on this machine.

With --rate 0, the sample service is silent, and you append your own events to shop.outbox: the
command prints the addresses, and "outrelay dev topic" prints the records. With --keep, the
load continues, and your own events may come in addition.

--set sets keys of the relays, such as --set record.preset=plain. Keys that the demo chooses, such as
watcher or kafka.brokers, are rejected.

Keys: k kills the owner with -9, s stops it gracefully, b appends a burst, p pauses and resumes, q
quits.

If OUTRELAY_TEST_MONGODB_URI and OUTRELAY_TEST_KAFKA are set, the command uses these servers. It
creates a database and topics with unique names there, and removes them at the end. Scenarios that
break or measure servers start their own.

With --events, the command ends when all events have arrived. It exits with 0 only if no event was
lost, repeated or out of order.

With --scenario, the command shows one promise under one fault within a minute or two. It exits with 0 only if the promise
held. --events and --rate then change the load:
` + scenarioList(),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := program.completeDevOptions(cmd, &options); err != nil {
				return err
			}

			if cmd.Flags().Changed("scenario") {
				return program.runScenario(cmd, scenario, options, asJSON)
			}
			if options.RebalanceEvery > 0 {
				return errors.New("--rebalance-every needs --scenario consumer")
			}
			return program.runDev(cmd, options, asJSON)
		},
	}

	flags := cmd.Flags()
	flags.IntVar(&options.Events, "events", 0, "end after `N` events; 0: run until q or Ctrl-C")
	flags.IntVar(&options.Rate, "rate", demo.DefaultRate, "events per second of the sample service; 0: none, for your own events")
	flags.DurationVar(&options.KillEvery, "kill-every", 0, "interval for killing the owner, or in scenario consumer a consumer, with -9, such as 4s")
	flags.DurationVar(&options.RebalanceEvery, "rebalance-every", 0, "in scenario consumer, interval for one more consumer to join or leave, such as 1s")
	flags.BoolVar(&options.Keep, "keep", false, "keep relays and servers running at the end, until Ctrl-C")
	flags.StringVar(&scenario, "scenario", "", "show one promise under one fault; `NAME` is one of "+strings.Join(scenarioNames(), ", "))
	flags.BoolVar(&asJSON, "json", false, "print one JSON object on standard output at the end")
	cmd.AddCommand(newDevTopicCommand(program), newDevCleanCommand(program))
	return cmd
}

func newDevCleanCommand(program *program) *cobra.Command {
	return &cobra.Command{
		Use:   "clean",
		Short: "Remove the servers and the browser that dev and the tests have downloaded",
		Long: `Remove the programs that outrelay dev and the tests have downloaded (MongoDB, Kafka, and Chromium
for the tests of the page), and the data of runs that have ended. The next run downloads them again.

Nothing is removed while servers of dev or of a test are running.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			// An error may come after some entries were removed, so the entries are listed first.
			cleaned, err := devstack.Clean(cmd.Context())
			for _, e := range cleaned {
				fmt.Fprintf(program.out, "removed %s, %.0f MB\n", e.Name, e.MB)
			}

			if err != nil {
				return fmt.Errorf("cleaning %s: %w", devstack.CacheDir(), err)
			}
			if len(cleaned) == 0 {
				fmt.Fprintf(program.out, "nothing to remove in %s\n", devstack.CacheDir())
			}
			return nil
		},
	}
}

// completeDevOptions checks the options and the flags of the root command, and applies these flags.
func (p *program) completeDevOptions(cmd *cobra.Command, options *demo.Options) error {
	errs := []error{checkDevOptions(*options)}
	if cmd.Flags().Changed("config") {
		errs = append(errs, errors.New("--config cannot be used with dev, which writes its own file: pass keys by --set"))
	}
	options.Settings = p.flagSettings()
	if err := demo.CheckSettings(options.Settings); err != nil {
		errs = append(errs, err)
	}
	if cmd.Flags().Changed("scenario") {
		if len(options.Settings) > 0 {
			errs = append(errs, errors.New("--set cannot be used with --scenario, which chooses the configuration"))
		}
		if options.Rate == 0 {
			errs = append(errs, errors.New("--rate 0 cannot be used with --scenario"))
		}
	}

	// In demo.Options 0 selects the default.
	if options.Rate == 0 {
		options.Rate = -1 // of demo.Options: none
	}
	return errors.Join(errs...)
}

// checkDevOptions returns all problems of the options.
func checkDevOptions(options demo.Options) error {
	var errs []error
	if options.Events < 0 {
		errs = append(errs, fmt.Errorf("--events %d: expected 0 or more", options.Events))
	}
	if options.Rate < 0 || options.Rate > 100_000 {
		errs = append(errs, fmt.Errorf("--rate %d: expected between 0 and 100000", options.Rate))
	}
	if options.Rate == 0 && (options.Events > 0 || options.KillEvery > 0) {
		errs = append(errs, errors.New("--rate 0 cannot be used with --events or --kill-every, which need events of the sample service"))
	}

	for _, f := range []struct {
		name     string
		interval time.Duration
	}{{"kill-every", options.KillEvery}, {"rebalance-every", options.RebalanceEvery}} {
		if f.interval < 0 || f.interval > 0 && f.interval < time.Second {
			errs = append(errs, fmt.Errorf("--%s %v: expected 0 or at least 1s", f.name, f.interval))
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

// scenarioList returns one line for each scenario.
func scenarioList() string {
	var builder strings.Builder
	for _, s := range demo.Scenarios() {
		fmt.Fprintf(&builder, "  %-14s %s\n", s.Name, s.Promise)
	}
	return strings.TrimSuffix(builder.String(), "\n")
}

// runScenario runs a scenario. Its progress goes to standard error, its account to standard output.
// With asJSON, the account is one JSON object.
func (p *program) runScenario(cmd *cobra.Command, name string, options demo.Options, asJSON bool) error {
	scenario, err := demo.FindScenario(name)
	if err != nil {
		return fmt.Errorf("--scenario: %w", err)
	}

	for _, flag := range []string{"keep", "kill-every", "rebalance-every"} {
		if cmd.Flags().Changed(flag) && (flag == "keep" || !scenario.Kills()) {
			return fmt.Errorf("--%s cannot be used with --scenario %s, which controls its own end and faults", flag, name)
		}
	}
	if !cmd.Flags().Changed("rate") {
		// 0 selects the rate of the scenario.
		options.Rate = 0
	}

	if err := p.fillOptions(&options); err != nil {
		return err
	}
	finding, err := demo.RunScenario(cmd.Context(), scenario, options)
	if err != nil {
		return devError(err)
	}

	if asJSON {
		err = printJSON(p.out, finding)
	} else {
		_, err = fmt.Fprintln(p.out, demo.FormatFinding(scenario, finding))
	}
	// A broken promise is the result of the scenario, not an error of the command: the account above explains it.
	if err == nil && finding.Err() != nil {
		fmt.Fprintf(p.errOut, "outrelay: %v\n", finding.Err())
		err = reportedError(exitConfig)
	}
	return err
}

// fillOptions sets the options that come from this process: its binary, environment and terminal.
func (p *program) fillOptions(options *demo.Options) error {
	binary, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding the path of this program to start it as the relay: %w", err)
	}

	options.Binary = binary
	options.Env = p.env
	options.Out = p.errOut
	options.Stopper = p.onHardStop
	options.Terminal = demo.OpenTerminal(p.in, p.errOut)
	return nil
}

// devError marks an error of the environment as temporary, unless the servers are not available for
// this machine, or given servers reject the login.
func devError(err error) error {
	if errors.As(err, new(*devstack.UnavailableError)) || doctor.ReasonOf(err).Lasting {
		return err
	}
	if errors.As(err, new(*doctor.Unusable)) {
		return markTemporary(err)
	}
	return markTemporary(fmt.Errorf("dev: %w", err))
}

// runDev runs the demo without a scenario.
func (p *program) runDev(cmd *cobra.Command, options demo.Options, asJSON bool) error {
	if err := p.fillOptions(&options); err != nil {
		return err
	}

	var printErr error
	options.Result = func(result demo.Result) {
		// The result is complete before --keep waits for Ctrl-C, so it is printed here.
		if asJSON {
			printErr = printJSON(p.out, result)
		}
	}
	result, err := demo.Run(cmd.Context(), options)
	if err != nil {
		return devError(err)
	}
	if printErr != nil {
		return printErr
	}

	if result.Err() != nil {
		fmt.Fprintf(p.errOut, "outrelay: %v\n", result.Err())
		return reportedError(exitConfig)
	}
	return nil
}
