package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/outrelay/outrelay/internal/base/logging"
	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/relay/connect"
)

// program holds the state that all commands share: the streams, the environment and the flags of the
// root command.
type program struct {
	in          io.Reader
	out, errOut io.Writer
	env         []string
	exit        func(code int) // ends the process at once

	configFile  string
	contextName string   // of --context
	context     string   // the context in use, or "" for none
	contextSet  []string // the settings of the context in use
	setFlags    []string
	namedFlags  map[string]*pflag.Flag // flags such as --watcher, by the configuration key that they set

	level slog.LevelVar

	mu        sync.Mutex
	hardStops []func()
}

// runCommandLine executes one command line and returns the exit code. It handles interrupts and SIGTERM
// while it runs.
func runCommandLine(ctx context.Context, args, env []string, in io.Reader, out, errOut io.Writer) int {
	program := &program{in: in, out: out, errOut: errOut, env: env, exit: os.Exit}
	ctx, stop := program.handleSignals(ctx)
	defer stop()

	return program.executeCommand(ctx, args)
}

// executeCommand parses args, runs the command, prints its error and returns the exit code.
func (p *program) executeCommand(ctx context.Context, args []string) int {
	root := newRootCommand(p)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)

	if err != nil && !errors.As(err, new(reportedError)) {
		text := topologyText.ReplaceAllString(err.Error(), "")
		if cause := context.Cause(ctx); errors.As(cause, new(errInterrupted)) {
			text = cause.Error() + ": " + text
		}
		fmt.Fprintln(p.errOut, "outrelay: "+logging.Clean(text))
	}
	return exitCode(err)
}

// topologyText is the description of all servers that the driver adds to its error if a call ends while it waits for a server.
var topologyText = regexp.MustCompile(`, current topology: \{.*\}`)

// commandGroup is a part of the help of the root command.
type commandGroup struct {
	id, title string
	commands  []func(*program) *cobra.Command
}

// commandGroups returns the constructors of all commands under the root, in the order of the help.
func commandGroups() []commandGroup {
	return []commandGroup{
		{"relay", "Run and control the relay:", []func(*program) *cobra.Command{
			newRunCommand, newPauseCommand, newResumeCommand, newPinCommand, newStepDownCommand, newWatchersCommand,
			newResliceCommand, newRecoverCommand,
		}},
		{"look", "Look and check:", []func(*program) *cobra.Command{
			newStatusCommand, newProblemsCommand, newTopicsCommand, newGroupsCommand, newNodesCommand, newAuditCommand, newLookupCommand, newPingCommand,
			newDoctorCommand,
		}},
		{"events", "Events that wait, failed or are sent again:", []func(*program) *cobra.Command{
			newDeadCommand, newFailedCommand, newWaitingCommand, newScheduledCommand, newReplayCommand,
		}},
		{"services", "Sagas and inboxes of services:", []func(*program) *cobra.Command{
			newSagaCommand, newInboxCommand,
		}},
		{"storage", "Storage and migration:", []func(*program) *cobra.Command{
			newSetupCommand, newStorageCommand, newPurgeCommand, newHistoryCommand, newAdoptCommand, newImportCommand,
		}},
		{"configuration", "Configuration:", []func(*program) *cobra.Command{
			newValidateCommand, newConfigCommand, newContextCommand, newSchemaCommand, newRolesCommand,
		}},
		{"development", "Try out and measure:", developmentCommands()},
		{"program", "This program:", []func(*program) *cobra.Command{
			newVersionCommand, newDocsCommand,
		}},
	}
}

// newRootCommand returns the root command with all flags, completions and subcommands. Parsing its
// flags fills in program.
func newRootCommand(program *program) *cobra.Command {
	root := &cobra.Command{
		Use:           "outrelay",
		Short:         "Relay events from MongoDB outbox collections to Kafka",
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       thisBuild().Version,
		Args:          noArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		// Cobra checks its groups of flags after this hook, but a context must not be read for a wrong command line.
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkFlagGroups(cmd); err != nil {
				return err
			}
			// The commands of contexts must work even if a context is wrong.
			if cmd.HasParent() && cmd.Parent().Name() == "context" {
				return nil
			}
			return program.useContext(cmd)
		},
	}
	root.SetIn(program.in)
	root.SetOut(program.out)
	root.SetErr(program.errOut)
	root.SetFlagErrorFunc(explainFlagError)
	root.SetVersionTemplate(thisBuild().String())

	flags := root.PersistentFlags()
	flags.StringVarP(&program.configFile, "config", "c", envValue(program.env, "OUTRELAY_CONFIG"),
		"YAML `file` with the configuration; without a file, only the environment and flags count")
	flags.StringArrayVar(&program.setFlags, "set", nil,
		"set one key, as `path=value`; takes precedence over the file and the environment; may be repeated")
	flags.StringVar(&program.contextName, "context", "", "`name` of the environment to use: see outrelay context")
	program.namedFlags = make(map[string]*pflag.Flag)
	for _, f := range []struct{ name, key, usage string }{
		{"watcher", "watcher", "`name` of the watcher"},
		{"watch", "watch", "outbox `collections` to watch, separated by commas"},
		{"brokers", "kafka.brokers", "Kafka bootstrap `addresses`, separated by commas"},
		{"listen", "http.listen", "`host:port` of health and metrics, or off"},
		{"log-level", "log.level", "debug, info, warn or error"},
		{"log-format", "log.format", "auto, text or json"},
	} {
		flags.String(f.name, "", f.usage)
		program.namedFlags[f.key] = flags.Lookup(f.name)
	}
	registerCompletions(root)

	for _, g := range commandGroups() {
		root.AddGroup(&cobra.Group{ID: g.id, Title: g.title})
		for _, newCommand := range g.commands {
			cmd := newCommand(program)
			cmd.GroupID = g.id
			root.AddCommand(cmd)
		}
	}
	root.SetHelpCommandGroupID("program")
	rejectUnknownTopics(root)
	root.SetCompletionCommandGroupID("program")
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() == "completion" {
			newGroup(c)
		}
	}
	return root
}

