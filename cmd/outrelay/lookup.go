package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func newLookupCommand(program *program) *cobra.Command {
	query := &admin.LookupQuery{}
	conversation := ""
	cmd := &cobra.Command{
		Use:   "lookup ID|KEY",
		Short: "Show the whole life of an event, or of the events of an ordering key",
		Long: `Look up an event by its id or, if no event has the id, the events of the ordering key. The output is
the life of each event in the order of time: appended, due, sent with the place in Kafka, failed
attempts, why it waits, dead letters of the relay and of handlers, requeues, messages that handlers
retry, and the marks of handlers. For a key, waiting events and dead letters are always found, other
events only between --from and --to. Handlers are found in the databases of the outboxes and of
consumers.databases. With --conversation, the output is the events that follow from one event, as a
tree. The exit code is 1 if nothing is found.`,
		Example: `  outrelay lookup 0190b3c2-7a1d-7c55-9d3e-2f1f6c1c8f10
  outrelay lookup customer-17 --from 6h
  outrelay lookup --conversation 0190b3c2-7a1d-7c55-9d3e-2f1f6c1c8f10`,
		Args: maxArgs(1),
	}

	action := program.addReadFlags(cmd)
	cmd.Flags().StringVar(&query.Key, "key", "", "only an ordering `key`, also if it is the id of an event")
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
			return errors.New("outrelay lookup needs one argument: the id of an event, an ordering key, or --conversation with the id of the first event")
		}
		if len(args) == 1 {
			query.Text = args[0]
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
			if len(found.Envelopes) == 0 {
				return reportedError(exitConfig)
			}
			return nil
		})
	}
	return cmd
}

func writeFound(out io.Writer, result admin.LookupResult) {
	if len(result.Envelopes) == 0 {
		fmt.Fprintln(out, result.DescribeMissing())
		return
	}

	for i := range result.Envelopes {
		writeFoundEnvelope(out, &result.Envelopes[i])
	}
	if result.Pause != "" {
		fmt.Fprintln(out, "note: "+sanitizeLine(result.Pause))
	}
	if result.Limits != "" {
		fmt.Fprintln(out, "note: "+result.Limits)
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
	fmt.Fprintf(out, "%s %s: %s\n", sanitizeLine(cmp.Or(envelope.Collection, "-")), quoteArgument(envelope.ID), sanitizeLine(state))

	printField := func(name, format string, args ...any) {
		fmt.Fprintf(out, "  %-12s %s\n", name, sanitizeLine(fmt.Sprintf(format, args...)))
	}
	printField("type", "%s", describeType(envelope))
	printField("key", "%s", envelope.Key)
	if conversation := envelope.ConversationID(); conversation != "" {
		printField("conversation", "%s", quoteArgument(conversation))
	}
	if len(envelope.Waits) > 0 {
		printField("waits for", "%s, %s", strings.Join(envelope.Waits, ", "), countNoun(int64(envelope.Attempts), "attempt"))
	}
	if envelope.NextAt != nil {
		printField("next attempt", "%s", formatLocal(envelope.NextAt))
	}
	for _, s := range envelope.Sent {
		printField("in Kafka", "%s/%d@%d", s.Topic, s.Partition, s.Offset)
	}
	for _, h := range envelope.Handlers {
		printField("handler", "%s: %s", h.Name(), h.State)
	}

	for _, m := range envelope.Timeline {
		text := m.What
		if m.Text != "" {
			text += ": " + m.Text
		}
		if m.Letter != "" {
			text += " [" + m.Letter + "]"
		}
		if m.Node != "" {
			text += " (" + m.Node + ")"
		}
		fmt.Fprintf(out, "  %s  %s\n", formatLocal(&m.At), sanitizeLine(text))
	}
}

// describeType returns the type with the aggregate, as far as they are known: an event that no outbox has any more has no aggregate.
func describeType(envelope *admin.FoundEnvelope) string {
	aggregate := strings.Trim(envelope.AggregateType+"/"+envelope.AggregateID, "/")
	if aggregate == "" {
		return envelope.Type
	}
	return envelope.Type + " of " + aggregate
}
