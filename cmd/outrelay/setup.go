package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/setup"
)

func newSetupCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "setup",
		Short: "Create the state collections and indexes that a relay needs",
		Long: `Create the collections of the state database with their indexes, and the indexes that the
configuration wants on the watched collections. A relay does the same at its start. Run this command
with an administrator's user if the user of the relay may not create collections or indexes.

The command may be repeated, and changes no document of a service. With --dry-run it prints the
statements for mongosh and changes nothing; then the exit code is 1 if something is missing.`,
		Args: noArgs,
	}

	action := program.addChangeFlags(cmd)
	action.creates = true
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, _, err := program.loadWithLogger()
		if err != nil {
			return err
		}
		// Index builds may take long.
		action.limit = 0
		return action.withOperator(cmd.Context(), func(ctx context.Context, op admin.Operator) error {
			report, err := setup.Run(ctx, cfg, op.State.Client(), action.dryRun)
			if err != nil {
				return err
			}
			if err := action.printResult(report, func(out io.Writer) { writeSetup(out, report) }); err != nil {
				return err
			}
			if !report.OK() {
				return reportedError(exitConfig)
			}
			return nil
		})
	}
	return cmd
}

func writeSetup(out io.Writer, report setup.Report) {
	for _, s := range report.Created {
		fmt.Fprintln(out, s)
	}
	for _, text := range report.Rejected {
		fmt.Fprintln(out, "not created: "+text)
	}
	if report.OK() {
		fmt.Fprintln(out, "everything exists")
	}
}
