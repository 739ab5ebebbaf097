package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
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

func newStatusCommand(p *program) *cobra.Command {
	var follow, check bool
	var every time.Duration
	c := &cobra.Command{
		Use:   "status",
		Short: "Show the owner, lag and waiting events of each watcher",
		Long: `Show each slot of each watcher in the state database: owner, epoch, lag, rate and the topics whose
events wait. For the configured watcher, also show the waiting events by topic, with counts and
checks. The command reads only MongoDB, so it works without access to the outrelay processes.

With --follow on a terminal, the display is updated until Ctrl-C. Without a terminal, --follow prints
a line for each slot, and with --json one object per line. With --check, the exit code is 1 if a
check fails.`,
		Args: noArgs,
	}

	a := p.addReadFlags(c)
	// Each read of a status that is followed has its own limit.
	a.limit = 0
	c.Flags().BoolVarP(&follow, "follow", "f", false, "update the status until Ctrl-C")
	c.Flags().DurationVar(&every, "every", time.Second, "interval between two updates of --follow")
	c.Flags().BoolVar(&check, "check", false, "exit with 1 if a check fails")
	c.MarkFlagsMutuallyExclusive("follow", "check")

	c.RunE = func(c *cobra.Command, _ []string) error {
		if every < minFollowInterval {
			return fmt.Errorf("--every must be at least %s", minFollowInterval)
		}

		return a.withOperator(c.Context(), func(ctx context.Context, op admin.Operator) error {
			if follow {
				return a.followStatus(ctx, op, every)
			}

			s, err := readStatus(ctx, op)
			if err != nil {
				return err
			}
			if err := a.printResult(s, s.writeStatus); err != nil {
				return err
			}

			if check && s.hasFailedCheck() {
				return reportedError(exitConfig)
			}
			return nil
		})
	}
	return c
}

// readStatus reads the overview. If that takes too long or a privilege is missing, readStatus returns
// the watcher documents only, with the reason in CountsProblem.
func readStatus(ctx context.Context, op admin.Operator) (statusReport, error) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()

	// The counts get a shorter limit, so that there is time for the documents after it.
	countCtx, stop := context.WithTimeout(ctx, countTimeout)
	defer stop()
	o, err := op.Overview(countCtx)
	if err == nil {
		return statusReport{Overview: o}, nil
	}

	problem := err.Error()
	if errors.Is(err, context.DeadlineExceeded) {
		problem = fmt.Sprintf("counting took longer than %s", countTimeout)
	}
	if o, err = op.OverviewWithoutCounts(ctx, problem); err != nil {
		return statusReport{}, err
	}
	return statusReport{CountsProblem: problem, Overview: o}, nil
}

func (s statusReport) hasFailedCheck() bool {
	for _, c := range s.Checks {
		if c.Status == admin.CheckFail {
			return true
		}
	}
	return false
}

const noWatcher = "no watcher has run with this state database yet"

// writeStatus writes the status for people.
func (s statusReport) writeStatus(w io.Writer) {
	if len(s.Slots) == 0 {
		fmt.Fprintln(w, noWatcher)
		s.writeChecks(w)
		return
	}

	head := "WATCHER\tSLOT\tOWNER\tEPOCH\tUNTIL\tSTATE\tLAG\tRATE\tTOKEN AGE\tUNRESOLVED"
	writeTable(w, head, s.Slots, func(x admin.SlotStatus) cells {
		return cells{
			x.Name, x.Slot, ownerNode(&x), x.Epoch, fmt.Sprintf("%+.1f s", float64(x.ExpiresInMS)/1000), x.State,
			fmt.Sprintf("%.2f s", x.LagS), fmt.Sprintf("%.0f/s", x.Rate), fmt.Sprintf("%.1f s", x.TokenAgeS), x.Unresolved,
		}
	})
	for _, x := range s.Slots {
		writeSlotDetails(w, &x)
	}

	if s.CountsProblem == "" {
		s.writeCounts(w)
	}
	s.writeChecks(w)
}

// ownerNode returns the node that owns the slot, or "-".
func ownerNode(x *admin.SlotStatus) string {
	if x.Owner == "" {
		return "-"
	}
	return x.Node
}

// writeSlotDetails writes the reason for the state of a slot, the orders of operators and the topics
// whose events wait.
func writeSlotDetails(w io.Writer, x *admin.SlotStatus) {
	slot := sanitizeLine(x.Name + "/" + x.Slot)
	if x.Reason != "" {
		fmt.Fprintf(w, "%s: %s\n", slot, sanitizeLine(x.Reason))
	}
	for _, p := range x.Problems {
		fmt.Fprintf(w, "%s: problem of %s for %s: %s\n", slot, p.Part, formatAge(p.ForS), sanitizeLine(p.Text))
	}
	if x.Pin != "" {
		fmt.Fprintf(w, "%s: pinned to node %s\n", slot, sanitizeLine(x.Pin))
	}
	if x.StepDownUntil != nil {
		fmt.Fprintf(w, "%s: node %s does not take over until %s\n",
			slot, sanitizeLine(x.Node), x.StepDownUntil.Local().Format(time.TimeOnly))
	}
	if x.Gap != "" {
		fmt.Fprintf(w, "%s: a gap is being swept: %s\n", slot, sanitizeLine(x.Gap))
	}

	for _, b := range x.Unwritable {
		verb := "waits"
		if b.Parked {
			verb = "is parked"
		}
		fmt.Fprintf(w, "%s: topic %q %s since %s with %d envelopes: %s\n",
			slot, b.Topic, verb, b.Since.Local().Format(time.TimeOnly), b.Count, sanitizeLine(b.Reason))
	}
}

