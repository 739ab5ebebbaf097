package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/admin"
)

func newMigrateCommand(p *program) *cobra.Command {
	return newGroup(&cobra.Command{
		Use:   "migrate",
		Short: "Create the indexes of this version and list differences",
		Long: `The relay creates its indexes when it starts, unless mongodb.indexes is false. These commands do the
same by hand, list the migrations that were applied, and compare the indexes of each collection with
the indexes that this version declares.`,
	}, newMigrateStatusCommand(p), newMigrateUpCommand(p), newMigrateVerifyCommand(p))
}

func newMigrateStatusCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "status",
		Short: "Show which migrations were applied, when and by which node",
		Args:  noArgs,
	}

	a := p.addReadFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return show(c.Context(), a, readMigrations, writeMigrations)
	}
	return c
}

func readMigrations(ctx context.Context, op admin.Operator) (admin.MigrationStatus, error) {
	return op.Indexes().Migrations(ctx)
}

func writeMigrations(w io.Writer, s admin.MigrationStatus) {
	writeTable(w, "ID\tNAME\tSTATE\tAT\tBY\tVERSION\tTOOK", s.Steps, func(x admin.MigrationStep) cells {
		at, took := "", ""
		if !x.At.IsZero() {
			at = formatLocal(&x.At)
			took = (time.Duration(x.DurationMS) * time.Millisecond).String()
		}
		return cells{x.ID, x.Name, x.State, at, x.Node, x.Version, took}
	})

	for _, x := range s.Steps {
		for _, g := range x.Missing {
			fmt.Fprintf(w, "migration %s needs the action %s on %s\n", x.ID, g.Action, g.On)
		}
	}
	if s.Lock != nil {
		fmt.Fprintf(w, "node %s has been migrating since %s\n", s.Lock.Node, s.Lock.Since.Local().Format(time.TimeOnly))
	}
}

func newMigrateUpCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "up",
		Short: "Apply the pending migrations and create the missing indexes",
		Long: `Apply the pending migrations in their order, and create the missing indexes of each watched
collection. The command waits while another process migrates, and may be repeated. It lists missing
privileges: grant them and run it again.

An index is not created while an open transaction has written to its collection, because inserts
would have to wait. The command tries again for a minute. The exit code is 1 if something is left to
do.`,
		Args: noArgs,
	}

	a := p.addChangeFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		// A dry run of a migration is its status.
		if a.dryRun {
			return show(c.Context(), a, readMigrations, writeMigrations)
		}

		return a.withOperator(c.Context(), func(ctx context.Context, op admin.Operator) error {
			r, err := op.Indexes().Migrate(ctx)
			if err != nil {
				return err
			}
			// Also an incomplete migration is printed: its report names the missing grants.
			if err := a.printResult(r, func(w io.Writer) { writeUp(w, r) }); err != nil {
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

func writeUp(w io.Writer, r admin.MigrationReport) {
	for _, line := range []struct {
		ids  []string
		text string
	}{
		{r.Applied, "applied: "},
		{r.Pending, "pending: "},
		{r.Newer, "accepted from a newer version: "},
	} {
		if len(line.ids) > 0 {
			fmt.Fprintln(w, line.text+strings.Join(line.ids, ", "))
		}
	}

	for _, text := range r.Conflicts {
		fmt.Fprintf(w, "conflict: %s\nto replace it, run outrelay migrate verify --repair\n", text)
	}
	for _, g := range r.Missing {
		writeGrant(w, g.Action, g.On, g.Advice)
	}
	for _, text := range r.Busy {
		fmt.Fprintln(w, text)
	}
	if r.OK() {
		fmt.Fprintln(w, "every collection has its indexes")
	}
}

func writeGrant(w io.Writer, action, on, advice string) {
	if advice != "" {
		advice = ", or " + advice
	}
	fmt.Fprintf(w, "grant the action %s on %s%s\n", action, on, advice)
}

func newMigrateVerifyCommand(p *program) *cobra.Command {
	var repair bool
	c := &cobra.Command{
		Use:   "verify",
		Short: "Compare the indexes of each collection with the indexes of this version",
		Long: `Compare the indexes of each watched collection, of its dead letters and of the state database with
the indexes that this version declares. An index can be missing, have other options, or be left over
from an older version. --repair creates, replaces and drops indexes. While an index is rebuilt,
purges and queries of its collection are slow. Indexes that outrelay did not create are left alone.
The exit code is 1 if an index still differs at the end.`,
		Args: noArgs,
	}

	a := p.addChangeFlags(c)
	c.Flags().BoolVar(&repair, "repair", false, "repair the differences")
	a.setRun(c, func(ctx context.Context, op admin.Operator, _ []string) error {
		v, err := op.Indexes().Verify(ctx, false)
		if err != nil {
			return err
		}

		// The question counts the differences, so the comparison comes first.
		if repair && !a.dryRun && len(v.Drift) > 0 {
			if err := a.confirm(ctx, repairAction(v)); err != nil {
				return err
			}
			if v, err = op.Indexes().Verify(ctx, true); err != nil {
				return err
			}
		}

		return a.printVerified(v)
	})
	return c
}

// repairAction describes the repair of v for a confirmation.
func repairAction(v admin.Verification) string {
	return "repair " + countNoun(int64(len(v.Drift)), "index difference")
}

// printVerified prints v. It returns a reportedError if an index differs.
func (a *operatorCommand) printVerified(v admin.Verification) error {
	if err := a.printResult(v, func(w io.Writer) { writeVerification(w, v) }); err != nil {
		return err
	}
	if !v.OK() {
		return reportedError(exitConfig)
	}
	return nil
}

func writeVerification(w io.Writer, v admin.Verification) {
	if len(v.Drift) > 0 {
		writeTable(w, "COLLECTION\tINDEX\tIS\tNOW\tDETAIL", v.Drift, func(d admin.IndexDrift) cells {
			now := ""
			if d.Repaired {
				now = "repaired"
			}
			return cells{d.Collection, d.Index, d.Kind, now, d.Detail}
		})
	}

	for _, d := range v.Drift {
		if d.Repaired {
			continue
		}
		for _, s := range d.Statements {
			fmt.Fprintln(w, s)
		}
	}
	for _, g := range v.Missing {
		writeGrant(w, g.Action, g.On, g.Advice)
	}
	fmt.Fprintf(w, "%s compared\n", countNoun(int64(v.Collections), "collection"))
}
