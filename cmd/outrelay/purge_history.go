package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func newHistoryCommand(p *program) *cobra.Command {
	var q admin.HistoryQuery
	c := &cobra.Command{
		Use:   "history",
		Short: "Show where and when envelopes were delivered",
		Long: `Show the topic, partition, offset and time of delivered envelopes, in the order in which they were
last written. The relay records deliveries only with recording: mark. A record is kept as long as its
envelope (retention, purge.ttl).

With --id, show these envelopes in any state. Without --id, show the envelopes that were last written
between --from and --to, by default in the last hour. A scheduled delivery, a requeue and a replay
write an envelope again. --key restricts the list to one ordering key.`,
		Args: noArgs,
	}

	a := p.addReadFlags(c)
	flags := c.Flags()
	flags.StringArrayVar(&q.IDs, "id", nil, "the `id` of an envelope; may be repeated")
	flags.StringVar(&q.Key, "key", "", "only envelopes with this ordering `key`")
	addTimeFlag(c, &q.From, "from",
		"last written at or after this `time`, such as 2026-11-20T08:00:00Z, or so long ago, such as 2h; default: 1h", parsePastTime)
	addTimeFlag(c, &q.To, "to", "last written before this `time`", parsePastTime)
	flags.StringSliceVar(&q.Collections, "collection", nil,
		"only this `collection`, as database.collection; may be repeated; default: all of the watcher")
	addLimitFlag(c, &q.Limit, admin.DefaultPage, admin.MaxHistoryPage, "maximum number of `envelopes`")
	flags.StringVar(&q.After, "after", "", "the `cursor` that the previous page ended with")
	c.MarkFlagsMutuallyExclusive("id", "key")
	c.MarkFlagsMutuallyExclusive("id", "from")
	c.MarkFlagsMutuallyExclusive("id", "to")
	c.MarkFlagsMutuallyExclusive("id", "after")

	c.RunE = func(c *cobra.Command, _ []string) error {
		// All of the history would be a scan of the whole collection.
		if q.From.IsZero() && len(q.IDs) == 0 {
			q.From = time.Now().Add(-time.Hour)
		}
		if !q.To.IsZero() && !q.To.After(q.From) {
			return fmt.Errorf("--from must be before --to")
		}

		return show(c.Context(), a, func(ctx context.Context, op admin.Operator) (admin.History, error) {
			return op.History(ctx, q)
		}, writeHistory)
	}
	return c
}

func writeHistory(w io.Writer, page admin.History) {
	formatTime := func(t *time.Time) string {
		if t == nil {
			return "-"
		}
		return t.UTC().Format("2006-01-02T15:04:05.000Z")
	}
	const empty = "no recorded delivery matches; deliveries are recorded only with recording: mark, until the purge"
	writeList(w, empty, "COLLECTION\tID\tTYPE\tKEY\tSTATE\tWRITTEN\tSENT\tRECORDS", page.Envelopes, func(e admin.Delivered) cells {
		records := make([]string, len(e.Sent))
		for i, p := range e.Sent {
			records[i] = fmt.Sprintf("%s/%d@%d", p.Topic, p.Partition, p.Offset)
		}
		return cells{
			e.Collection, quoteArgument(e.ID), e.AggregateType + "/" + e.Type, e.Key, e.State, formatTime(e.Written), formatTime(e.SentAt),
			strings.Join(records, " "),
		}
	})
	if page.Next != "" {
		fmt.Fprintf(w, "there may be more: --after %q\n", page.Next)
	}
}
