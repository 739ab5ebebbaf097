package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/problems"
)

const (
	// statusTimeout bounds a command for which a person waits.
	statusTimeout = 10 * time.Second

	// countTimeout bounds the counts of the status. Without them, the status still shows the owners.
	countTimeout = 5 * time.Second

	minFollowInterval = 100 * time.Millisecond
)

// statusReport is the output of `outrelay status --json`.
type statusReport struct {
	admin.Overview
	// CountsProblem is the reason why counts, pending topics and checks are missing.
	CountsProblem string `json:"counts_problem,omitempty"`
}

func newStatusCommand(program *program) *cobra.Command {
	var follow bool
	var check string
	var every time.Duration
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the owner, lag and waiting events of each watcher",
		Long: `Show each slot of each watcher in the state database: owner, epoch, lag, rate and the topics whose
events wait. For the configured watcher, also show the waiting events by topic, the counts, and the
list of problems, each with its age, cause, consequence and fix. The command reads only
MongoDB, so it works without access to the outrelay processes.

With --follow on a terminal, the display is updated until Ctrl-C. Without a terminal, --follow prints
a line for each slot, and with --json one object per line. With --check, the exit code is 1 if a
problem is a failure, and with --check=warn also if there is a warning.`,
		Args: noArgs,
	}

	action := program.addReadFlags(cmd)
	// Each read of a status that is followed has its own limit.
	action.limit = 0
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "update the status until Ctrl-C")
	cmd.Flags().DurationVar(&every, "every", time.Second, "interval between two updates of --follow")
	cmd.Flags().StringVar(&check, "check", "", "exit with 1 if there is a problem of this `severity` or a greater one: fail or warn")
	cmd.Flags().Lookup("check").NoOptDefVal = string(problems.Fail)
	_ = cmd.RegisterFlagCompletionFunc("check", cobra.FixedCompletions([]string{string(problems.Fail), string(problems.Warn)}, cobra.ShellCompDirectiveNoFileComp))
	cmd.MarkFlagsMutuallyExclusive("follow", "check")

	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if every < minFollowInterval {
			return fmt.Errorf("--every must be at least %s", minFollowInterval)
		}
		if check != "" && check != string(problems.Fail) && check != string(problems.Warn) {
			return fmt.Errorf("--check must be fail or warn, not %q", check)
		}

		return action.withOperator(cmd.Context(), func(ctx context.Context, op admin.Operator) error {
			if follow {
				return action.followStatus(ctx, op, every)
			}

			report, err := readStatus(ctx, op)
			if err != nil {
				return err
			}
			if err := action.printResult(report, report.writeStatus); err != nil {
				return err
			}

			if check != "" && report.hasProblem(problems.Severity(check)) {
				return reportedError(exitConfig)
			}
			return nil
		})
	}
	return cmd
}

// readStatus reads the overview. If that takes too long or a privilege is missing, readStatus returns
// the watcher documents only, with the reason in CountsProblem.
func readStatus(ctx context.Context, op admin.Operator) (statusReport, error) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()

	// The counts get a shorter limit, so that there is time for the documents after it.
	countCtx, stop := context.WithTimeout(ctx, countTimeout)
	defer stop()
	overview, err := op.Overview(countCtx)
	if err == nil {
		return statusReport{Overview: overview}, nil
	}

	problem := err.Error()
	if errors.Is(err, context.DeadlineExceeded) {
		problem = fmt.Sprintf("counting took longer than %s", countTimeout)
	}
	if overview, err = op.OverviewWithoutCounts(ctx, problem); err != nil {
		return statusReport{}, err
	}
	return statusReport{CountsProblem: problem, Overview: overview}, nil
}

// hasProblem reports whether there is a problem of the severity or a greater one.
func (s statusReport) hasProblem(least problems.Severity) bool {
	worst := problems.Worst(s.Problems)
	return worst != "" && (worst == problems.Fail || least == problems.Warn)
}

const noWatcher = "no watcher has run with this state database yet"