// rejectUnknownTopics makes `help` return an error for a command that does not exist. Cobra prints the help of the command above it.
func rejectUnknownTopics(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	for _, help := range root.Commands() {
		if help.Name() != "help" {
			continue
		}

		help.Run = nil
		help.RunE = func(_ *cobra.Command, args []string) error {
			of, rest, err := root.Find(args)
			if err == nil && len(rest) == 0 {
				of.InitDefaultHelpFlag()
				return of.Help()
			}
			return unknownCommandError(of, rest[0])
		}
	}
}

// registerCompletions registers the values that the shell offers for the flags of the root command.
func registerCompletions(root *cobra.Command) {
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
		// The call fails only for a flag that newRootCommand does not define.
		if err := root.RegisterFlagCompletionFunc(flag, f); err != nil {
			panic("outrelay: " + err.Error())
		}
	}
}

// loadConfig reads the configuration from the file, the environment and the flags. It returns warnings
// for the caller to print or log.
func (p *program) loadConfig() (config.Config, []string, error) {
	cfg, warnings, err := config.Load(p.configFile, p.env, p.flagSettings())
	p.nameSources(err)
	if problems, found := errors.AsType[*config.Problems](err); found && p.lacksFile(problems) {
		err = fmt.Errorf("%w\n  %s", err, noFile)
	}
	return cfg, warnings, err
}

// noFile is the fix if a command misses its configuration because the user has named none.
const noFile = "no configuration file was read; pass --config FILE, or set OUTRELAY_CONFIG"

// lacksFile reports whether the problems are probably those of a forgotten file: no file was read, and the address of MongoDB is missing.
func (p *program) lacksFile(problems *config.Problems) bool {
	isAddress := func(problem config.Problem) bool { return problem.Path == "mongodb.uri" && problem.Source == "" }
	return p.configFile == "" && slices.ContainsFunc(problems.List, isAddress)
}

// flagSettings returns the settings of the context and of the flags, each as path=value. A later setting overrides an earlier one, so
// the command line comes last.
func (p *program) flagSettings() []string {
	set := slices.Concat(p.contextSet, p.setFlags)
	for key, flag := range p.namedFlags {
		if value := flag.Value.String(); value != "" {
			set = append(set, key+"="+value)
		}
	}
	return set
}

// nameSources names the flag or the context in each problem of a value that the user has not passed with --set.
func (p *program) nameSources(err error) {
	problems, _ := errors.AsType[*config.Problems](err)
	if problems == nil {
		return
	}
	for i := range problems.List {
		problem := &problems.List[i]
		if problem.Source != config.SetFlag {
			continue
		}

		key, _, _ := strings.Cut(problem.Path, "[")
		concerns := func(setting string) bool {
			set, _, _ := strings.Cut(setting, "=")
			return set == key || strings.HasPrefix(set, key+".") || strings.HasPrefix(key, set+".")
		}
		if flag := p.namedFlags[key]; flag != nil && flag.Value.String() != "" {
			problem.Source = "--" + flag.Name
		} else if slices.ContainsFunc(p.contextSet, concerns) && !slices.ContainsFunc(p.setFlags, concerns) {
			problem.Source = "context " + p.context
		}
	}
}

// newLogger returns a logger on standard error. Its level follows p.level from then on.
func (p *program) newLogger(log config.Log) *slog.Logger {
	// Load rejects unknown levels. In a Config that was not loaded, such a level means the zero level, which is info.
	var level slog.Level
	_ = level.UnmarshalText([]byte(log.Level))
	p.level.Set(level)
	return slog.New(logging.Limit(logging.New(p.errOut, &p.level, logging.Format(log.Format)), connect.DescribeOutage))
}

// loadWithLogger reads the configuration, makes its logger and logs the warnings.
func (p *program) loadWithLogger() (config.Config, *slog.Logger, error) {
	cfg, warnings, err := p.loadConfig()
	if err != nil {
		return cfg, nil, err
	}

	log := p.newLogger(cfg.Log)
	for _, w := range warnings {
		log.Warn(w)
	}
	return cfg, log, nil
}

// envValue returns the value of an environment variable, or "". The last assignment in env counts.
func envValue(env []string, name string) string {
	for i := len(env) - 1; i >= 0; i-- {
		if rest, ok := strings.CutPrefix(env[i], name+"="); ok {
			return rest
		}
	}
	return ""
}

// newGroup makes cmd a command that only has subcommands. Without one it prints its help.
func newGroup(cmd *cobra.Command, subcommands ...*cobra.Command) *cobra.Command {
	cmd.Args = noArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	cmd.AddCommand(subcommands...)
	return cmd
}