func (s statusReport) writeCounts(w io.Writer) {
	c := s.Counts
	stale := 0
	for _, n := range s.Nodes {
		if n.Stale {
			stale++
		}
	}
	fmt.Fprintf(w, "%s · lag %s · waiting %s (oldest %s) · retry %s · blocked %s (%s) · parked %s · scheduled %s · dead %s · %s, %d stale\n",
		s.Watcher, formatAge(s.LagS), formatThousands(c.Waiting()), formatAge(s.OldestS), formatThousands(c.Retry),
		formatThousands(c.Blocked), countNoun(c.BlockedKeys, "key"), formatThousands(c.Parked),
		formatThousands(c.Scheduled), formatThousands(c.Dead), countNoun(int64(len(s.Nodes)), "node"), stale)

	if len(s.WaitingTopics) == 0 {
		return
	}
	writeTable(w, "TOPIC\tOLDEST\tRETRY\tBLOCKED\tPARKED\tKEYS\tWHY", s.WaitingTopics, func(p admin.WaitingTopic) cells {
		why := ""
		if p.Target != nil {
			why = p.Target.Reason
		}
		return cells{
			p.Topic, formatAge(p.OldestAgeS), formatThousands(p.Retry), formatThousands(p.Blocked), formatThousands(p.Parked),
			formatThousands(p.Keys), why,
		}
	})
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

// writeChecks writes each check that is not ok, with its fix.
func (s statusReport) writeChecks(w io.Writer) {
	good := 0
	for _, c := range s.Checks {
		if c.Status == admin.CheckOK {
			good++
			continue
		}

		fix := ""
		if c.Fix != "" {
			fix = "; " + c.Fix
		}
		fmt.Fprintf(w, "%s %s: %s%s\n", strings.ToUpper(c.Status), sanitizeLine(c.ID), sanitizeLine(c.Detail), sanitizeLine(fix))
	}

	fmt.Fprintf(w, "checks: %d of %d ok\n", good, len(s.Checks))
}

// followStatus shows the status until ctx ends. A server that does not answer does not end it:
// followStatus shows the error and tries again.
func (a *operatorCommand) followStatus(ctx context.Context, op admin.Operator, every time.Duration) error {
	f, onTerminal := &screen{out: a.p.out}, isTerminal(a.p.out)
	tick := time.NewTicker(every)
	defer tick.Stop()

	for {
		s, err := readStatus(ctx, op)
		if ctx.Err() != nil {
			return nil
		}

		switch {
		case a.json && err == nil:
			err = json.NewEncoder(a.p.out).Encode(s)
		case err != nil && (a.json || !onTerminal):
			fmt.Fprintln(a.p.errOut, sanitizeLine(classifyError(err).Error()))
			err = nil
		case onTerminal:
			err = f.drawFrame(s.formatFrame(classifyError(err)))
		default:
			err = a.p.printText(s.writeLines)
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
	var w strings.Builder
	fmt.Fprintf(&w, "outrelay status · %s · Ctrl-C to stop\n\n", time.Now().Format(time.TimeOnly))
	if problem != nil {
		fmt.Fprintln(&w, sanitizeLine(problem.Error()))
	} else {
		s.writeStatus(&w)
	}
	return w.String()
}

// writeLines writes one line for each slot, for --follow without a terminal.
func (s statusReport) writeLines(w io.Writer) {
	at := s.At.Local().Format(time.TimeOnly)
	if len(s.Slots) == 0 {
		fmt.Fprintln(w, at, noWatcher)
	}

	for i := range s.Slots {
		x := &s.Slots[i]
		line := fmt.Sprintf("%s %s/%s owner=%s epoch=%d state=%s lag=%.2fs rate=%.0f/s",
			at, x.Name, x.Slot, ownerNode(x), x.Epoch, x.State, x.LagS, x.Rate)
		if x.Name == s.Watcher && s.CountsProblem == "" {
			line += fmt.Sprintf(" waiting=%d scheduled=%d dead=%d", s.Counts.Waiting(), s.Counts.Scheduled, s.Counts.Dead)
		}
		fmt.Fprintln(w, sanitizeLine(line))
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

	var b bytes.Buffer
	if !f.drawn {
		b.WriteString(clearScreen)
	}
	f.drawn = true
	b.WriteString(moveHome)

	// Without this, the end of a longer line of the previous frame would remain.
	b.WriteString(strings.ReplaceAll(text, "\n", clearToLineEnd+"\n"))
	b.WriteString(clearToScreenEnd)

	if _, err := f.out.Write(b.Bytes()); err != nil {
		return fmt.Errorf("drawing: %w", err)
	}
	return nil
}
