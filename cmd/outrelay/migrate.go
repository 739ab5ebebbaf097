package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/app"
)

func newMigrateCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "migrate",
		Short: "Make the indexes that this version wants, and tell what differs",
		Long: `The relay makes its indexes when it starts, unless mongodb.indexes is false. These commands do the same by hand, say what
was done when, and compare what each collection has with what this version declares.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newMigrateStatusCommand(p), newMigrateUpCommand(p), newMigrateVerifyCommand(p))
	return c
}

// withMigration runs f with the migrations of the configured deployment.
func (a *operatorCommand) withMigration(ctx context.Context, f func(ctx context.Context, m admin.Migration) error) error {
	return a.withOperator(ctx, func(ctx context.Context, o admin.Operator) error {
		cfg, _, err := a.p.loadConfig()
		if err != nil {
			return err
		}
		return f(ctx, admin.Migration{Operator: o, Node: cfg.Node, Version: thisBuild().Version, Outboxes: app.Outboxes(cfg, o.State.Client())})
	})
}

func newMigrateStatusCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "status",
		Short: "Show the ledger: which migrations were applied, when and by whom",
		Args:  cobra.NoArgs,
	}
	a := p.addReadFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return a.withMigration(c.Context(), func(ctx context.Context, m admin.Migration) error {
			ctx, cancel := context.WithTimeout(ctx, statusTimeout)
			defer cancel()
			s, err := m.Status(ctx)
			if err != nil {
				return err
			}
			return a.printResult(s, func(w io.Writer) error { return printMigrations(w, s) })
		})
	}
	return c
}

func printMigrations(w io.Writer, s admin.MigrationStatus) error {
	err := writeTable(w, "ID\tNAME\tSTATE\tAT\tBY\tVERSION\tTOOK", func(row func(cells ...any)) {
		for _, x := range s.Steps {
			at, took := "", ""
			if !x.At.IsZero() {
				at, took = x.At.Local().Format(time.DateTime), (time.Duration(x.DurationMS) * time.Millisecond).String()
			}
			row(x.ID, x.Name, x.State, at, x.Node, x.Version, took)
		}
	})
	if err != nil {
		return err
	}
	for _, x := range s.Steps {
		for _, g := range x.Missing {
			fmt.Fprintf(w, "migration %s wants the action %s on %s\n", x.ID, g.Action, g.On)
		}
	}
	if s.Lock != nil {
		fmt.Fprintf(w, "node %s migrates since %s\n", s.Lock.Node, s.Lock.Since.Local().Format(time.TimeOnly))
	}
	return nil
}

func newMigrateUpCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "up",
		Short: "Apply the migrations that are pending and make the indexes that are missing",
		Long: `Apply the migrations that are not in the ledger yet, in their order, and give every watched collection the indexes that
it lacks. It waits while another process migrates, and may be repeated. What a privilege is missing for is named, and
done as soon as it is granted and this is run again. An index is not made while a transaction that has written to its collection
stays open, because inserts would have to wait: this is tried for a minute. Exit code 1 if something is left to do.`,
		Args: cobra.NoArgs,
	}
	a := p.addChangeFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return a.withMigration(c.Context(), func(ctx context.Context, m admin.Migration) error {
			if a.dryRun {
				s, err := m.Status(ctx)
				if err != nil {
					return err
				}
				return a.printResult(s, func(w io.Writer) error { return printMigrations(w, s) })
			}
			r, err := m.Up(ctx)
			if err != nil {
				return err
			}
			if err := a.printResult(r, func(w io.Writer) error { return printUp(w, r) }); err != nil {
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

func printUp(w io.Writer, r admin.MigrationReport) error {
	for _, line := range []struct {
		ids  []string
		text string
	}{
		{r.Applied, "applied: "},
		{r.Pending, "still to do: "},
		{r.Newer, "of a newer version, borne: "},
	} {
		if len(line.ids) > 0 {
			fmt.Fprintln(w, line.text+strings.Join(line.ids, ", "))
		}
	}
	for _, text := range r.Conflicts {
		fmt.Fprintf(w, "conflict: %s\nrun outrelay migrate verify --repair to replace it\n", text)
	}
	for _, g := range r.Missing {
		printGrant(w, g.Action, g.On, g.Advice)
	}
	for _, text := range r.Busy {
		fmt.Fprintln(w, text)
	}
	if r.OK() {
		fmt.Fprintln(w, "every collection has its indexes")
	}
	return nil
}

func printGrant(w io.Writer, action, on, advice string) {
	if advice != "" {
		advice = ", or " + advice
	}
	fmt.Fprintf(w, "grant the action %s on %s%s\n", action, on, advice)
}

func newMigrateVerifyCommand(p *program) *cobra.Command {
	var repair bool
	c := &cobra.Command{
		Use:   "verify",
		Short: "Compare the indexes of every collection with what this version declares",
		Long: `Compare the indexes of every watched collection, of its dead letters and of the state database with what this version
declares: one may be missing, have other options, or be left over from an older version. --repair makes, replaces and
drops them; while one is rebuilt, purge and queries of the collection are slow. Indexes that other people made are left
alone. Exit code 1 if something differs in the end.`,
		Args: cobra.NoArgs,
	}
	a := p.addChangeFlags(c)
	c.Flags().BoolVar(&repair, "repair", false, "mend what differs")
	c.RunE = func(c *cobra.Command, _ []string) error {
		return a.withMigration(c.Context(), func(ctx context.Context, m admin.Migration) error {
			v, err := m.Verify(ctx, false)
			if err == nil && repair && !a.dryRun && len(v.Drift) > 0 {
				if err = a.confirm(ctx, "mend "+countNoun(int64(len(v.Drift)), "difference")+" of indexes"); err == nil {
					v, err = m.Verify(ctx, true)
				}
			}
			if err != nil {
				return err
			}
			if err := a.printResult(v, func(w io.Writer) error { return printVerification(w, v) }); err != nil {
				return err
			}
			if !v.OK() {
				return reportedError(exitConfig)
			}
			return nil
		})
	}
	return c
}

func printVerification(w io.Writer, v admin.Verification) error {
	if len(v.Drift) > 0 {
		if err := writeTable(w, "COLLECTION\tINDEX\tIS\tNOW\tDETAIL", func(row func(cells ...any)) {
			for _, d := range v.Drift {
				now := ""
				if d.Repaired {
					now = "repaired"
				}
				row(d.Collection, d.Index, d.Kind, now, d.Detail)
			}
		}); err != nil {
			return err
		}
	}
	for _, d := range v.Drift {
		if !d.Repaired {
			for _, s := range d.Statements {
				fmt.Fprintln(w, s)
			}
		}
	}
	for _, g := range v.Missing {
		printGrant(w, g.Action, g.On, g.Advice)
	}
	fmt.Fprintf(w, "%s compared\n", countNoun(int64(v.Collections), "collection"))
	return nil
}
