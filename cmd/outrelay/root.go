package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/logging"
)

// The exit codes.
const (
	exitOK        = 0
	exitConfig    = 1  // wrong configuration or command line, or a failed check
	exitTemporary = 75 // EX_TEMPFAIL: starting again later may help
)

// program is what all commands share: the streams, the environment, the flags of the root.
type program struct {
	in          io.Reader
	out, errOut io.Writer
	env         []string
	exit        func(code int) // ends the process at once

	configFile string
	set        []string
	named      map[string]*string // named flags, by the key they stand for

	level slog.LevelVar

	mu       sync.Mutex
	hardStop []func()
}

// run executes one command line and returns the exit code. It installs the signal handling for the time it runs.
func run(ctx context.Context, args, env []string, in io.Reader, out, errOut io.Writer) int {
	p := &program{in: in, out: out, errOut: errOut, env: env, exit: os.Exit}
	ctx, stop := p.signals(ctx)
	defer stop()
	return p.execute(ctx, args)
}

func (p *program) execute(ctx context.Context, args []string) int {
	root := newRootCommand(p)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err != nil && !errors.As(err, new(silent)) {
		fmt.Fprintln(p.errOut, "outrelay: "+logging.Clean(err.Error()))
	}
	return exitCode(err)
}

// commands are the constructors of everything under the root, in the order of the help.
func commands() []func(*program) *cobra.Command {
	return slices.Concat([]func(*program) *cobra.Command{
		newRunCommand,
	}, developmentCommands(), []func(*program) *cobra.Command{
		newStatusCommand,
		newNodesCommand,
		newEventsCommand,
		newLookupCommand,
		newPingCommand,
		newDoctorCommand,
		newRolesCommand,
		newPauseCommand,
		newResumeCommand,
		newPinCommand,
		newStepDownCommand,
		newScheduledCommand,
		newRecoverCommand,
		newResliceCommand,
		newPurgeCommand,
		newHistoryCommand,
		newDeadCommand,
		newWaitingCommand,
		newFailedCommand,
		newReplayCommand,
		newSagaCommand,
		newInboxCommand,
		newStorageCommand,
		newMigrateCommand,
		newValidateCommand,
		newConfigCommand,
		newSchemaCommand,
		newVersionCommand,
		newDocsCommand,
	})
}

func newRootCommand(p *program) *cobra.Command {
	root := &cobra.Command{
		Use:           "outrelay",
		Short:         "Relay events from MongoDB outbox collections to Kafka",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		RunE:          func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	root.SetIn(p.in)
	root.SetOut(p.out)
	root.SetErr(p.errOut)
	flags := root.PersistentFlags()
	flags.StringVarP(&p.configFile, "config", "c", value(p.env, "OUTRELAY_CONFIG"), "YAML `file` with the configuration; none takes everything from the environment")
	flags.StringArrayVar(&p.set, "set", nil, "set one key, as `path=value`; wins over the file and the environment; may be repeated")
	p.named = make(map[string]*string)
	for _, f := range []struct{ name, key, usage string }{
		{"watcher", "watcher", "`name` of the watcher"},
		{"watch", "watch", "outbox `collections` to watch, separated by commas"},
		{"brokers", "kafka.brokers", "Kafka `addresses` to start from, separated by commas"},
		{"listen", "http.listen", "`host:port` of health and metrics, or off"},
		{"log-level", "log.level", "debug, info, warn or error"},
		{"log-format", "log.format", "auto, text or json"},
	} {
		p.named[f.key] = flags.String(f.name, "", f.usage)
	}
	complete(root)
	for _, make := range commands() {
		root.AddCommand(make(p))
	}
	return root
}

// complete teaches the shell what the flags of the root take.
func complete(root *cobra.Command) {
	fixed := func(words ...string) cobra.CompletionFunc {
		return cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp)
	}
	keys := make([]string, 0, len(config.Keys()))
	for _, key := range config.Keys() {
		keys = append(keys, key+"=")
	}
	for flag, f := range map[string]cobra.CompletionFunc{
		"log-level":  fixed("debug", "info", "warn", "error"),
		"log-format": fixed("auto", "text", "json"),
		"config":     cobra.FixedCompletions([]string{"yaml", "yml"}, cobra.ShellCompDirectiveFilterFileExt),
		"set":        cobra.FixedCompletions(keys, cobra.ShellCompDirectiveNoSpace|cobra.ShellCompDirectiveNoFileComp),
	} {
		if err := root.RegisterFlagCompletionFunc(flag, f); err != nil {
			panic("outrelay: " + err.Error()) // a flag that newRootCommand does not define
		}
	}
}

// load reads the configuration as the flags say. Warnings are returned for the caller to log.
func (p *program) load() (config.Config, []string, error) {
	return config.Load(p.configFile, p.env, p.settings())
}

// settings are what the flags set, each path=value.
func (p *program) settings() []string {
	set := p.set
	for key, v := range p.named {
		if *v != "" {
			set = append(set[:len(set):len(set)], key+"="+*v)
		}
	}
	return set
}

// logger makes the logger of a configuration, on standard error. Its level follows p.level from then on.
func (p *program) logger(c config.Log) *slog.Logger {
	level, err := logging.ParseLevel(c.Level)
	if err != nil {
		level = slog.LevelInfo // Load lets no other level through; a Config made by hand may have one
	}
	p.level.Set(level)
	return slog.New(logging.Limit(logging.New(p.errOut, &p.level, logging.Format(c.Format))))
}

// loadAndLog is load with a logger that has told the warnings.
func (p *program) loadAndLog() (config.Config, *slog.Logger, error) {
	cfg, warnings, err := p.load()
	if err != nil {
		return cfg, nil, err
	}
	log := p.logger(cfg.Log)
	for _, w := range warnings {
		log.Warn(w)
	}
	return cfg, log, nil
}

// codeError is an error with an exit code of its own.
type codeError struct {
	code int
	err  error
}

func (e *codeError) Error() string { return e.err.Error() }
func (e *codeError) Unwrap() error { return e.err }

// temporary marks err as one that may go away: the process exits with 75. A nil err stays nil.
func temporary(err error) error {
	if err == nil {
		return nil
	}
	return &codeError{exitTemporary, err}
}

// silent is a failure that was told already: it only sets the exit code.
type silent int

func (s silent) Error() string { return fmt.Sprintf("exit code %d", int(s)) }

func exitCode(err error) int {
	var coded *codeError
	var told silent
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &coded):
		return coded.code
	case errors.As(err, &told):
		return int(told)
	}
	return exitConfig
}

// value is the value of an environment variable.
func value(env []string, name string) string {
	for i := len(env) - 1; i >= 0; i-- {
		if rest, ok := strings.CutPrefix(env[i], name+"="); ok {
			return rest
		}
	}
	return ""
}
