package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/contract/config"
)

func newConfigCommand(program *program) *cobra.Command {
	return newGroup(&cobra.Command{
		Use:   "config",
		Short: "Show the configuration in effect and the available keys",
	}, newConfigPrintCommand(program), newConfigKeysCommand(program))
}

func newConfigPrintCommand(program *program) *cobra.Command {
	var redacted bool
	cmd := &cobra.Command{
		Use:   "print",
		Short: "Print the configuration in effect as YAML, with redacted secrets",
		Long: `Print the configuration in effect as YAML. Secrets are printed as ***, and references such as
${env:NAME} as they were written.`,
		Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			// The flag exists only so that scripts may name the default.
			if !redacted {
				return errors.New("config print: secrets are never printed; remove --redacted=false")
			}

			text, warnings, err := config.Print(program.configFile, program.env, program.flagSettings())
			program.nameSources(err)
			if err != nil {
				return err
			}
			for _, w := range warnings {
				fmt.Fprintln(program.errOut, "warning: "+w)
			}

			_, err = fmt.Fprint(program.out, text)
			return err
		},
	}

	cmd.Flags().BoolVar(&redacted, "redacted", true, "print secrets as ***; cannot be turned off")
	return cmd
}

func newConfigKeysCommand(program *program) *cobra.Command {
	return &cobra.Command{
		Use:   "keys",
		Short: "List each key with the environment variable that sets it",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			for _, key := range config.Keys() {
				if _, err := fmt.Fprintf(program.out, "%-28s %s\n", key, config.EnvName(key)); err != nil {
					return err
				}
			}
			return nil
		},
	}
}
