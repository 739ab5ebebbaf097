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

func newHistoryCommand(program *program) *cobra.Command {
	var query admin.HistoryQuery
	cmd := &cobra.Command{
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

	action := program.addReadFlags(cmd)
	flags := cmd.Flags()
	flags.StringArrayVar(&query.IDs, "id", nil, "the `id` of an envelope; may be repeated")
	flags.StringVar(&query.Key, "key", "", "only envelopes with this ordering `key`")
	addTimeFlag(cmd, &query.From, "from",
		"last written at or after this `time`, such as 2026-11-20T08:00:00Z, or so long ago, such as 2h; default: 1h", parsePastTime)
	addTimeFlag(cmd, &query.To, "to", "last written before this `time`", parsePastTime)
	flags.StringSliceVar(&query.Collections, "collection", nil,
		"only this `collection`, as database.collection; may be repeated; default: all of the watcher")
	addLimitFlag(cmd, &query.Limit, admin.DefaultPage, admin.MaxHistoryPage, "maximum number of `envelopes`")
	flags.StringVar(&query.After, "after", "", "the `cursor` that the previous page ended with")
	cmd.MarkFlagsMutuallyExclusive("id", "key")
	cmd.MarkFlagsMutuallyExclusive("id", "from")
	cmd.MarkFlagsMutuallyExclusive("id", "to")
	cmd.MarkFlagsMutuallyExclusive("id", "after")

	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		// All of the history would be a scan of the whole collection.
		if query.From.IsZero() && len(query.IDs) == 0 {
			query.From = time.Now().Add(-time.Hour)
		}
		if !query.To.IsZero() && !query.To.After(query.From) {
			return fmt.Errorf("--from must be before --to")
		}

		return show(cmd.Context(), action, func(ctx context.Context, op admin.Operator) (admin.History, error) {
			return op.History(ctx, query)
		}, writeHistory)
	}
	return cmd
}

func writeHistory(out io.Writer, page admin.History) {
	formatTime := func(moment *time.Time) string {
		if moment == nil {
			return "-"
		}
		return moment.UTC().Format("2006-01-02T15:04:05.000Z")
	}
	const empty = "no recorded delivery matches; deliveries are recorded only with recording: mark, until the purge"
	writeList(out, empty, "COLLECTION\tID\tTYPE\tKEY\tSTATE\tWRITTEN\tSENT\tRECORDS", page.Items, func(delivered admin.Delivered) cells {
		records := make([]string, len(delivered.Sent))
		for i, p := range delivered.Sent {
			records[i] = fmt.Sprintf("%s/%d@%d", p.Topic, p.Partition, p.Offset)
		}
		return cells{
			delivered.Collection, quoteArgument(delivered.ID), delivered.AggregateType + "/" + delivered.Type, delivered.Key, delivered.State, formatTime(delivered.Written), formatTime(delivered.SentAt),
			strings.Join(records, " "),
		}
	})
	if page.Next != "" {
		fmt.Fprintf(out, "there may be more: --after %q\n", page.Next)
	}
}
