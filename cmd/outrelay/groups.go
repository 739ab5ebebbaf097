package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func newGroupsCommand(program *program) *cobra.Command {
	return newGroup(&cobra.Command{
		Use:   "groups",
		Short: "Show the consumer groups that read the topics, with members, lag and suspended handlers",
		Long: `Show consumer groups: members, partitions and lag as Kafka has them, and the handlers of pkg/consumer
that are suspended or paused. The Kafka login of the relay needs DESCRIBE on the groups; a group that
it may not see is left out of the list, or listed with that reason.`,
	}, newGroupsListCommand(program), newGroupsShowCommand(program))
}

func newGroupsListCommand(program *program) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the groups that read topics of the watcher, the greatest lag first",
		Args:  noArgs,
	}

	action := program.addReadFlags(cmd)
	cmd.Flags().BoolVar(&all, "all", false, "every group that the Kafka login may see")
	setShow(cmd, action, func(ctx context.Context, op admin.Operator, _ []string) (admin.GroupList, error) {
		return op.Groups().List(ctx, all)
	}, writeGroups)
	return cmd
}

func writeGroups(out io.Writer, list admin.GroupList) {
	writeList(out, "no group reads a topic of this watcher", "GROUP\tSTATE\tMEMBERS\tLAG\tRETRYING\tUNASSIGNED\tTOPICS\tNOTE", list.Groups, func(group admin.Group) cells {
		return cells{
			group.Group, group.State, formatMembers(group, len(group.Members)), formatOffset(group.Lag), formatRetrying(group), formatMembers(group, group.Unassigned),
			truncate(strings.Join(group.Topics, " "), 60), describeGroup(group),
		}
	})
	if list.Others > 0 {
		fmt.Fprintf(out, "left out: %s without a topic of this watcher; see outrelay groups list --all\n", countNoun(int64(list.Others), "group"))
	}
	for _, problem := range list.Problems {
		fmt.Fprintln(out, "warn: "+sanitizeLine(problem))
	}
}

// formatMembers formats a count that depends on the members of a group. It returns "-" if they are unknown.
func formatMembers(group admin.Group, n int) string {
	if group.State == "" {
		return "-"
	}
	return formatThousands(int64(n))
}

// formatRetrying formats how many messages wait for another attempt, in retry topics and in MongoDB. It returns "-" if only MongoDB was
// read, and has none.
func formatRetrying(group admin.Group) string {
	n := group.Retrying
	for _, h := range group.Handlers {
		n += h.Waiting
	}
	if n == 0 && group.Lag == nil {
		return "-"
	}
	return formatThousands(n)
}

// describeGroup returns the notes about a group that needs attention.
func describeGroup(group admin.Group) string {
	var notes []string
	add := func(isSet bool, format string, args ...any) {
		if isSet {
			notes = append(notes, fmt.Sprintf(format, args...))
		}
	}

	add(group.Problem != "", "%s", group.Problem)
	add(group.State == "Empty", "no member runs")
	add(group.Idle > 0, "%s without a partition", countNoun(int64(group.Idle), "member"))
	add(group.Paused > 0, "paused in %s", countNoun(int64(group.Paused), "member"))
	for _, h := range group.Handlers {
		add(h.Suspended > 0, "%s suspended in %s", h.Handler, countNoun(int64(h.Suspended), "member"))
		add(h.Paused > 0, "%s paused in %s", h.Handler, countNoun(int64(h.Paused), "member"))
	}
	return strings.Join(notes, "; ")
}

func newGroupsShowCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "show GROUP",
		Short: "Show a group with its members, partitions, lag and handlers",
		Args:  exactArgs(1),
	}
	setShow(cmd, program.addReadFlags(cmd), func(ctx context.Context, op admin.Operator, args []string) (admin.Group, error) {
		return op.Groups().Show(ctx, args[0])
	}, writeGroup)
	return cmd
}

func writeGroup(out io.Writer, group admin.Group) {
	head := []string{"group " + group.Group, cmp.Or(group.State, "state unknown")}
	if group.State != "" {
		head = append(head, countNoun(int64(len(group.Members)), "member"))
	}
	if group.Lag != nil {
		head = append(head, "lag "+formatThousands(*group.Lag), countNoun(int64(len(group.Partitions)), "partition"))
	}
	fmt.Fprintln(out, sanitizeLine(strings.Join(head, " · ")))
	if note := describeGroup(group); note != "" {
		fmt.Fprintln(out, sanitizeLine(note))
	}

	names := map[string]string{}
	// The note above has a group without members.
	if len(group.Members) > 0 {
		fmt.Fprintln(out)
		writeTable(out, "MEMBER\tCLIENT\tHOST\tPARTITIONS", group.Members, func(member admin.GroupMember) cells {
			names[member.ID] = member.Name()
			return cells{member.Name(), member.ClientID, member.Host, member.Partitions}
		})
	}

	// The note above has the reason why the partitions are unknown.
	if group.Lag != nil || len(group.Partitions) > 0 {
		fmt.Fprintln(out)
		writeList(out, "the group has read no partition", "TOPIC\tPARTITION\tCOMMITTED\tEND\tLAG\tREAD BY", group.Partitions, func(partition admin.GroupPartition) cells {
			return cells{
				partition.Topic, partition.Partition, formatOffset(partition.Committed), formatOffset(partition.End), formatOffset(partition.Lag),
				names[partition.Member],
			}
		})
	}

	if len(group.Handlers) == 0 {
		return
	}
	fmt.Fprintln(out)
	writeTable(out, "HANDLER\tWAITING\tFIRST FAILURE\tSUSPENDED\tNEXT\tREASON", group.Handlers, func(handler admin.GroupHandler) cells {
		return cells{
			handler.Handler, formatThousands(handler.Waiting), formatLocal(handler.FailedAt), handler.Suspended + handler.Paused, formatNext(handler.Until),
			truncate(handler.Reason, 100),
		}
	})
}

// formatOffset formats an offset or a lag. It returns "-" if it is unknown.
func formatOffset(offset *int64) string {
	if offset == nil {
		return "-"
	}
	return formatThousands(*offset)
}
