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
	f := contextFile{Contexts: map[string]namedContext{}}
	path := contextPath(env)
	if path == "" {
		return f, nil
	}
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return f, nil
	}
	if err != nil {
		return f, fmt.Errorf("reading the contexts: %w", err)
	}

	d := yaml.NewDecoder(strings.NewReader(string(text)))
	d.KnownFields(true)
	if err := d.Decode(&f); err != nil && !errors.Is(err, io.EOF) {
		return f, fmt.Errorf("reading the contexts in %s: not valid; expected the keys current and contexts, and in each context config and set", path)
	}
	return f, nil
}

// writeContexts replaces the file with the contexts. Only the user may read it, because --set may hold secrets.
func writeContexts(env []string, f contextFile) error {
	path := contextPath(env)
	if path == "" {
		return errors.New("there is no directory for the contexts: set HOME, or OUTRELAY_CONTEXTS to the path of a file")
	}

	text, err := yaml.Marshal(f)
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
	c, ok := f.Contexts[name]
	if ok {
		return c, nil
	}

	names := slices.Sorted(maps.Keys(f.Contexts))
	switch near := config.NearestName(name, names); {
	case near != "":
		return c, fmt.Errorf("context %q does not exist; did you mean %s?", name, near)
	case len(names) == 0:
		return c, fmt.Errorf("context %q does not exist; create it with `outrelay context set %s --config FILE`", name, name)
	}
	return c, fmt.Errorf("context %q does not exist; the contexts are %s", name, strings.Join(names, ", "))
}

// useContext reads the context that the command uses, and fills in the configuration file and the settings that the
// command line does not have. --context has precedence over OUTRELAY_CONTEXT, and that over the current context. The
// current context does not apply if a configuration file is named, or to a command that is not for people.
func (p *program) useContext(c *cobra.Command) error {
	name := p.contextName
	if name == "" {
		name = envValue(p.env, "OUTRELAY_CONTEXT")
	}
	named := name != ""
	if named && c.Flags().Changed("config") {
		return errors.New("--config and a context exclude each other: pass one of them, or unset OUTRELAY_CONTEXT")
	}
	// A daemon must not depend on the context that a person selected last.
	if !named && (p.configFile != "" || c.Annotations[annotationNoContext] != "") {
		return nil
	}

	f, err := readContexts(p.env)
	if err != nil {
		return err
	}
	if !named {
		name = f.Current
	}
	if name == "" {
		return nil
	}
	found, err := f.find(name)
	if err != nil {
		return err
	}

	p.context = name
	// A context without a file, if it is named, also overrides the file of the environment.
	if found.Config != "" || named {
		p.configFile = found.Config
	}
	// A later setting overrides an earlier one, so the command line comes last.
	p.setFlags = slices.Concat(found.Set, p.setFlags)
	return nil
}

// annotationNoContext marks a command that uses a context only if the command line or the environment names it: `run`
// must not start a relay in an environment that was selected for looking at it.
const annotationNoContext = "outrelay_no_current_context"

func newContextCommand(p *program) *cobra.Command {
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
	}, newContextListCommand(p), newContextShowCommand(p), newContextUseCommand(p), newContextSetCommand(p), newContextRemoveCommand(p))
}

func newContextListCommand(p *program) *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the contexts; * marks the current one",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			f, err := readContexts(p.env)
			if err != nil {
				return err
			}

			const empty = "there are no contexts; create one with `outrelay context set NAME --config FILE`"
			names := slices.Sorted(maps.Keys(f.Contexts))
			return p.printText(func(w io.Writer) {
				writeList(w, empty, "CONTEXT\tCURRENT\tCONFIG\tSETTINGS", names, func(name string) cells {
					mark := ""
					if name == f.Current {
						mark = "*"
					}
					return cells{name, mark, f.Contexts[name].Config, len(f.Contexts[name].Set)}
				})
			})
		},
	}
}

func newContextShowCommand(p *program) *cobra.Command {
	return &cobra.Command{
		Use:   "show [NAME]",
		Short: "Show a context, or without a name the current one; the values of settings are hidden",
		Args:  maxArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			f, err := readContexts(p.env)
			if err != nil {
				return err
			}
			name := f.Current
			if len(args) > 0 {
				name = args[0]
			}
			if name == "" {
				return errors.New("there is no current context; select one with `outrelay context use NAME`")
			}
			c, err := f.find(name)
			if err != nil {
				return err
			}

			fmt.Fprintf(p.out, "context  %s\nconfig   %s\n", sanitizeLine(name), sanitizeLine(c.Config))
			for _, s := range c.Set {
				// A value may be a secret.
				key, _, _ := strings.Cut(s, "=")
				fmt.Fprintf(p.out, "set      %s=***\n", sanitizeLine(key))
			}
			return nil
		},
	}
}

func newContextUseCommand(p *program) *cobra.Command {
	var off bool
	c := &cobra.Command{
		Use:   "use NAME",
		Short: "Make a context the current one; --off selects none",
		Args:  nameOrOff("context", &off),
		RunE: func(_ *cobra.Command, args []string) error {
			return p.changeContexts(func(f *contextFile) (string, error) {
				if off {
					f.Current = ""
					return "no context is current", nil
				}

				_, err := f.find(args[0])
				f.Current = args[0]
				return "context " + args[0] + " is current", err
			})
		},
	}
	c.Flags().BoolVar(&off, "off", false, "select no context")
	return c
}

func newContextSetCommand(p *program) *cobra.Command {
	return &cobra.Command{
		Use:         "set NAME",
		Short:       "Create or replace a context with the file of --config and the settings of --set",
		Args:        exactArgs(1),
		Annotations: map[string]string{annotationNoContext: "set"},
		RunE: func(c *cobra.Command, args []string) error {
			next := namedContext{Set: p.flagSettings()}
			if c.Flags().Changed("config") {
				path, err := filepath.Abs(p.configFile)
				if err != nil {
					return fmt.Errorf("--config: %w", err)
				}
				next.Config = path
			}
			// An empty context would silently select the defaults.
			if next.Config == "" && len(next.Set) == 0 {
				return argumentsError(c, "needs --config, --set or another flag of the configuration")
			}

			return p.changeContexts(func(f *contextFile) (string, error) {
				f.Contexts[args[0]] = next
				return "context " + args[0] + " is stored in " + contextPath(p.env), nil
			})
		},
	}
}

func newContextRemoveCommand(p *program) *cobra.Command {
	return &cobra.Command{
		Use:   "remove NAME",
		Short: "Remove a context; its configuration file stays",
		Args:  exactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			return p.changeContexts(func(f *contextFile) (string, error) {
				_, err := f.find(args[0])
				delete(f.Contexts, args[0])
				if f.Current == args[0] {
					f.Current = ""
				}
				return "context " + args[0] + " is removed", err
			})
		},
	}
}

// changeContexts changes the file with the contexts and prints what change returns.
func (p *program) changeContexts(change func(f *contextFile) (done string, err error)) error {
	f, err := readContexts(p.env)
	if err != nil {
		return err
	}
	if f.Contexts == nil {
		f.Contexts = map[string]namedContext{}
	}

	done, err := change(&f)
	if err != nil {
		return err
	}
	if err := writeContexts(p.env, f); err != nil {
		return err
	}

	_, err = fmt.Fprintln(p.out, sanitizeLine(done))
	return err
}
