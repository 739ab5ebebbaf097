package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/config"
)

func newPurgeCommand(p *program) *cobra.Command {
	var (
		olderThan string
		want      admin.Purge
	)
	c := &cobra.Command{
		Use:   "purge",
		Short: "Remove delivered envelopes now, instead of waiting for the watcher to do it",
		Long: `Remove envelopes that were delivered and are older than --older-than, by default the configured retention. The age counts
from the time of writing to the position of the watcher, so a watcher that is behind, paused or stopped keeps what it has
not delivered. Whatever the age, the last minutes stay, because a transaction may still commit into them; so do scheduled
envelopes and exceptions, and all of a collection whose lost history is being swept.

--dry-run counts, and says up to when each collection can be purged and which watcher document holds it there.`,
		Args: cobra.NoArgs,
	}
	a := p.addChangeFlags(c)
	c.Flags().StringSliceVar(&want.Collections, "collection", nil, "only this `collection`, as database.collection; may be repeated; default: all of the watcher")
	c.Flags().StringVar(&olderThan, "older-than", "", "remove what is older than this `duration`, such as 90m or 7d; default: retention")
	c.Flags().IntVar(&want.Rate, "rate", 0, "`envelopes` a second at the most; default: purge.rate; below 0 for no limit")
	c.RunE = func(c *cobra.Command, _ []string) error {
		cfg, _, err := p.loadConfig()
		if err != nil {
			return err
		}
		if want.OlderThan, err = parsePurgeAge(olderThan, cfg.Retention); err != nil {
			return err
		}
		want.Batch = cfg.Purge.Batch
		switch {
		case !c.Flags().Changed("rate"):
			want.Rate = cfg.Purge.Rate
		case want.Rate < 0:
			want.Rate = 0
		case want.Rate == 0:
			return fmt.Errorf("--rate 0 would remove nothing; say -1 for no limit")
		}
		return a.withOperator(c.Context(), func(ctx context.Context, o admin.Operator) error { return a.runPurge(ctx, o, want) })
	}
	return c
}

// parsePurgeAge is what --older-than says, or the retention.
func parsePurgeAge(text string, retention time.Duration) (time.Duration, error) {
	if text == "" {
		if retention == 0 {
			return 0, fmt.Errorf("retention is 0, which keeps envelopes for ever; say with --older-than what may go")
		}
		return retention, nil
	}
	d, err := config.ParseDuration(text)
	if err != nil || d < 0 {
		return 0, fmt.Errorf("--older-than %q is not a duration such as 90m, 24h or 7d", text)
	}
	return d, nil
}

// runPurge counts, asks, and removes.
func (a *operatorCommand) runPurge(ctx context.Context, o admin.Operator, want admin.Purge) error {
	look := want
	look.DryRun = true
	before, err := o.Purge(ctx, look)
	if err != nil {
		return err
	}
	if a.dryRun || before.Purgeable == 0 {
		before.DryRun = a.dryRun
		return a.printResult(before, func(w io.Writer) error { return printPurge(w, before) })
	}
	what := fmt.Sprintf("remove %s of watcher %s that %s delivered", countNoun(before.Purgeable, "envelope"), o.Watcher, wasWere(before.Purgeable))
	if err := a.confirm(ctx, what); err != nil {
		return err
	}
	bar := a.startProgress("purging", before.Purgeable)
	defer bar.clear()
	want.Progress = bar.setDone
	done, err := o.Purge(ctx, want)
	bar.clear()
	for i := range done.Collections {
		for _, b := range before.Collections {
			if b.Collection == done.Collections[i].Collection {
				done.Collections[i].Purgeable = b.Purgeable
			}
		}
	}
	done.Purgeable = before.Purgeable
	if err != nil {
		return fmt.Errorf("after %s: %w", countNoun(done.Removed, "removed envelope"), err)
	}
	return a.printResult(done, func(w io.Writer) error { return printPurge(w, done) })
}

func wasWere(n int64) string {
	if n == 1 {
		return "was"
	}
	return "were"
}

func printPurge(w io.Writer, r admin.PurgeReport) error {
	head := "COLLECTION\tWRITTEN BEFORE\tHELD BY\tPURGEABLE\tREMOVED"
	err := writeTable(w, head, func(row func(...any)) {
		for _, c := range r.Collections {
			cut := "-"
			if c.Cut != nil {
				cut = c.Cut.Format(time.RFC3339)
			}
			row(c.Collection, cut, c.Watcher, formatThousands(c.Purgeable), formatThousands(c.Removed))
		}
	})
	for _, c := range r.Collections {
		if c.Reason != "" {
			fmt.Fprintln(w, sanitizeLine(c.Reason))
		}
	}
	switch {
	case err != nil:
	case r.DryRun:
		_, err = fmt.Fprintf(w, "%s would be removed; nothing was done\n", countNoun(r.Purgeable, "envelope"))
	case r.Removed == 0:
		_, err = fmt.Fprintf(w, "there is nothing to remove that is older than %s\n", time.Duration(r.KeptS*float64(time.Second)))
	default:
		_, err = fmt.Fprintf(w, "%s removed in %.1f s\n", countNoun(r.Removed, "envelope"), r.Seconds)
	}
	return err
}
