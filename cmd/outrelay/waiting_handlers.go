package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// addHandlerWaitingFlags adds the flag --source and the selection of messages that handlers retry. source gets its default value.
func addHandlerWaitingFlags(cmd *cobra.Command, source *string, defaultSource string) *admin.HandlerWaitingFilter {
	filter := &admin.HandlerWaitingFilter{}
	flags := cmd.Flags()
	flags.StringVar(source, "source", defaultSource, "`kind` of the waiting: relay (envelopes) or handler (messages)")
	flags.StringVar(&filter.Topic, "topic", "", "only for this `topic`")
	flags.StringVar(&filter.Key, "key", "", "only with this ordering `key`")
	flags.StringVar(&filter.Database, "database", "", "with --source handler: only in this `database` of a service")
	flags.StringVar(&filter.Group, "group", "", "with --source handler: only of this consumer `group`")
	flags.StringVar(&filter.Handler, "handler", "", "with --source handler: only of the handler with this `name`")
	flags.StringVar(&filter.Reason, "message", "", "with --source handler: only if a failure begins with exactly this `text`")
	return filter
}

// checkSource reports whether the command is about messages of handlers. It returns an error if a flag does not belong to the source.
// relayOnly are the flags that select envelopes of the relay.
func checkSource(cmd *cobra.Command, source string, filter *admin.HandlerWaitingFilter, relayOnly ...string) (isHandler bool, err error) {
	switch source {
	case admin.FromHandler:
		for _, name := range relayOnly {
			if cmd.Flags().Changed(name) {
				return true, fmt.Errorf("--%s selects envelopes of the relay; remove it, or remove --source handler", name)
			}
		}
		return true, nil
	case admin.FromRelay:
	default:
		return false, fmt.Errorf("--source: found %q; expected relay or handler", source)
	}

	for name, value := range map[string]string{
		"database": filter.Database, "group": filter.Group, "handler": filter.Handler, "message": filter.Reason,
	} {
		if value != "" {
			return false, fmt.Errorf("--%s selects messages of handlers; add --source handler", name)
		}
	}
	return false, nil
}

var handlerWaitingGroups = listing[admin.HandlerWaitingGroup]{
	name: "groups", empty: noHandlerMessage, ofServices: true, head: "COUNT\tFAILED\tGROUP\tHANDLER\tTOPIC\tDATABASE\tFIRST FAILURE\tNEXT",
	cells: func(group admin.HandlerWaitingGroup) cells {
		return cells{
			formatThousands(group.Count), formatThousands(group.Failed), group.Group, group.Handler, group.Topic, group.Database,
			formatLocal(group.FailedAt), formatNext(group.NextAt),
		}
	},
}

const noHandlerMessage = "no message of a handler waits"

var handlerListing = listing[admin.HandlerMessage]{
	noun: "message", empty: noHandlerMessage, ofServices: true, head: "GROUP\tHANDLER\tKEY\tPLACE\tID\tTYPE\tATTEMPTS\tNEXT\tREASON",
	cells: func(message admin.HandlerMessage) cells {
		return cells{
			message.Group, message.Handler, truncate(message.Key, 40), quoteArgument(message.Place), quoteArgument(message.ID), message.Type,
			message.Attempts, describeNext(message), truncate(message.Reason, 100),
		}
	},
}

// describeNext describes what happens next with a message that a handler retries.
func describeNext(message admin.HandlerMessage) string {
	switch {
	case message.DiscardedBy != "":
		return "is given up"
	case message.RequestedAt != nil:
		return "now"
	case message.NextAt == nil:
		return "after its key"
	case time.Until(*message.NextAt) > 12*time.Hour:
		return formatLocal(message.NextAt)
	}
	return formatNext(message.NextAt)
}

// handlerAction is a command that acts on messages that handlers retry.
type handlerAction struct {
	action *operatorCommand
	filter *admin.HandlerWaitingFilter
	source string
	other  string // the command for envelopes of the relay
}

// newHandlerAction adds the flags of an action on messages that handlers retry.
func (p *program) newHandlerAction(cmd *cobra.Command, other string) *handlerAction {
	a := &handlerAction{action: p.addChangeFlags(cmd), other: other}
	a.filter = addHandlerWaitingFlags(cmd, &a.source, admin.FromHandler)
	cmd.Flags().BoolVar(&a.filter.All, "all", false, "all messages; required without another condition")
	return a
}

