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

func newNodesCommand(p *program) *cobra.Command {
	var check bool
	c := &cobra.Command{
		Use:   "nodes",
		Short: "List the processes of this deployment, what they own and whether they live",
		Long: `List every process that runs relays with this state database: owner or standby, the slots it owns, version, roles, and
when it gave the last sign of life, by the server's clock. A process is listed from its first heartbeat on and taken off when
it stops; one that was killed is stale after ten seconds, and listed for two weeks. SCHEMA is the last migration that a node
knows; one that differs in CONFIG from others of its watcher would deliver otherwise than they do.

With --check the exit code is 1 if no node lives, or one that lives does not reach Kafka.`,
		Args: cobra.NoArgs,
	}
	a := p.addReadFlags(c)
	c.Flags().BoolVar(&check, "check", false, "exit code 1 if no node lives, or one does not reach Kafka")
	c.RunE = func(c *cobra.Command, _ []string) error {
		return a.withDeskBriefly(c.Context(), func(ctx context.Context, k admin.Desk) error {
			list, err := k.Nodes(ctx)
			if err != nil {
				return err
			}
			if err := a.printResult(nodeList{list}, func(w io.Writer) error { return printNodes(w, list) }); err != nil {
				return err
			}
			if check && !allReachKafka(list) {
				return reportedError(exitConfig)
			}
			return nil
		})
	}
	c.AddCommand(newNodesReleaseCommand(p), newNodesRemoveCommand(p))
	return c
}

// nodeList is the answer of `outrelay nodes --json`.
type nodeList struct {
	Nodes []admin.Node `json:"nodes"`
}

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

func printNodes(w io.Writer, list []admin.Node) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(w, "no process runs with this state database")
		return err
	}
	return writeTable(w, "NODE\tIS\tOWNS\tWATCHERS\tSEEN\tUP SINCE\tKAFKA\tVERSION\tSCHEMA\tROLES\tCONFIG\tADDRESS", func(row func(...any)) {
		for _, n := range list {
			is, kafka := n.Role, "reached"
			if n.Stale {
				is = "stale"
			}
			if !n.KafkaReachable {
				kafka = "away"
			}
			row(n.Node, is, strings.Join(n.Slots, " "), strings.Join(n.Watchers, " "), formatAge(n.AgeS)+" ago", n.StartedAt.Local().Format(time.DateTime), kafka,
				n.Version, n.Schema, strings.Join(n.Roles, " "), n.Config[:min(len(n.Config), 6)], n.Address)
		}
	})
}

// completeNodes offers the names of nodes to the shell, where MongoDB answers at once.
func (p *program) completeNodes(c *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	const patience = 2 * time.Second
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(c.Context(), patience)
	defer cancel()
	var names []string
	err := (&operatorCommand{p: p}).withDesk(ctx, func(ctx context.Context, k admin.Desk) error {
		list, err := k.Nodes(ctx)
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

// releasedNode is the answer of `outrelay nodes release --json`.
type releasedNode struct {
	Node  string   `json:"node"`
	Slots []string `json:"slots"`
}

func newNodesReleaseCommand(p *program) *cobra.Command {
	var hold time.Duration
	c := &cobra.Command{
		Use:   "release NODE",
		Short: "Make a node hand over everything that it owns, as before a restart of its machine",
		Long: `Make a node give up every slot that it owns, at its next renewal at the latest and after draining what is in flight; others
take over at once. It keeps away from them for --hold.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: p.completeNodes,
	}
	a := p.addChangeFlags(c)
	c.Flags().DurationVar(&hold, "hold", 30*time.Second, "how long the node keeps away from what it gave up")
	c.RunE = func(c *cobra.Command, args []string) error {
		if hold <= 0 {
			return fmt.Errorf("--hold must be a positive duration such as 30s")
		}
		return a.withDeskBriefly(c.Context(), func(ctx context.Context, k admin.Desk) error {
			out := releasedNode{Node: args[0]}
			var err error
			if a.dryRun {
				out.Slots, err = readOwnedSlots(ctx, k, args[0])
			} else {
				out.Slots, err = k.NodeRelease(ctx, args[0], hold)
			}
			if err != nil {
				return err
			}
			return a.printResult(out, func(w io.Writer) error {
				switch {
				case len(out.Slots) == 0:
					_, err = fmt.Fprintf(w, "node %s owns nothing\n", args[0])
				case a.dryRun:
					_, err = fmt.Fprintf(w, "node %s would release %s\n", args[0], strings.Join(out.Slots, ", "))
				default:
					_, err = fmt.Fprintf(w, "node %s releases %s and keeps away for %s\n", args[0], strings.Join(out.Slots, ", "), hold)
				}
				return err
			})
		})
	}
	return c
}

func readOwnedSlots(ctx context.Context, k admin.Desk, node string) ([]string, error) {
	list, err := k.Nodes(ctx)
	for _, n := range list {
		if n.Node == node {
			return n.Slots, err
		}
	}
	return []string{}, err
}

func newNodesRemoveCommand(p *program) *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use:   "remove NODE",
		Short: "Take a node that is gone off the list",
		Long: `Take a node that is gone off the list, and have it give up what it still owns. One that gives signs of life is refused: it
would be on the list again with its next heartbeat.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: p.completeNodes,
	}
	a := p.addChangeFlags(c)
	c.Flags().BoolVar(&force, "force", false, "also if it gives signs of life")
	c.RunE = func(c *cobra.Command, args []string) error {
		return a.withDeskBriefly(c.Context(), func(ctx context.Context, k admin.Desk) error {
			slots, err := readOwnedSlots(ctx, k, args[0])
			if err == nil && !a.dryRun {
				if err = a.confirm(ctx, "take node "+sanitizeLine(args[0])+" off the list"); err == nil {
					err = k.NodeRemove(ctx, args[0], force)
				}
			}
			if err != nil {
				return err
			}
			return a.printResult(releasedNode{Node: args[0], Slots: slots}, func(w io.Writer) error {
				verb := "is off the list"
				if a.dryRun {
					verb = "would be taken off the list"
				}
				_, err := fmt.Fprintf(w, "node %s %s; it owned %s\n", args[0], verb, sanitizeLine(strings.Join(slots, ", ")))
				return err
			})
		})
	}
	return c
}
