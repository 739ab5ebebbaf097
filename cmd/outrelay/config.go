package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/contract/config"
)

func newConfigCommand(p *program) *cobra.Command {
	return newGroup(&cobra.Command{
		Use:   "config",
		Short: "Show the configuration in effect and the available keys",
	}, newConfigPrintCommand(p), newConfigKeysCommand(p))
}

func newConfigPrintCommand(p *program) *cobra.Command {
	var redacted bool
	c := &cobra.Command{
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

			text, warnings, err := config.Print(p.configFile, p.env, p.flagSettings())
			if err != nil {
				return err
			}
			for _, w := range warnings {
				fmt.Fprintln(p.errOut, "warning: "+w)
			}

			_, err = fmt.Fprint(p.out, text)
			return err
		},
	}

	c.Flags().BoolVar(&redacted, "redacted", true, "print secrets as ***; cannot be turned off")
	return c
}

func newConfigKeysCommand(p *program) *cobra.Command {
	return &cobra.Command{
		Use:   "keys",
		Short: "List each key with the environment variable that sets it",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			for _, key := range config.Keys() {
				if _, err := fmt.Fprintf(p.out, "%-28s %s\n", key, config.EnvName(key)); err != nil {
					return err
				}
			}
			return nil
		},
	}
}