// checkSelection returns an error for another source, or without a selection.
func (a *handlerAction) checkSelection(cmd *cobra.Command, ids []string) error {
	a.filter.IDs = toFilterIDs(ids)
	if a.source == admin.FromRelay {
		return fmt.Errorf("%s acts on messages of handlers; %s", cmd.CommandPath(), a.other)
	}
	if _, err := checkSource(cmd, a.source, a.filter); err != nil {
		return err
	}
	if a.filter.Empty() && !a.filter.All {
		return errors.New("no messages selected; pass ids, places or a condition such as --handler, or --all; outrelay waiting list --source handler lists them")
	}
	return nil
}

// noMessage states why an action on messages of handlers did nothing with an id.
const noMessage = "matches no message that waits; outrelay waiting list --source handler lists the messages"

func newWaitingRetryCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "retry [ID...]",
		Short: "Let handlers try messages now that wait for a retry",
		Long: `Let handlers try the matching messages now. An ID is the id of a message, or its place as
TOPIC/PARTITION@OFFSET. Attempts count as before. The member of the group that has the partition
tries the message within two seconds; without a running member, the message waits for one. Messages
that follow an earlier message of their key are tried after it.`,
	}

	a := program.newHandlerAction(cmd, "outrelay failed retry retries envelopes")
	a.action.setRun(cmd, func(ctx context.Context, op admin.Operator, ids []string) error {
		if err := a.checkSelection(cmd, ids); err != nil {
			return err
		}
		got, err := actConfirmed(ctx, a.action, func(dryRun bool) (admin.HandlerRetried, error) {
			return op.HandlerWaiting().Retry(ctx, *a.filter, admin.Effect(dryRun))
		}, func(found admin.HandlerRetried) string {
			if found.Retried == 0 {
				return ""
			}
			return "retry " + countNoun(found.Retried, "message") + " now"
		})
		if err != nil {
			return err
		}

		got.DryRun = a.action.dryRun
		if got.Matched == 0 {
			return a.action.printNamed(got, nil, nothingMatches, noMessage, got.NotFound)
		}
		text := a.action.chooseText("requested a retry of ", "would request a retry of ") + countNoun(got.Retried, "message")
		if rest := got.Matched - got.Retried; rest > 0 {
			text += "; " + countNoun(rest, "message") + " follow an earlier message of the key"
		}
		return a.action.printNamed(got, nil, text, noMessage, got.NotFound)
	})
	return cmd
}

func newWaitingDiscardCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "discard [ID...]",
		Short: "Make messages that handlers retry dead letters, without another attempt",
		Long: `Make the matching messages dead letters of class skipped, without another attempt. An ID is the id of
a message, or its place as TOPIC/PARTITION@OFFSET. Later messages of their keys are tried then. A
running member of the group does it within two seconds, also for a handler that is gone. The dead
letters can be requeued: see outrelay dead --source handler.`,
	}

	a := program.newHandlerAction(cmd, "outrelay dead discard removes dead letters of the relay")
	a.action.setRun(cmd, func(ctx context.Context, op admin.Operator, ids []string) error {
		if err := a.checkSelection(cmd, ids); err != nil {
			return err
		}
		got, err := actConfirmed(ctx, a.action, func(dryRun bool) (admin.HandlerDiscarded, error) {
			return op.HandlerWaiting().Discard(ctx, *a.filter, admin.Effect(dryRun))
		}, func(found admin.HandlerDiscarded) string {
			if found.Matched == 0 {
				return ""
			}
			return "make " + countNoun(found.Matched, "message") + " dead letters"
		})
		if err != nil {
			return err
		}

		got.DryRun = a.action.dryRun
		text := nothingMatches
		if got.Matched > 0 {
			text = a.action.chooseText(
				countNoun(got.Discarded, "message")+" discarded; a member of the group makes each a dead letter",
				countNoun(got.Matched, "message")+" would be discarded")
		}
		return a.action.printNamed(got, nil, text, noMessage, got.NotFound)
	})
	return cmd
}
