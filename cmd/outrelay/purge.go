package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/operate/admin"
)

func newPurgeCommand(program *program) *cobra.Command {
	var (
		olderThan string
		want      admin.Purge
	)
	cmd := &cobra.Command{
		Use:   "purge",
		Short: "Remove delivered envelopes now instead of waiting for the watcher",
		Long: `Remove delivered envelopes that are older than --older-than, which defaults to the configured
retention. The age is the time between the write of the envelope and the position of the watcher. A
watcher that lags behind, is paused or is stopped therefore keeps the envelopes that it has not
delivered.

The last minutes always stay, because a transaction may still commit into them. Scheduled and
waiting envelopes stay as well, and so do all envelopes of a collection whose gap is being swept.

--dry-run counts the envelopes. It also shows up to which time each collection can be purged, and
which watcher document sets that limit.`,
		Args: noArgs,
	}

	action := program.addChangeFlags(cmd)
	cmd.Flags().StringSliceVar(&want.Collections, "collection", nil,
		"only this `collection`, as database.collection; may be repeated; default: all of the watcher")
	cmd.Flags().StringVar(&olderThan, "older-than", "",
		"remove envelopes older than this `duration`, such as 90m or 7d; default: retention")
	cmd.Flags().IntVar(&want.Rate, "rate", 0, "maximum `envelopes` per second; default: purge.rate; below 0 for no limit")

	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, _, err := program.loadConfig()
		if err != nil {
			return err
		}
		if want.OlderThan, err = parsePurgeAge(olderThan, cfg.Retention); err != nil {
			return err
		}

		// No limit is a rate below 0 on the command line, but 0 in admin.Purge.
		want.Batch = cfg.Purge.Batch
		switch {
		case !cmd.Flags().Changed("rate"):
			want.Rate = cfg.Purge.Rate
		case want.Rate < 0:
			want.Rate = 0
		case want.Rate == 0:
			return fmt.Errorf("--rate 0 would remove nothing; pass -1 for no limit")
		}

		return action.withOperator(cmd.Context(), func(ctx context.Context, operator admin.Operator) error { return action.runPurge(ctx, operator, want) })
	}
	return cmd
}

// parsePurgeAge parses the value of --older-than. The default is the retention.
func parsePurgeAge(text string, retention time.Duration) (time.Duration, error) {
	if text == "" {
		if retention == 0 {
			return 0, fmt.Errorf("retention is 0, which keeps envelopes forever; set the age with --older-than")
		}
		return retention, nil
	}

	age, err := config.ParseDuration(text)
	if err != nil || age < 0 {
		return 0, fmt.Errorf("--older-than %q is not a duration such as 90m, 24h or 7d", text)
	}
	return age, nil
}

// runPurge counts the envelopes, asks for confirmation and removes them.
func (a *operatorCommand) runPurge(ctx context.Context, operator admin.Operator, want admin.Purge) error {
	dryRun := want
	dryRun.DryRun = true
	before, err := operator.Purge(ctx, dryRun)
	if err != nil {
		return err
	}
	// Nothing to remove needs no question.
	if a.dryRun || before.Purgeable == 0 && before.Timeless == 0 {
		before.DryRun = a.dryRun
		return a.printResult(before, func(out io.Writer) { writePurge(out, before) })
	}

	action := fmt.Sprintf("remove %s of watcher %s that %s delivered",
		countNoun(before.Purgeable, "envelope"), operator.Watcher, wasWere(before.Purgeable))
	if err := a.confirm(ctx, action); err != nil {
		return err
	}

	bar := a.startProgress("purging", before.Purgeable)
	defer bar.clear()
	want.Progress = bar.setDone
	done, err := operator.Purge(ctx, want)
	bar.clear()

	// The purge counts only the removed envelopes. Add the counts of the dry run to the report.
	for i := range done.Collections {
		for _, b := range before.Collections {
			if b.Collection == done.Collections[i].Collection {
				done.Collections[i].Purgeable = b.Purgeable
				done.Collections[i].Timeless = b.Timeless
			}
		}
	}
	done.Purgeable, done.Timeless = before.Purgeable, before.Timeless

	if err != nil {
		return fmt.Errorf("purging, after %s: %w", countNoun(done.Removed, "removed envelope"), err)
	}
	return a.printResult(done, func(out io.Writer) { writePurge(out, done) })
}

func wasWere(n int64) string {
	if n == 1 {
		return "was"
	}
	return "were"
}

func writePurge(out io.Writer, report admin.PurgeReport) {
	writeTable(out, "COLLECTION\tWRITTEN BEFORE\tHELD BY\tPURGEABLE\tREMOVED", report.Collections, func(collection admin.PurgedCollection) cells {
		cut := "-"
		if collection.Cut != nil {
			cut = collection.Cut.Format(time.RFC3339)
		}
		return cells{collection.Collection, cut, collection.Watcher, formatThousands(collection.Purgeable), formatThousands(collection.Removed)}
	})
	for _, c := range report.Collections {
		if c.Reason != "" {
			fmt.Fprintln(out, sanitizeLine(c.Reason))
		}
	}
	if report.Timeless > 0 {
		fmt.Fprintf(out, "%s without a ts or a time in the id: a purge gives them a ts, and their age counts from there\n",
			countNoun(report.Timeless, "envelope"))
	}

	switch {
	case report.DryRun:
		fmt.Fprintf(out, "%s would be removed; nothing was done\n", countNoun(report.Purgeable, "envelope"))
	case report.Removed == 0:
		fmt.Fprintf(out, "nothing to remove is older than %s\n", time.Duration(report.KeptS*float64(time.Second)))
	default:
		fmt.Fprintf(out, "%s removed in %.1f s\n", countNoun(report.Removed, "envelope"), report.TookS)
	}
}
