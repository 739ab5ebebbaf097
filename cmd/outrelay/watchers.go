package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func newWatchersCommand(program *program) *cobra.Command {
	return newGroup(&cobra.Command{
		Use:   "watchers",
		Short: "List the watchers of the state database, and remove a watcher that no longer exists",
	}, newWatchersListCommand(program), newWatchersRemoveCommand(program))
}

func newWatchersListCommand(program *program) *cobra.Command {
	return newListCommand(program, &cobra.Command{
		Use:   "list",
		Short: "List the watchers that have run with the state database, and the nodes that run them",
	}, watcherListing, func(ctx context.Context, op admin.Operator) ([]admin.KnownWatcher, error) {
		return op.Watchers().List(ctx)
	})
}

var watcherListing = listing[admin.KnownWatcher]{
	name: "watchers", empty: noWatcher, head: "WATCHER\tSLOTS\tOWNED\tLIVE NODES\tCOLLECTIONS",
	cells: func(k admin.KnownWatcher) cells {
		return cells{k.Name, len(k.Slots), len(k.Owned), strings.Join(k.Nodes, " "), strings.Join(k.Collections, " ")}
	},
}

func newWatchersRemoveCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "remove NAME",
		Short: "Remove a watcher that no longer runs: its position, its registrations and its history",
		Long: `Remove a watcher that no longer runs from the state database: its position, the registrations of its
outboxes and its history. Another watcher may read these outboxes afterwards. Outboxes, dead letters
and the audit log stay. If a process is started with this watcher again, it begins without a position.

The command is rejected while a live node runs the watcher, a slot has an owner, or events wait.`,
		Args: exactArgs(1),
	}

	action := program.addChangeFlags(cmd)
	action.setRun(cmd, func(ctx context.Context, op admin.Operator, args []string) error {
		// The watcher to remove need not be the configured one.
		op = op.ForWatcher(args[0])
		out, err := actConfirmed(ctx, action, func(dryRun bool) (admin.RemovedWatcher, error) {
			return op.Watchers().Remove(ctx, dryRun)
		}, func(found admin.RemovedWatcher) string {
			return fmt.Sprintf("remove watcher %s with its position and %s registrations from the state database",
				sanitizeLine(found.Watcher), formatThousands(found.Registrations))
		})
		if err != nil {
			return err
		}

		return action.printLine(out, "watcher %s %s removed: %s",
			sanitizeLine(out.Watcher), action.chooseText("is", "would be"), countNoun(out.Documents, "document"))
	})
	return cmd
}