// writeStatus writes the status for people.
func (s statusReport) writeStatus(out io.Writer) {
	if len(s.Slots) == 0 {
		fmt.Fprintln(out, noWatcher)
		writeProblems(out, s.Problems)
		return
	}

	head := "WATCHER\tSLOT\tOWNER\tEPOCH\tUNTIL\tSTATE\tLAG\tRATE\tTOKEN AGE\tUNRESOLVED"
	writeTable(out, head, s.Slots, func(slot admin.SlotStatus) cells {
		return cells{
			slot.Name, slot.Slot, ownerNode(&slot), slot.Epoch, fmt.Sprintf("%+.1f s", float64(slot.ExpiresInMS)/1000), slot.State,
			formatFigure("%.2f s", slot.LagS), fmt.Sprintf("%.0f/s", slot.Rate), fmt.Sprintf("%.1f s", slot.TokenAgeS), slot.Unresolved,
		}
	})
	for _, x := range s.Slots {
		writeSlotDetails(out, &x)
	}

	if s.CountsProblem == "" {
		s.writeCounts(out)
	}
	writeProblems(out, s.Problems)
}

// ownerNode returns the node that owns the slot, or "-".
func ownerNode(slot *admin.SlotStatus) string {
	if slot.Owner == "" {
		return "-"
	}
	return slot.Node
}

// writeSlotDetails writes the reason for the state of a slot, the orders of operators and the topics
// whose events wait.
func writeSlotDetails(out io.Writer, status *admin.SlotStatus) {
	slot := sanitizeLine(status.Name + "/" + status.Slot)
	if status.Reason != "" {
		fmt.Fprintf(out, "%s: %s\n", slot, sanitizeLine(status.Reason))
	}
	if status.Pin != "" {
		fmt.Fprintf(out, "%s: pinned to node %s\n", slot, sanitizeLine(status.Pin))
	}
	if status.StepDownUntil != nil {
		node := "no node takes over"
		if status.StepDownNode != "" {
			node = fmt.Sprintf("node %s does not take over", sanitizeLine(status.StepDownNode))
		}
		fmt.Fprintf(out, "%s: %s until %s\n", slot, node, status.StepDownUntil.Local().Format(time.TimeOnly))
	}
}

func (s statusReport) writeCounts(out io.Writer) {
	counts := s.Counts
	// The list has the nodes of all watchers.
	nodes, stale := 0, 0
	for _, n := range s.Nodes {
		if !slices.Contains(n.Watchers, s.Watcher) {
			continue
		}
		nodes++
		if n.Stale {
			stale++
		}
	}
	// The owner counts every few seconds, so the list of dead letters may be ahead.
	counted := ""
	if age := s.At.Sub(s.CountedAt); !s.CountedAt.IsZero() && age >= time.Second {
		counted = " · counted " + formatAge(age.Seconds()) + " ago"
	}
	lag := "-"
	if s.LagS != nil {
		lag = formatAge(*s.LagS)
	}
	fmt.Fprintf(out, "%s · lag %s · waiting %s (oldest %s) · retry %s · blocked %s (%s) · parked %s · scheduled %s · dead %s (%s) · %s, %d stale%s\n",
		s.Watcher, lag, formatThousands(counts.Waiting()), formatAge(s.OldestS), formatThousands(counts.Retry),
		formatThousands(counts.Blocked), formatKeys(counts.BlockedKeys, counts.Waiting())+" keys", formatThousands(counts.Parked),
		formatThousands(counts.Scheduled), formatThousands(counts.Dead+counts.HandlerDead), counts.Letters(),
		countNoun(int64(nodes), "node"), stale, counted)
	if counts.HandlerWaiting > 0 {
		fmt.Fprintf(out, "handlers retry %s: outrelay waiting list --source handler\n", countNoun(counts.HandlerWaiting, "message"))
	}

	if len(s.WaitingTopics) == 0 {
		return
	}
	writeTable(out, "TOPIC\tOLDEST\tRETRY\tBLOCKED\tPARKED\tKEYS\tWHY", s.WaitingTopics, func(topic admin.WaitingTopic) cells {
		why := ""
		if topic.Target != nil {
			why = topic.Target.Reason
		}
		return cells{
			topic.Topic, formatAge(topic.OldestAgeS), formatThousands(topic.Retry), formatThousands(topic.Blocked), formatThousands(topic.Parked),
			formatKeys(topic.Keys, 1), why,
		}
	})
}

