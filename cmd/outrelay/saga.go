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

func newSagaCommand(program *program) *cobra.Command {
	return newGroup(&cobra.Command{
		Use:   "saga",
		Short: "List the sagas of services and show their state",
		Long:  `Inspect the sagas of services. These commands change nothing: a saga belongs to its service.`,
	}, newSagaTypesCommand(program), newSagaListCommand(program), newSagaShowCommand(program))
}

func newSagaTypesCommand(program *program) *cobra.Command {
	return newListCommand(program, &cobra.Command{
		Use:   "types",
		Short: "List the sagas that services have registered, with their number of instances",
	}, typeListing, func(ctx context.Context, op admin.Operator) ([]admin.SagaType, error) {
		return op.Sagas().Types(ctx)
	})
}

var typeListing = listing[admin.SagaType]{
	name: "types", ofServices: true,
	empty: "no service has registered a saga; a service does so when it first starts the saga's handler",
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

func newSagaListCommand(program *program) *cobra.Command {
	var database string
	cmd := &cobra.Command{
		Use:   "list SAGA",
		Short: "List the instances of a saga, the latest changes first",
		Long: `List the instances of a saga, the latest changes first, without their state. Completed instances are
listed until their tombstones are removed.`,
		Args: exactArgs(1),
	}

	action := program.addReadFlags(cmd)
	cmd.Flags().StringVar(&database, "database", "", "the service's `database`; required if several databases have a saga with this name")
	paging := addPagingFlags(cmd, 50, admin.MaxPage, "instances")
	setPages(cmd, action, sagaListing, func(ctx context.Context, op admin.Operator, args []string) (admin.Page[admin.Saga], error) {
		db, err := findSagaDatabase(ctx, op, database, args[0])
		if err != nil {
			return admin.Page[admin.Saga]{}, err
		}
		return op.Sagas().List(ctx, db, args[0], paging.limit, paging.after)
	})
	return cmd
}

var sagaListing = listing[admin.Saga]{
	noun: "instance", empty: "there are no instances", head: "ID\tCHANGED\tCREATED\tCOMPLETED\tVERSION",
	cells: func(saga admin.Saga) cells {
		return cells{quoteArgument(saga.ID), formatLocal(&saga.UpdatedAt), formatLocal(&saga.CreatedAt), formatLocal(saga.CompletedAt), saga.Version}
	},
}

func newSagaShowCommand(program *program) *cobra.Command {
	var database string
	var state bool
	cmd := &cobra.Command{
		Use:   "show SAGA ID",
		Short: "Show one instance of a saga: times, timeouts, and with --state its state",
		Args:  exactArgs(2),
	}

	action := program.addReadFlags(cmd)
	cmd.Flags().StringVar(&database, "database", "", "the service's `database`; required if several databases have a saga with this name")
	cmd.Flags().BoolVar(&state, "state", false, "also show the state, which is data of the service")
	setShow(cmd, action, func(ctx context.Context, op admin.Operator, args []string) (admin.Saga, error) {
		db, err := findSagaDatabase(ctx, op, database, args[0])
		if err != nil {
			return admin.Saga{}, err
		}
		return op.Sagas().Show(ctx, db, args[0], args[1], state)
	}, writeSaga)
	return cmd
}

func writeSaga(out io.Writer, saga admin.Saga) {
	printField := func(name, text string) {
		if text != "" {
			fmt.Fprintf(out, "%-14s %s\n", name, sanitizeLine(text))
		}
	}
	printField("saga", saga.Saga+" of "+saga.Database)
	printField("id", saga.ID)
	printField("created", formatLocal(&saga.CreatedAt))
	printField("changed", fmt.Sprintf("%s, version %d", formatLocal(&saga.UpdatedAt), saga.Version))
	printField("completed", formatLocal(saga.CompletedAt))
	printField("removed at", formatLocal(saga.ExpiresAt))
	printField("timeouts", strings.Join(saga.Timeouts, ", "))
	if saga.Compensations > 0 {
		printField("compensations", fmt.Sprint(saga.Compensations))
	}
	if saga.Sequence > 0 || len(saga.Held) > 0 {
		printField("in sequence", fmt.Sprintf("%d handled; waiting: %v", saga.Sequence, saga.Held))
	}

	// A state is data of a service and may contain control characters.
	var pretty bytes.Buffer
	if len(saga.State) > 0 && json.Indent(&pretty, saga.State, "", "  ") != nil {
		fmt.Fprintln(out, "the state cannot be shown as JSON")
	}
	for text := range strings.Lines(pretty.String()) {
		fmt.Fprintln(out, sanitizeLine(strings.TrimRight(text, "\n")))
	}
}
