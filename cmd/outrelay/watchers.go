package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/admin"
)

func newWatchersCommand(p *program) *cobra.Command {
	return newGroup(&cobra.Command{
		Use:   "watchers",
		Short: "List the watchers of the state database, and remove a watcher that no longer exists",
	}, newWatchersListCommand(p), newWatchersRemoveCommand(p))
}

// watcherList is the output of `outrelay watchers list --json`.
type watcherList struct {
	Watchers []admin.KnownWatcher `json:"watchers"`
}

func newWatchersListCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "list",
		Short: "List the watchers that have run with the state database, and the nodes that run them",
		Args:  noArgs,
	}

	a := p.addReadFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return showBriefly(c.Context(), a, func(ctx context.Context, op admin.Operator) (watcherList, error) {
			list, err := op.Watchers().List(ctx)
			return watcherList{list}, err
		}, printWatchers)
	}
	return c
}

func printWatchers(w io.Writer, all watcherList) error {
	head := "WATCHER\tSLOTS\tOWNED\tLIVE NODES\tCOLLECTIONS"
	return writeList(w, "no watcher has run with this state database yet", head, all.Watchers, func(k admin.KnownWatcher, row func(...any)) {
		row(k.Name, len(k.Slots), len(k.Owned), strings.Join(k.Nodes, " "), strings.Join(k.Collections, " "))
	})
}

func newWatchersRemoveCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "remove NAME",
		Short: "Remove a watcher that no longer runs: its position, its registrations and its history",
		Long: `Remove a watcher that no longer runs from the state database: its position, the registrations of its
outboxes and its history. Another watcher may read these outboxes afterwards. Outboxes, dead letters
and the events log stay. If a process is started with this watcher again, it begins without a position.

The command is rejected while a live node runs the watcher, or while a slot has an owner.`,
		Args: exactArgs(1),
	}

	a := p.addChangeFlags(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		return a.withOperatorBriefly(c.Context(), func(ctx context.Context, op admin.Operator) error {
			// The watcher to remove need not be the configured one.
			op = op.ForWatcher(args[0])
			out, err := actConfirmed(ctx, a, func(dryRun bool) (admin.RemovedWatcher, error) {
				return op.Watchers().Remove(ctx, dryRun)
			}, func(found admin.RemovedWatcher) string {
				return fmt.Sprintf("remove watcher %s with its position and %s registrations from the state database",
					sanitizeLine(found.Watcher), formatThousands(found.Registrations))
			})
			if err != nil {
				return err
			}

			return a.printResult(out, func(w io.Writer) error {
				verb := "is removed"
				if out.DryRun {
					verb = "would be removed"
				}
				_, err := fmt.Fprintf(w, "watcher %s %s: %s\n", sanitizeLine(out.Watcher), verb, countNoun(out.Documents, "document"))
				return err
			})
		})
	}
	return c
}
