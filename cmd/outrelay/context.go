package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/outrelay/outrelay/internal/contract/config"
)

// namedContext is an environment: a configuration file, settings, or both.
type namedContext struct {
	Config string   `yaml:"config,omitempty" json:"config,omitempty"`
	Set    []string `yaml:"set,omitempty" json:"set,omitempty"`
}

// contextFile is the file with the contexts of the user.
type contextFile struct {
	Current  string                  `yaml:"current,omitempty"`
	Contexts map[string]namedContext `yaml:"contexts"`
}

// contextPath returns the path of the file with the contexts: OUTRELAY_CONTEXTS, or contexts.yaml in the directory
// outrelay of the user's configuration directory. It returns "" if the user has no such directory.
func contextPath(env []string) string {
	if path := envValue(env, "OUTRELAY_CONTEXTS"); path != "" {
		return path
	}

	dir := envValue(env, "XDG_CONFIG_HOME")
	home := envValue(env, "HOME")
	switch {
	case runtime.GOOS == "windows":
		dir = envValue(env, "AppData")
	case runtime.GOOS == "darwin" && home != "":
		dir = filepath.Join(home, "Library", "Application Support")
	case dir == "" && home != "":
		dir = filepath.Join(home, ".config")
	}
	if dir == "" {
		return ""
	}
	return filepath.Join(dir, "outrelay", "contexts.yaml")
}

// readContexts returns the contexts of the user, and none if the file does not exist.
func readContexts(env []string) (contextFile, error) {
	file := contextFile{Contexts: map[string]namedContext{}}
	path := contextPath(env)
	if path == "" {
		return file, nil
	}
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return file, nil
	}
	if err != nil {
		return file, fmt.Errorf("reading the contexts: %w", err)
	}

	decoder := yaml.NewDecoder(strings.NewReader(string(text)))
	decoder.KnownFields(true)
	if err := decoder.Decode(&file); err != nil && !errors.Is(err, io.EOF) {
		return file, fmt.Errorf("reading the contexts in %s: not valid; expected the keys current and contexts, and in each context config and set", path)
	}
	return file, nil
}

// writeContexts replaces the file with the contexts. Only the user may read it, because --set may hold secrets.
func writeContexts(env []string, file contextFile) error {
	path := contextPath(env)
	if path == "" {
		return errors.New("there is no directory for the contexts: set HOME, or OUTRELAY_CONTEXTS to the path of a file")
	}

	text, err := yaml.Marshal(file)
	if err != nil {
		return fmt.Errorf("formatting the contexts: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("writing the contexts: %w", err)
	}

	// A rename never leaves half a file.
	next := path + ".new"
	if err := os.WriteFile(next, text, 0o600); err != nil {
		return fmt.Errorf("writing the contexts: %w", err)
	}
	if err := os.Rename(next, path); err != nil {
		return fmt.Errorf("writing the contexts: %w", err)
	}
	return nil
}

// find returns the named context.
func (f contextFile) find(name string) (namedContext, error) {
	context, ok := f.Contexts[name]
	if ok {
		return context, nil
	}

	names := slices.Sorted(maps.Keys(f.Contexts))
	switch near := config.NearestName(name, names); {
	case near != "":
		return context, fmt.Errorf("context %q does not exist; did you mean %s?", name, near)
	case len(names) == 0:
		return context, fmt.Errorf("context %q does not exist; create it with `outrelay context set %s --config FILE`", name, name)
	}
	return context, fmt.Errorf("context %q does not exist; the contexts are %s", name, strings.Join(names, ", "))
}

// useContext reads the context that the command uses, and fills in the configuration file and the settings that the
// command line does not have. --context has precedence over OUTRELAY_CONTEXT, and that over the current context. The
// current context does not apply if a configuration file is named, or to a command that is not for people.
func (p *program) useContext(cmd *cobra.Command) error {
	name := p.contextName
	if name == "" {
		name = envValue(p.env, "OUTRELAY_CONTEXT")
	}
	named := name != ""
	if named && cmd.Flags().Changed("config") {
		return errors.New("--config and a context exclude each other: pass one of them, or unset OUTRELAY_CONTEXT")
	}
	// A daemon must not depend on the context that a person selected last.
	if !named && (p.configFile != "" || cmd.Annotations[annotationNoContext] != "") {
		return nil
	}

	file, err := readContexts(p.env)
	if err != nil {
		return err
	}
	if !named {
		name = file.Current
	}
	if name == "" {
		return nil
	}
	found, err := file.find(name)
	if err != nil {
		return err
	}

	p.context = name
	// A context without a file, if it is named, also overrides the file of the environment.
	if found.Config != "" || named {
		p.configFile = found.Config
	}
	p.contextSet = found.Set
	return nil
}

// annotationNoContext marks a command that uses a context only if the command line or the environment names it: `run`
// must not start a relay in an environment that was selected for looking at it.
const annotationNoContext = "outrelay_no_current_context"

func newContextCommand(program *program) *cobra.Command {
	return newGroup(&cobra.Command{
		Use:   "context",
		Short: "Name environments, and select the environment that the commands use",
		Long: `A context is a name for an environment: a configuration file, settings, or both. Commands use the
context of --context, of OUTRELAY_CONTEXT, or else the current one. They do not use the current
context if --config or OUTRELAY_CONFIG names a file. outrelay run never uses the current context.

The contexts are in contexts.yaml in the directory outrelay of the user's configuration directory, or
in the file that OUTRELAY_CONTEXTS names.`,
		Example: `  outrelay context set prod --config /etc/outrelay/prod.yaml
  outrelay context use prod
  outrelay --context staging status`,
	}, newContextListCommand(program), newContextShowCommand(program), newContextUseCommand(program), newContextSetCommand(program), newContextRemoveCommand(program))
}

func newContextListCommand(program *program) *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the contexts; * marks the current one",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			file, err := readContexts(program.env)
			if err != nil {
				return err
			}

			const empty = "there are no contexts; create one with `outrelay context set NAME --config FILE`"
			names := slices.Sorted(maps.Keys(file.Contexts))
			return program.printText(func(out io.Writer) {
				writeList(out, empty, "CONTEXT\tCURRENT\tCONFIG\tSETTINGS", names, func(name string) cells {
					mark := ""
					if name == file.Current {
						mark = "*"
					}
					return cells{name, mark, file.Contexts[name].Config, len(file.Contexts[name].Set)}
				})
			})
		},
	}
}

