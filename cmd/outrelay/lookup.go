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

func newLookupCommand(program *program) *cobra.Command {
	query := &admin.LookupQuery{}
	conversation := ""
	cmd := &cobra.Command{
		Use:   "lookup [ID]",
		Short: "Show the state and history of an event, or of the events of an ordering key",
		Long: `Look up an event by its id, or the events of an ordering key. The output shows the envelope if it is
still in its outbox, why it waits, its attempts, its dead letters and their outcome. With recording:
mark, it also shows the offset in Kafka. For a key, waiting envelopes and dead letters are always
found, other envelopes only between --from and --to. With --conversation, the output is the events that
follow from one event, as a tree. The exit code is 1 if nothing is found.`,
		Example: `  outrelay lookup 0190b3c2-7a1d-7c55-9d3e-2f1f6c1c8f10
  outrelay lookup --key customer-17 --from 6h
  outrelay lookup --conversation 0190b3c2-7a1d-7c55-9d3e-2f1f6c1c8f10`,
		Args: maxArgs(1),
	}

	action := program.addReadFlags(cmd)
	cmd.Flags().StringVar(&query.Key, "key", "", "the ordering `key`, instead of an id")
	cmd.Flags().StringVar(&conversation, "conversation", "", "the correlation `id` of the events of a conversation, instead of an id")
	addCollectionFlag(cmd, &query.Collection)
	addTimeFlag(cmd, &query.From, "from",
		"with --key: written at or after this `time`, or at most so long ago, such as 2h; default: 1h; with --conversation: 24h", parsePastTime)
	addTimeFlag(cmd, &query.To, "to", "with --key: written before this `time`, or at least so long ago, such as 2h", parsePastTime)
	addLimitFlag(cmd, &query.Limit, admin.DefaultPage, admin.MaxPage, "with --key: maximum number of envelopes, and of dead letters")

	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if conversation != "" && len(args) == 0 && query.Key == "" {
			return runConversation(cmd, action, admin.ConversationQuery{
				ID: conversation, Collection: query.Collection, From: query.From, To: query.To, Limit: query.Limit,
			})
		}
		if (len(args) == 1) == (query.Key != "") || conversation != "" {
			return fmt.Errorf("lookup needs one of the id of an event, --key and --conversation")
		}
		if len(args) == 1 {
			query.ID = args[0]
		}

		return action.withOperator(cmd.Context(), func(ctx context.Context, op admin.Operator) error {
			found, err := op.Lookup(ctx, *query)
			if err != nil {
				return err
			}
			if err := action.printResult(found, func(out io.Writer) { writeFound(out, found) }); err != nil {
				return err
			}

			// Scripts can test for an event by the exit code.
			if len(found.Envelopes)+len(found.Letters) == 0 {
				return reportedError(exitConfig)
			}
			return nil
		})
	}
	return cmd
}

func writeFound(out io.Writer, result admin.LookupResult) {
	if len(result.Envelopes)+len(result.Letters) == 0 {
		fmt.Fprintln(out, "not found: no such event was appended, or it was delivered and removed after its retention")
		return
	}

	shown := map[string]bool{}
	for i := range result.Envelopes {
		envelope := &result.Envelopes[i]
		writeFoundEnvelope(out, envelope)
		for _, t := range envelope.Timeline {
			shown[t.Letter] = true
		}
	}

	// The timeline of an envelope includes its dead letters. The others are of events that are not in the outbox.
	for i := range result.Letters {
		letter := &result.Letters[i]
		if shown[letter.Letter] {
			continue
		}
		fmt.Fprintf(out, "%s %s is dead since %s: %s: %s (%s)\n", sanitizeLine(letter.Collection), quoteArgument(letter.ID),
			formatLocal(&letter.DiedAt), sanitizeLine(letter.Class), sanitizeLine(letter.Reason), letter.Letter)
	}

	if result.More {
		fmt.Fprintln(out, "there are more; restrict the lookup, or raise --limit")
	}
}

func writeFoundEnvelope(out io.Writer, envelope *admin.FoundEnvelope) {
	state := envelope.State
	if envelope.Reason != "" {
		state += " (" + envelope.Reason + ")"
	}
	fmt.Fprintf(out, "%s %s: %s\n", sanitizeLine(envelope.Collection), quoteArgument(envelope.ID), sanitizeLine(state))

	printField := func(name, format string, args ...any) {
		fmt.Fprintf(out, "  %-12s %s\n", name, sanitizeLine(fmt.Sprintf(format, args...)))
	}
	printField("type", "%s of %s/%s", envelope.Type, envelope.AggregateType, envelope.AggregateID)
	printField("key", "%s", envelope.Key)
	if len(envelope.Waits) > 0 {
		printField("waits for", "%s, %s", strings.Join(envelope.Waits, ", "), countNoun(int64(envelope.Attempts), "attempt"))
	}
	if envelope.NextAt != nil {
		printField("next attempt", "%s", formatLocal(envelope.NextAt))
	}
	for _, s := range envelope.Sent {
		printField("in Kafka", "topic %s, partition %d, offset %d", s.Topic, s.Partition, s.Offset)
	}

	for _, m := range envelope.Timeline {
		text := m.What
		if m.Text != "" {
			text += ": " + m.Text
		}
		if m.Node != "" {
			text += " (" + m.Node + ")"
		}
		fmt.Fprintf(out, "  %s  %s\n", formatLocal(&m.At), sanitizeLine(text))
	}
}

func newPingCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ping",
		Short: "Measure how fast MongoDB answers; exit with 75 if it does not",
		Args:  noArgs,
	}

	action := program.addReadFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return show(cmd.Context(), action, func(ctx context.Context, op admin.Operator) (admin.Pong, error) { return op.Ping(ctx) }, writePong)
	}
	return cmd
}

func writePong(out io.Writer, pong admin.Pong) {
	state := noWatcher
	if pong.Storage {
		state = "the state database exists"
	}
	fmt.Fprintf(out, "MongoDB answers in %.1f ms; its clock is %s; %s\n", pong.RoundTrip*1000, pong.Now.Format(time.RFC3339Nano), state)
}
