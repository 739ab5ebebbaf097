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

func newHistoryCommand(p *program) *cobra.Command {
	var (
		q        admin.HistoryQuery
		from, to string
	)
	c := &cobra.Command{
		Use:   "history",
		Short: "Show where envelopes were delivered to, and when",
		Long: `Show topic, partition, offset and time of delivered envelopes, in the order in which they were written. Deliveries are
written down with recording: mark only, and for as long as the envelopes are kept (retention, purge.ttl).

With --id, show those envelopes whatever their state. Otherwise a window of the time of writing, by default the last hour,
that --key narrows to one ordering key.`,
		Args: cobra.NoArgs,
	}
	a := p.addReadFlags(c)
	c.Flags().StringSliceVar(&q.IDs, "id", nil, "the `id` of an envelope; may be repeated")
	c.Flags().StringVar(&q.Key, "key", "", "only of this ordering `key`")
	c.Flags().StringVar(&from, "from", "", "written at or after this `time`, as 2026-11-20T08:00:00Z, or 2h for so long ago; default: 1h")
	c.Flags().StringVar(&to, "to", "", "written before this `time`")
	c.Flags().StringSliceVar(&q.Collections, "collection", nil, "only of this `collection`, as database.collection; may be repeated; default: all of the watcher")
	c.Flags().IntVar(&q.Limit, "limit", 100, "at most this many `envelopes`; between 1 and 10000")
	c.Flags().StringVar(&q.After, "after", "", "go on at this `place`, which the page before told")
	c.MarkFlagsMutuallyExclusive("id", "key")
	c.MarkFlagsMutuallyExclusive("id", "from")
	c.MarkFlagsMutuallyExclusive("id", "to")
	c.MarkFlagsMutuallyExclusive("id", "after")
	c.RunE = func(c *cobra.Command, _ []string) (err error) {
		if q.Limit < 1 || q.Limit > 10_000 {
			return fmt.Errorf("--limit %d is not between 1 and 10000", q.Limit)
		}
		now := time.Now()
		if from == "" && len(q.IDs) == 0 {
			from = "1h"
		}
		if q.From, err = parsePastTime("from", from, now); err != nil {
			return err
		}
		if q.To, err = parsePastTime("to", to, now); err != nil {
			return err
		}
		if !q.To.IsZero() && !q.To.After(q.From) {
			return fmt.Errorf("--to is not after --from, so there is nothing between them")
		}
		return a.withOperatorBriefly(c.Context(), func(ctx context.Context, o admin.Operator) error {
			page, err := o.History(ctx, q)
			if err != nil {
				return err
			}
			return a.printResult(page, func(w io.Writer) error { return printHistory(w, page) })
		})
	}
	return c
}

func printHistory(w io.Writer, page admin.History) error {
	if len(page.Envelopes) == 0 {
		_, err := fmt.Fprintln(w, "no delivery is written down for that; only recording: mark writes them, and purged envelopes are gone")
		return err
	}
	when := func(t *time.Time) string {
		if t == nil {
			return "-"
		}
		return t.UTC().Format("2006-01-02T15:04:05.000Z")
	}
	err := writeTable(w, "COLLECTION\tID\tTYPE\tKEY\tSTATE\tWRITTEN\tSENT\tRECORDS", func(row func(...any)) {
		for _, e := range page.Envelopes {
			records := make([]string, len(e.Sent))
			for i, p := range e.Sent {
				records[i] = fmt.Sprintf("%s/%d@%d", p.Topic, p.Partition, p.Offset)
			}
			row(e.Collection, e.ID, e.AggregateType+"/"+e.Type, e.Key, e.State, when(e.Written), when(e.SentAt), strings.Join(records, " "))
		}
	})
	if err == nil && page.Next != "" {
		_, err = fmt.Fprintf(w, "there may be more: --after %q\n", page.Next)
	}
	return err
}
