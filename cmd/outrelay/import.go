package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/lab/importing"
)

func newImportCommand(program *program) *cobra.Command {
	options := importing.Options{}
	cmd := &cobra.Command{
		Use:   "import",
		Short: "Convert the pending rows of another outbox library into envelopes",
		Long: `Convert the rows that another outbox library has not sent yet into envelopes of the watched outbox.
Stop the publisher of the library first. The rows are not changed.

Rows with failed attempts keep their number and the time of the next one. Rows with a due time become
scheduled envelopes, rows that the library gave up become dead letters. The id of an event stays, so
consumers that compare the header id recognize an event that the library has sent after all.
pkg/consumer also compares outrelay-ns, so it does not.

The command first converts every row without writing anything, and prints the counts. It rejects a
collection that does not match --from, and rows that a running publisher has locked. Rows that cannot
be converted are listed with the reason and stay, and the exit code is 1. If the command is
interrupted, run it again: rows that were imported are left out.

  --from             collections                                        topic by default
  slimmessagebus     smb_outbox                                         path
  koan               Outbox                                             EntityType
  outbox-event-bus   outbox_events                                      type, up to its first dot
  wolverine          wolverine_outgoing_envelopes,                      destination
                     wolverine_incoming_envelopes (scheduled),
                     wolverine_dead_letters
  masstransit        outbox.messages                                    DestinationAddress`,
		Example: `  outrelay import --from slimmessagebus --database slimmessagebus --dry-run
  outrelay import --from masstransit --key-header customer --yes`,
		Args: noArgs,
	}

	action := program.addChangeFlags(cmd)
	cmd.Flags().StringVar(&options.From, "from", "", "`library`: "+strings.Join(importing.Sources(), ", "))
	cmd.Flags().StringVar(&options.Database, "database", "", "`database` of the rows; default: that of the outbox")
	cmd.Flags().StringVar(&options.Collection, "collection", "", "`collection` of the messages, if it has another name")
	cmd.Flags().StringVar(&options.To, "to", "", "outbox, as `database.collection`; default: the only watched one")
	cmd.Flags().StringVar(&options.KeyHeader, "key-header", "", "`header` whose value becomes the key of the record")
	cmd.Flags().Int32Var(&options.MaxRetries, "max-retries", 5, "`number` of failures after which outbox-event-bus gives an event up")
	if err := cmd.MarkFlagRequired("from"); err != nil {
		panic("outrelay: " + err.Error())
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return action.importRows(cmd.Context(), options) }
	return cmd
}

// importRows plans the import, asks for confirmation and performs it.
func (a *operatorCommand) importRows(ctx context.Context, options importing.Options) error {
	cfg, _, err := a.p.loadWithLogger()
	if err != nil {
		return err
	}
	options.Actor = a.actorName()
	// The importer gets its callback before the bars exist, because both steps report through it.
	var bar progress
	options.OnProgress = func(rows int64) { bar.setDone(rows) }
	importer, disconnect, err := importing.Connect(cfg, options)
	if err != nil {
		return err
	}
	defer disconnect()

	bar = a.startProgress("checking", -1)
	defer func() { bar.clear() }()
	report, err := importer.Plan(ctx)
	bar.clear()
	if err != nil {
		return explainError(ctx, cfg, err)
	}
	// Rows that were imported before are counted in Known and need no confirmation.
	if !a.dryRun && report.Total() > 0 {
		action := fmt.Sprintf("import %s into %s, and leave %s out", countNoun(report.Total(), "row"), report.To, countNoun(report.Rejected, "row"))
		if err := a.confirm(ctx, action); err != nil {
			return err
		}
		bar = a.startProgress("importing", report.Total()+report.Known+report.Rejected)
		report, err = importer.Run(ctx)
		bar.clear()
	}
	// The counts are printed even after an error: the next run continues from them.
	err = errors.Join(a.printResult(report, func(out io.Writer) { writeImport(out, report) }), explainError(ctx, cfg, err))
	if err == nil && report.Rejected > 0 {
		return reportedError(exitConfig)
	}
	return err
}

func writeImport(out io.Writer, report importing.Report) {
	for _, t := range report.Tables {
		fmt.Fprintf(out, "%s: %s to import\n", t.Collection, countNoun(t.Rows, "row"))
	}
	for _, p := range report.Problems {
		fmt.Fprintf(out, "%s: %s: cannot be converted: %s\n", p.Collection, sanitizeLine(p.ID), sanitizeLine(p.Reason))
	}
	fmt.Fprintf(out, "to send: %s, scheduled: %s, waiting for a retry: %s, dead letters: %s\n",
		formatThousands(report.Pending), formatThousands(report.Scheduled), formatThousands(report.Retried), formatThousands(report.Dead))
	fmt.Fprintf(out, "imported before: %s, cannot be converted: %s\n", formatThousands(report.Known), formatThousands(report.Rejected))

	text := "imported into"
	if !report.Done {
		text = "would be imported into"
	}
	fmt.Fprintf(out, "%s %s %s\n", countNoun(report.Total(), "row"), text, report.To)
}
