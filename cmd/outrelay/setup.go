package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/setup"
)

func newSetupCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "setup",
		Short: "Create the state collections and indexes that a relay needs",
		Long: `Create the collections of the state database with their indexes, and the indexes that the
configuration wants on the watched collections. A relay does the same at its start. Run this command
with an administrator's user if the user of the relay may not create collections or indexes.

The command may be repeated, and changes no document of a service. With --dry-run it prints the
statements for mongosh and changes nothing; then the exit code is 1 if something is missing.`,
		Args: noArgs,
	}

	a := p.addChangeFlags(c)
	a.creates = true
	c.RunE = func(c *cobra.Command, _ []string) error {
		cfg, _, err := p.loadWithLogger()
		if err != nil {
			return err
		}
		// Index builds may take long.
		a.limit = 0
		return a.withOperator(c.Context(), func(ctx context.Context, op admin.Operator) error {
			r, err := setup.Run(ctx, cfg, op.State.Client(), a.dryRun)
			if err != nil {
				return err
			}
			if err := a.printResult(r, func(w io.Writer) { writeSetup(w, r) }); err != nil {
				return err
			}
			if !r.OK() {
				return reportedError(exitConfig)
			}
			return nil
		})
	}
	return c
}

func writeSetup(w io.Writer, r setup.Report) {
	for _, s := range r.Created {
		fmt.Fprintln(w, s)
	}
	for _, text := range r.Refused {
		fmt.Fprintln(w, "not created: "+text)
	}
	if r.OK() {
		fmt.Fprintln(w, "everything exists")
	}
}
