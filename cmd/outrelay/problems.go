package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func newProblemsCommand(program *program) *cobra.Command {
	return newGroup(&cobra.Command{
		Use:   "problems",
		Short: "List everything that is wrong, or acknowledge one that is over",
	}, newProblemsListCommand(program), newAcknowledgeCommand(program))
}

func newProblemsListCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List everything that is wrong, failures first",
		Long: `List the problems that outrelay status shows, failures first, each with its cause, its consequence for
events and services, and the fix. /readyz, the metrics, the API and the page have the same list.`,
		Args: noArgs,
	}

	action := program.addReadFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return action.withOperator(cmd.Context(), func(ctx context.Context, op admin.Operator) error {
			report, err := readStatus(ctx, op)
			if err != nil {
				return err
			}
			return action.printResult(report.Problems, func(out io.Writer) { writeProblems(out, report.Problems) })
		})
	}
	return cmd
}

// acknowledged is the output of `outrelay problems acknowledge --json`.
type acknowledged struct {
	Acknowledged string `json:"acknowledged"`
}

func newAcknowledgeCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "acknowledge ID",
		Short: "End a problem whose cause is over, after its consequences were checked",
		Long: `End a problem that stays after its cause has ended: lost history, or discarded events. outrelay
problems list shows the id. The audit log gets an entry. Without it, the problem ends after seven days.`,
		Args: exactArgs(1),
	}

	action := program.addReadFlags(cmd)
	action.addActorFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return action.withOperator(cmd.Context(), func(ctx context.Context, op admin.Operator) error {
			if err := op.Acknowledge(ctx, args[0]); err != nil {
				return err
			}
			return action.printLine(acknowledged{args[0]}, "acknowledged %s", args[0])
		})
	}
	return cmd
}

// formatSince returns for how long the problem lasts, or how long ago something happened that a person has to acknowledge.
func formatSince(problem *admin.Problem) string {
	if problem.Acknowledge != "" {
		return formatAge(problem.ForS) + " ago"
	}
	return "for " + formatAge(problem.ForS)
}

// writeProblems writes each problem in a line, and its consequence and its fix below it.
func writeProblems(out io.Writer, list []admin.Problem) {
	if len(list) == 0 {
		fmt.Fprintln(out, "no problems")
		return
	}

	for i := range list {
		problem := &list[i]
		line := fmt.Sprintf("%s %s %s", strings.ToUpper(string(problem.Severity)), problem.Kind, problem.Title)
		if problem.ForS > 0 {
			line += " (" + formatSince(problem) + ")"
		}
		line += ": " + problem.Detail
		if problem.Count > 0 {
			line += fmt.Sprintf("; %s %s", formatThousands(problem.Count), problem.Unit)
		}
		fmt.Fprintln(out, sanitizeLine(line))
		fmt.Fprintf(out, "     consequence: %s\n", sanitizeLine(problem.Consequence))
		fmt.Fprintf(out, "     fix: %s\n", sanitizeLine(problem.Fix))
		if problem.Command != "" {
			fmt.Fprintf(out, "     command: %s\n", sanitizeLine(problem.Command))
		}
	}
}
