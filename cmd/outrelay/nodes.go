package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func newNodesCommand(program *program) *cobra.Command {
	var check bool
	cmd := &cobra.Command{
		Use:   "nodes",
		Short: "List the nodes of this deployment, the slots they own and their health",
		Long: `List each node that relays with this state database: owner or standby, the slots it owns, its
version and tasks, and the time of its last heartbeat by the server's clock. A node is listed from
its first heartbeat until it stops. A node without a heartbeat for ten seconds is stale, and is
listed for two weeks.

CONFIG is a hash of its configuration. Nodes of one watcher with different values in CONFIG do not
deliver in the same way.

With --check, the exit code is 1 if no node is alive, or if a live node cannot reach Kafka.`,
		Args: noArgs,
	}

	action := program.addReadFlags(cmd)
	cmd.Flags().BoolVar(&check, "check", false, "exit with 1 if no node is alive, or if one cannot reach Kafka")
	action.setRun(cmd, func(ctx context.Context, op admin.Operator, _ []string) error {
		list, err := op.Nodes().List(ctx)
		if err != nil {
			return err
		}
		if err := nodeListing.show(ctx, action, op, newWholePage(list)); err != nil {
			return err
		}

		// The list is printed first, so that the output explains the exit code.
		if check && !allReachKafka(list) {
			return reportedError(exitConfig)
		}
		return nil
	})
	cmd.AddCommand(newNodesReleaseCommand(program), newNodesRemoveCommand(program))
	return cmd
}

// allReachKafka reports whether at least one node is alive and all live nodes reach Kafka.
func allReachKafka(list []admin.Node) bool {
	alive := 0
	for _, n := range list {
		if n.Stale {
			continue
		}
		if !n.KafkaReachable {
			return false
		}
		alive++
	}
	return alive > 0
}

var nodeListing = listing[admin.Node]{
	name: "nodes", empty: "no process runs with this state database",
	head: "NODE\tIS\tOWNS\tWATCHERS\tSEEN\tUP SINCE\tKAFKA\tVERSION\tTASKS\tCONFIG\tADDRESS",
	cells: func(n admin.Node) cells {
		is, kafka := n.Phase, "reached"
		if n.Stale {
			is = "stale"
		}
		if !n.KafkaReachable {
			kafka = "unreachable"
		}
		return cells{
			n.Node, is, strings.Join(n.Slots, " "), strings.Join(n.Watchers, " "), formatAge(n.AgeS) + " ago",
			formatLocal(&n.StartedAt), kafka, n.Version, strings.Join(n.Tasks, " "),
			n.Config[:min(len(n.Config), 6)], n.Address,
		}
	},
}

// completeNodes offers the names of nodes to the shell. It offers none if MongoDB does not respond in time.
func (p *program) completeNodes(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	const timeout = 2 * time.Second
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}

	ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
	defer cancel()
	var names []string
	err := (&operatorCommand{p: p}).withOperator(ctx, func(ctx context.Context, op admin.Operator) error {
		list, err := op.Nodes().List(ctx)
		for _, n := range list {
			names = append(names, n.Node)
		}
		return err
	})
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// releasedNode is the output of `outrelay nodes release --json`.
type releasedNode struct {
	Node  string   `json:"node"`
	Slots []string `json:"slots"`
}

func newNodesReleaseCommand(program *program) *cobra.Command {
	var hold time.Duration
	cmd := &cobra.Command{
		Use:   "release NODE",
		Short: "Make a node release all its slots, for example before its machine restarts",
		Long: `Make a node release all slots that it owns. The node drains and releases them at its next renewal at
the latest, and other nodes take over at once. The node does not acquire these slots again for
--hold.`,
		Args:              exactArgs(1),
		ValidArgsFunction: program.completeNodes,
	}

	action := program.addChangeFlags(cmd)
	cmd.Flags().DurationVar(&hold, "hold", 30*time.Second, "how long the node must not acquire these slots again")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if hold <= 0 {
			return fmt.Errorf("--hold must be a positive duration such as 30s")
		}

		return action.withOperator(cmd.Context(), func(ctx context.Context, op admin.Operator) error {
			out := releasedNode{Node: args[0]}
			var err error
			// The slots have to be read before the release: afterwards nothing connects them with the node.
			if action.dryRun {
				out.Slots, err = op.Nodes().FindSlots(ctx, args[0])
			} else {
				out.Slots, err = op.Nodes().Release(ctx, args[0], hold)
			}
			if err != nil {
				return err
			}

			slots := strings.Join(out.Slots, ", ")
			text := fmt.Sprintf("releases %s and does not acquire it again for %s", slots, hold)
			switch {
			case len(out.Slots) == 0:
				text = "owns no slots"
			case action.dryRun:
				text = "would release " + slots
			}
			return action.printLine(out, "node %s %s", args[0], text)
		})
	}
	return cmd
}

func newNodesRemoveCommand(program *program) *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "remove NODE",
		Short: "Remove a stopped node from the list",
		Long: `Remove a stopped node from the list, and release the slots that it still owns. A live node is
rejected, because its next heartbeat would list it again.`,
		Args:              exactArgs(1),
		ValidArgsFunction: program.completeNodes,
	}

	action := program.addChangeFlags(cmd)
	cmd.Flags().BoolVar(&force, "force", false, "remove the node even if it is alive")
	action.setRun(cmd, func(ctx context.Context, op admin.Operator, args []string) error {
		// After the removal, nothing connects the slots with the node.
		slots, err := op.Nodes().PlanRemoval(ctx, args[0], admin.Removable(force))
		if err != nil {
			return err
		}

		if !action.dryRun {
			if err := action.confirm(ctx, "remove node "+sanitizeLine(args[0])+" from the list"); err != nil {
				return err
			}
			if err := op.Nodes().Remove(ctx, args[0], admin.Removable(force)); err != nil {
				return err
			}
		}

		return action.printLine(releasedNode{Node: args[0], Slots: slots}, "node %s %s removed from the list; it owned %s",
			args[0], action.chooseText("is", "would be"), sanitizeLine(strings.Join(slots, ", ")))
	})
	return cmd
}