// formatKeys formats the number of keys of waiting envelopes. If many wait, their keys are not counted.
func formatKeys(n, waiting int64) string {
	if n == 0 && waiting > 0 {
		return "-"
	}
	return formatThousands(n)
}

// formatFigure formats a figure, or returns "-" if it is unknown.
func formatFigure(format string, figure *float64) string {
	if figure == nil {
		return "-"
	}
	return fmt.Sprintf(format, *figure)
}

// formatAge formats an age for people: 0.4 s, 12 s, 3m20s, 26h0m0s.
func formatAge(seconds float64) string {
	if seconds < 10 {
		return fmt.Sprintf("%.1f s", seconds)
	}
	if seconds < 120 {
		return fmt.Sprintf("%.0f s", seconds)
	}
	return (time.Duration(seconds) * time.Second).String()
}

// followStatus shows the status until ctx ends. A server that does not respond does not end it:
// followStatus shows the error and tries again.
func (a *operatorCommand) followStatus(ctx context.Context, op admin.Operator, every time.Duration) error {
	screen, onTerminal := &screen{out: a.p.out}, isTerminal(a.p.out)
	tick := time.NewTicker(every)
	defer tick.Stop()

	for {
		report, err := readStatus(ctx, op)
		if ctx.Err() != nil {
			return nil
		}

		switch {
		case a.json && err == nil:
			err = json.NewEncoder(a.p.out).Encode(report)
		case err != nil && (a.json || !onTerminal):
			fmt.Fprintln(a.p.errOut, sanitizeLine(classifyError(err).Error()))
			err = nil
		case onTerminal:
			err = screen.drawFrame(report.formatFrame(classifyError(err)))
		default:
			err = a.p.printText(report.writeLines)
		}
		if err != nil {
			return err
		}

		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// formatFrame returns one frame of --follow: the status, or the problem if there is one.
func (s statusReport) formatFrame(problem error) string {
	var builder strings.Builder
	fmt.Fprintf(&builder, "outrelay status · %s · Ctrl-C to stop\n\n", time.Now().Format(time.TimeOnly))
	if problem != nil {
		fmt.Fprintln(&builder, sanitizeLine(problem.Error()))
	} else {
		s.writeStatus(&builder)
	}
	return builder.String()
}

// writeLines writes one line for each slot, for --follow without a terminal.
func (s statusReport) writeLines(out io.Writer) {
	at := s.At.Local().Format(time.TimeOnly)
	if len(s.Slots) == 0 {
		fmt.Fprintln(out, at, noWatcher)
	}

	for i := range s.Slots {
		slot := &s.Slots[i]
		line := fmt.Sprintf("%s %s/%s owner=%s epoch=%d state=%s lag=%s rate=%.0f/s",
			at, slot.Name, slot.Slot, ownerNode(slot), slot.Epoch, slot.State, formatFigure("%.2fs", slot.LagS), slot.Rate)
		if slot.Name == s.Watcher && s.CountsProblem == "" {
			line += fmt.Sprintf(" waiting=%d scheduled=%d dead_relay=%d dead_handlers=%d", s.Counts.Waiting(), s.Counts.Scheduled, s.Counts.Dead, s.Counts.HandlerDead)
		}
		fmt.Fprintln(out, sanitizeLine(line))
	}
}

// screen draws frames over each other on a terminal. It does not clear the terminal in between, because
// that flickers.
type screen struct {
	out   io.Writer
	drawn bool
}

// drawFrame draws a frame over the previous one.
func (f *screen) drawFrame(text string) error {
	const (
		clearScreen      = "\x1b[2J"
		moveHome         = "\x1b[H"
		clearToLineEnd   = "\x1b[K"
		clearToScreenEnd = "\x1b[J"
	)

	var buffer bytes.Buffer
	if !f.drawn {
		buffer.WriteString(clearScreen)
	}
	f.drawn = true
	buffer.WriteString(moveHome)

	// Without this, the end of a longer line of the previous frame would remain.
	buffer.WriteString(strings.ReplaceAll(text, "\n", clearToLineEnd+"\n"))
	buffer.WriteString(clearToScreenEnd)

	if _, err := f.out.Write(buffer.Bytes()); err != nil {
		return fmt.Errorf("drawing: %w", err)
	}
	return nil
}
