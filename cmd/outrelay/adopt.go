package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/lab/adopt"
)

func newAdoptCommand(program *program) *cobra.Command {
	src := adopt.Source{}
	cmd := &cobra.Command{
		Use:   "adopt",
		Short: "Take over the position of Debezium, the MongoDB Kafka connector, or a token",
		Long: `Store the position of another publisher as the position of the watcher, so that outrelay continues
where the other publisher stopped. Stop the other publisher first, and outrelay on all nodes.

The position comes from one of these:

  --offsets-file   the offset file of Kafka Connect in standalone mode
  --offsets-topic  the offset topic of Kafka Connect in distributed mode, such as connect-offsets
  --token          a resume token: its document as JSON, its data, or its BSON in base64
  --at             a time in seconds; the first events are the events of this second

The command checks the position before it writes anything, and prints the greatest number of events
that are sent a second time: the events inserted after the position and before the stop
(--stopped-at). Kafka Connect stores offsets every minute by default, so the other publisher may have
sent them. It rejects a position that is older than the oplog, a token of another cluster, an offset
of a connector for another source, and a watcher that a node owns or that has a position.`,
		Example: `  outrelay adopt --offsets-topic connect-offsets --connector orders --dry-run
  outrelay adopt --offsets-file /var/lib/connect/offsets --stopped-at 5m --yes
  outrelay adopt --at 2026-11-20T08:00:00Z`,
		Args: noArgs,
	}

	action := program.addChangeFlags(cmd)
	cmd.Flags().StringVar(&src.File, "offsets-file", "", "offset `file` of Kafka Connect (offset.storage.file.filename)")
	cmd.Flags().StringVar(&src.Topic, "offsets-topic", "", "offset `topic` of Kafka Connect (offset.storage.topic)")
	cmd.Flags().StringVar(&src.Token, "token", "", "resume `token`")
	addTimeFlag(cmd, &src.At, "at", "`time` with its zone, or so long ago, such as 10m", parseZonedPastTime)
	cmd.Flags().StringVar(&src.Connector, "connector", "", "`name` of the connector; default: the only one for MongoDB")
	addTimeFlag(cmd, &src.StoppedAt, "stopped-at",
		"`time` at which the other publisher stopped, or so long ago; default: now", parseZonedPastTime)
	cmd.Flags().BoolVar(&src.Replace, "replace", false, "replace the position that the watcher has")
	cmd.MarkFlagsMutuallyExclusive("offsets-file", "offsets-topic", "token", "at")
	cmd.MarkFlagsOneRequired("offsets-file", "offsets-topic", "token", "at")

	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return action.adoptPosition(cmd.Context(), src) }
	return cmd
}

// adoptPosition plans the hand-over, asks for confirmation and performs it.
func (a *operatorCommand) adoptPosition(ctx context.Context, src adopt.Source) error {
	cfg, log, err := a.p.loadWithLogger()
	if err != nil {
		return err
	}
	adopter, disconnect, err := adopt.Connect(cfg, log)
	if err != nil {
		return err
	}
	defer disconnect()

	report, err := adopter.Plan(ctx, src)
	if err != nil {
		return explainError(ctx, cfg, err)
	}
	// The plan has checked everything, so a dry run ends here.
	if !a.dryRun {
		action := fmt.Sprintf("let watcher %s continue at %s; consumers get up to %s a second time",
			report.Watcher, report.At.Format(time.RFC3339), countNoun(report.MaxRepeats, "event"))
		if err := a.confirm(ctx, action); err != nil {
			return err
		}
		// Write checks again: the watcher may have got an owner while the user was asked.
		if report, err = adopter.Write(ctx, report, a.actorName()); err != nil {
			return explainError(ctx, cfg, err)
		}
	}
	return a.printResult(report, func(out io.Writer) { writeAdoption(out, report) })
}

func writeAdoption(out io.Writer, report adopt.Report) {
	from := report.Source
	if report.Connector != "" {
		from = fmt.Sprintf("%s of connector %s (%s, %s)", report.Source, report.Connector, report.Kind, report.Partition)
	}
	fmt.Fprintf(out, "position: %s, from the %s\n", report.At.Format(time.RFC3339), from)
	if report.Token != "" {
		fmt.Fprintf(out, "token: %s, checked by its %s\n", report.Token, report.Checked)
	}
	if !report.OplogFrom.IsZero() {
		fmt.Fprintf(out, "oplog: from %s\n", report.OplogFrom.Format(time.RFC3339))
	}
	if !report.Present.IsZero() {
		fmt.Fprintf(out, "replaces the position: %s\n", report.Present.Format(time.RFC3339))
	}
	fmt.Fprintf(out, "repeats: at most %s\n", countNoun(report.MaxRepeats, "event"))

	text := "continues there; start outrelay run"
	if !report.Done {
		text = "would continue there; nothing was done"
	}
	fmt.Fprintf(out, "watcher %s: %s\n", report.Watcher, text)
}