func newContextShowCommand(program *program) *cobra.Command {
	return &cobra.Command{
		Use:   "show [NAME]",
		Short: "Show a context, or without a name the current one; the values of settings are hidden",
		Args:  maxArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			file, err := readContexts(program.env)
			if err != nil {
				return err
			}
			name := file.Current
			if len(args) > 0 {
				name = args[0]
			}
			if name == "" {
				return errors.New("there is no current context; select one with `outrelay context use NAME`")
			}
			context, err := file.find(name)
			if err != nil {
				return err
			}

			fmt.Fprintf(program.out, "context  %s\nconfig   %s\n", sanitizeLine(name), sanitizeLine(context.Config))
			for _, s := range context.Set {
				// A value may be a secret.
				key, _, _ := strings.Cut(s, "=")
				fmt.Fprintf(program.out, "set      %s=***\n", sanitizeLine(key))
			}
			return nil
		},
	}
}

func newContextUseCommand(program *program) *cobra.Command {
	var off bool
	cmd := &cobra.Command{
		Use:   "use NAME",
		Short: "Make a context the current one; --off selects none",
		Args:  nameOrOff("context", &off),
		RunE: func(_ *cobra.Command, args []string) error {
			return program.changeContexts(func(file *contextFile) (string, error) {
				if off {
					file.Current = ""
					return "no context is current", nil
				}

				_, err := file.find(args[0])
				file.Current = args[0]
				return "context " + args[0] + " is current", err
			})
		},
	}
	cmd.Flags().BoolVar(&off, "off", false, "select no context")
	return cmd
}

func newContextSetCommand(program *program) *cobra.Command {
	return &cobra.Command{
		Use:         "set NAME",
		Short:       "Create or replace a context with the file of --config and the settings of --set",
		Args:        exactArgs(1),
		Annotations: map[string]string{annotationNoContext: "set"},
		RunE: func(cmd *cobra.Command, args []string) error {
			next := namedContext{Set: program.flagSettings()}
			if cmd.Flags().Changed("config") {
				path, err := filepath.Abs(program.configFile)
				if err != nil {
					return fmt.Errorf("--config: %w", err)
				}
				next.Config = path
			}
			// An empty context would silently select the defaults.
			if next.Config == "" && len(next.Set) == 0 {
				return argumentsError(cmd, "needs --config, --set or another flag of the configuration")
			}

			return program.changeContexts(func(file *contextFile) (string, error) {
				file.Contexts[args[0]] = next
				return "context " + args[0] + " is stored in " + contextPath(program.env), nil
			})
		},
	}
}

func newContextRemoveCommand(program *program) *cobra.Command {
	return &cobra.Command{
		Use:   "remove NAME",
		Short: "Remove a context; its configuration file stays",
		Args:  exactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			return program.changeContexts(func(file *contextFile) (string, error) {
				_, err := file.find(args[0])
				delete(file.Contexts, args[0])
				if file.Current == args[0] {
					file.Current = ""
				}
				return "context " + args[0] + " is removed", err
			})
		},
	}
}

// changeContexts changes the file with the contexts and prints what change returns.
func (p *program) changeContexts(change func(file *contextFile) (done string, err error)) error {
	file, err := readContexts(p.env)
	if err != nil {
		return err
	}
	if file.Contexts == nil {
		file.Contexts = map[string]namedContext{}
	}

	done, err := change(&file)
	if err != nil {
		return err
	}
	if err := writeContexts(p.env, file); err != nil {
		return err
	}

	_, err = fmt.Fprintln(p.out, sanitizeLine(done))
	return err
}
