package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func newSagaCommand(p *program) *cobra.Command {
	return newGroup(&cobra.Command{
		Use:   "saga",
		Short: "List the sagas of services and show their state",
		Long: `Inspect the sagas of the services whose outboxes this watcher reads. These commands change nothing:
a saga belongs to its service.`,
	}, newSagaTypesCommand(p), newSagaListCommand(p), newSagaShowCommand(p))
}

func newSagaTypesCommand(p *program) *cobra.Command {
	return newListCommand(p, &cobra.Command{
		Use:   "types",
		Short: "List the sagas that services have registered, with their number of instances",
	}, typeListing, func(ctx context.Context, op admin.Operator) ([]admin.SagaType, error) {
		return op.Sagas().Types(ctx)
	})
}

var typeListing = listing[admin.SagaType]{
	name:  "types",
	empty: "no service in this watcher's databases has registered a saga; a service does so when it first starts the saga's handler",
	head:  "SAGA\tDATABASE\tINSTANCES\tIDS\tOWNER",
	cells: func(t admin.SagaType) cells {
		return cells{t.Name, t.Database, formatThousands(t.Count), t.IDKind, t.Owner}
	},
}

// findSagaDatabase returns named, or without it the only database that has this saga.
func findSagaDatabase(ctx context.Context, op admin.Operator, named, saga string) (string, error) {
	if named != "" {
		return named, nil
	}

	types, err := op.Sagas().Types(ctx)
	if err != nil {
		return "", err
	}
	var found []string
	for _, t := range types {
		if t.Name == saga {
			found = append(found, t.Database)
		}
	}

	switch len(found) {
	case 0:
		return "", fmt.Errorf("saga %q is not registered; to list the registered sagas, run outrelay saga types", saga)
	case 1:
		return found[0], nil
	}
	slices.Sort(found)
	return "", fmt.Errorf("saga %q is in several databases: select one of %s with --database", saga, strings.Join(found, ", "))
}

func newSagaListCommand(p *program) *cobra.Command {
	var database, after string
	var limit int
	c := &cobra.Command{
		Use:   "list SAGA",
		Short: "List the instances of a saga, the latest changes first",
		Long: `List the instances of a saga, the latest changes first, without their state. Completed instances are
listed until their tombstones are removed.`,
		Args: exactArgs(1),
	}

	a := p.addReadFlags(c)
	c.Flags().StringVar(&database, "database", "", "the service's `database`; required if several databases have a saga with this name")
	addLimitFlag(c, &limit, 50, admin.MaxPage, "instances on a page")
	c.Flags().StringVar(&after, "after", "", "the `cursor` that the previous page ended with")
	setShow(c, a, func(ctx context.Context, op admin.Operator, args []string) (admin.SagaPage, error) {
		db, err := findSagaDatabase(ctx, op, database, args[0])
		if err != nil {
			return admin.SagaPage{}, err
		}
		return op.Sagas().List(ctx, db, args[0], limit, after)
	}, writeSagas)
	return c
}

func writeSagas(w io.Writer, page admin.SagaPage) {
	cellsOf := func(s admin.Saga) cells {
		return cells{quoteArgument(s.ID), formatLocal(&s.UpdatedAt), formatLocal(&s.CreatedAt), formatLocal(s.CompletedAt), s.Version}
	}
	writePage(w, "there are no instances", "ID\tCHANGED\tCREATED\tCOMPLETED\tVERSION",
		page.Sagas, page.Total, "instance", page.Next, cellsOf)
}

func newSagaShowCommand(p *program) *cobra.Command {
	var database string
	var state bool
	c := &cobra.Command{
		Use:   "show SAGA ID",
		Short: "Show one instance of a saga: times, timeouts, and with --state its state",
		Args:  exactArgs(2),
	}

	a := p.addReadFlags(c)
	c.Flags().StringVar(&database, "database", "", "the service's `database`; required if several databases have a saga with this name")
	c.Flags().BoolVar(&state, "state", false, "also show the state, which is data of the service")
	setShow(c, a, func(ctx context.Context, op admin.Operator, args []string) (admin.Saga, error) {
		db, err := findSagaDatabase(ctx, op, database, args[0])
		if err != nil {
			return admin.Saga{}, err
		}
		return op.Sagas().Show(ctx, db, args[0], args[1], state)
	}, writeSaga)
	return c
}

func writeSaga(w io.Writer, s admin.Saga) {
	printField := func(name, text string) {
		if text != "" {
			fmt.Fprintf(w, "%-14s %s\n", name, sanitizeLine(text))
		}
	}
	printField("saga", s.Saga+" of "+s.Database)
	printField("id", s.ID)
	printField("created", formatLocal(&s.CreatedAt))
	printField("changed", fmt.Sprintf("%s, version %d", formatLocal(&s.UpdatedAt), s.Version))
	printField("completed", formatLocal(s.CompletedAt))
	printField("removed at", formatLocal(s.ExpiresAt))
	printField("timeouts", strings.Join(s.Timeouts, ", "))
	if s.Compensations > 0 {
		printField("compensations", fmt.Sprint(s.Compensations))
	}
	if s.Sequence > 0 || len(s.Held) > 0 {
		printField("in sequence", fmt.Sprintf("%d handled; waiting: %v", s.Sequence, s.Held))
	}

	// A state is data of a service and may contain control characters.
	var pretty bytes.Buffer
	if len(s.State) > 0 && json.Indent(&pretty, s.State, "", "  ") != nil {
		fmt.Fprintln(w, "the state cannot be shown as JSON")
	}
	for text := range strings.Lines(pretty.String()) {
		fmt.Fprintln(w, sanitizeLine(strings.TrimRight(text, "\n")))
	}
}
