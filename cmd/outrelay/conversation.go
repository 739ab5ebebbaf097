package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// runConversation is `outrelay lookup --conversation`.
func runConversation(cmd *cobra.Command, action *operatorCommand, query admin.ConversationQuery) error {
	return action.withOperator(cmd.Context(), func(ctx context.Context, op admin.Operator) error {
		found, err := op.Conversation(ctx, query)
		if err != nil {
			return err
		}
		if err := action.printResult(found, func(out io.Writer) { writeConversation(out, query.ID, found) }); err != nil {
			return err
		}

		// Scripts can test for a conversation by the exit code.
		if len(found.Events) == 0 {
			return reportedError(exitConfig)
		}
		return nil
	})
}

func writeConversation(out io.Writer, id string, found admin.Conversation) {
	if len(found.Events) == 0 {
		fmt.Fprintf(out, "Nothing was found: no event with this id, and no event with the header correlation-id %s that was written since %s.\n",
			quoteArgument(id), formatLocal(&found.Since))
		return
	}

	for i := range found.Events {
		event := &found.Events[i]
		state := event.State
		if event.Reason != "" {
			state += " (" + event.Reason + ")"
		}
		indent := strings.Repeat("  ", event.Depth)
		fmt.Fprintf(out, "%s  %s%s of %s/%s: %s  (%s %s)\n", formatLocal(event.Written), indent, sanitizeLine(event.Type),
			sanitizeLine(event.AggregateType), sanitizeLine(event.AggregateID), sanitizeLine(state),
			sanitizeLine(event.Collection), quoteArgument(event.ID))
		for _, letter := range event.Handlers {
			fmt.Fprintf(out, "%s  %s  handler %s: %s: %s: %s\n", formatLocal(&letter.DiedAt), indent,
				sanitizeLine(admin.NameHandler(letter.Source.Group, letter.Source.Handler)), letter.State(), sanitizeLine(letter.Class), sanitizeLine(letter.Reason))
		}
	}
	if found.Limits != "" {
		fmt.Fprintln(out, "note: "+found.Limits)
	}
	if found.More {
		fmt.Fprintln(out, "there are more; restrict the lookup, or raise --limit")
	}
}
