package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/operate/admin"
)

// validation is the output of validate --json.
type validation struct {
	OK       bool             `json:"ok"`
	Problems []config.Problem `json:"problems"`
	Warnings []string         `json:"warnings"`
}

func newValidateCommand(program *program) *cobra.Command {
	var asJSON, withoutSecrets bool
	cmd := &cobra.Command{
		Use:   "validate",
		Short: "Check the configuration and list every problem; connects to nothing",
		Long: `Check the configuration and list every problem. The command connects to nothing.

It reads the files to which the configuration refers. Where they do not exist, for example in a pipeline
that checks the configuration of a pod, pass --without-secrets: a reference to a missing file or
variable, or a missing certificate, is then a warning, and everything else is checked.`,
		Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			_, warnings, err := program.loadConfig()
			if withoutSecrets {
				_, warnings, err = config.LoadWithoutSecrets(program.configFile, program.env, program.flagSettings())
				program.nameSources(err)
			}

			// Only problems of the configuration are a result. An unreadable file is an error.
			var bad *config.Problems
			if err != nil && !errors.As(err, &bad) {
				return err
			}

			// Empty lists, not nil, so that they are [] in JSON.
			validation := validation{OK: err == nil, Problems: []config.Problem{}, Warnings: append([]string{}, warnings...)}
			if bad != nil {
				validation.Problems = bad.List
				if program.lacksFile(bad) {
					validation.Warnings = append(validation.Warnings, noFile)
				}
			}
			return program.printValidation(validation, asJSON)
		},
	}

	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	cmd.Flags().BoolVar(&withoutSecrets, "without-secrets", false, "accept references to files and variables that are missing here")
	return cmd
}

// printValidation prints validation. It returns a reportedError if the configuration is invalid.
func (p *program) printValidation(validation validation, asJSON bool) error {
	if asJSON {
		if err := printJSON(p.out, validation); err != nil {
			return err
		}
	} else {
		for _, w := range validation.Warnings {
			fmt.Fprintln(p.out, "warning: "+w)
		}
		for _, problem := range validation.Problems {
			fmt.Fprintln(p.out, problem)
		}

		switch n := len(validation.Problems); n {
		case 0:
			fmt.Fprintln(p.out, "ok")
		case 1:
			fmt.Fprintln(p.out, "1 problem")
		default:
			fmt.Fprintf(p.out, "%d problems\n", n)
		}
	}

	if !validation.OK {
		return reportedError(exitConfig)
	}
	return nil
}

// printJSON writes value as one indented JSON document.
func printJSON(out io.Writer, value any) error {
	if err := admin.WriteJSON(out, value, "  "); err != nil {
		return fmt.Errorf("writing JSON: %w", err)
	}
	return nil
}
