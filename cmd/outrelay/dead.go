package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func newDeadCommand(program *program) *cobra.Command {
	return newGroup(&cobra.Command{
		Use:   "dead",
		Short: "List dead letters, and requeue, edit or discard them",
		Long: `An envelope becomes a dead letter if it cannot be sent without a change, or if it has used up its
attempts. The relay copies it, with the reason, into the collection outrelay_letters of the state database.
It stays there until an operator discards it, or until dead_letters.expire has passed. A discarded
dead letter stays in the archive for dead_letters.archive (default 30d): --archived selects those.

Each dead letter has its own id, such as dead-01h3…, which list and show print. Commands take it
as well as the id of the envelope, of which there may be several dead letters.

The messages that handlers of consumers gave up are dead letters as well. They are in the databases
of services, in the collections of dead_letters.handlers. A requeue hands a message back to its
handler through MongoDB. Other handlers and groups do not get it again. The commands act on the
letters of both; --source relay or --source handler restricts them.`,
	}, newDeadListCommand(program), newDeadSummaryCommand(program), newDeadShowCommand(program), newDeadRequeueCommand(program),
		newDeadEditCommand(program), newDeadDiscardCommand(program))
}

// deadFilter holds the flags that select dead letters.
type deadFilter struct{ admin.DeadFilter }

// addDeadFilterFlags adds the flags that select dead letters.
func addDeadFilterFlags(cmd *cobra.Command) *deadFilter {
	filter := &deadFilter{}
	addCollectionFlag(cmd, &filter.Collection)

	addTimeFlag(cmd, &filter.From, "since", "died at or after this `time`, or at most so long ago, such as 2h", parsePastTime)
	addTimeFlag(cmd, &filter.To, "until", "died before this `time`, or at least so long ago, such as 2h", parsePastTime)
	flags := cmd.Flags()
	flags.StringVar(&filter.Topic, "topic", "", "only for this `topic`")
	flags.StringVar(&filter.Type, "type", "", "only with this event `type`")
	flags.StringVar(&filter.AggregateType, "aggregate-type", "", "only with this aggregate `type`")
	flags.StringVar(&filter.Key, "key", "", "only with this ordering `key`")
	flags.StringVar(&filter.Class, "class", "", "only with this error `class`: "+strings.Join(admin.Classes(), ", ")+
		"; of handlers: "+strings.Join(admin.HandlerClasses(), ", "))
	flags.StringVar(&filter.Message, "message", "", "only if the reason begins with exactly this `text`")
	flags.StringVar(&filter.Fingerprint, "fingerprint", "", "only of the group with this `fingerprint`, as dead summary lists it")
	addSourceFlags(cmd, &filter.Source, &filter.Group, &filter.Handler)
	flags.BoolVar(&filter.Archived, "archived", false, "the discarded dead letters in the archive, in place of the others")
	return filter
}

// addAllFlag adds --all, for commands that change dead letters.
func (f *deadFilter) addAllFlag(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&f.All, "all", false, "all dead letters; required without another condition")
}

// addSourceFlags adds the flags that select letters by who gave up.
func addSourceFlags(cmd *cobra.Command, source, group, handler *string) {
	flags := cmd.Flags()
	flags.StringVar(source, "source", "", "who gave up: relay, or handler of a consumer; default: either")
	flags.StringVar(group, "group", "", "only of handlers of this consumer `group`")
	flags.StringVar(handler, "handler", "", "only of the handler with this `name`")
}

// addToFlag adds the flag that names the handlers that get requeued messages.
func addToFlag(cmd *cobra.Command, options *admin.DeadOptions) {
	cmd.Flags().StringSliceVar(&options.Handlers, "to", nil,
		"of letters of handlers: the `handlers` of the group that get the messages; default: the handler that gave up")
}

// addStateFlag adds the flag that selects letters by whether they were requeued.
func (f *deadFilter) addStateFlag(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.RequeueStatus, "requeued", "any", "any, false or true: letters by whether they were requeued")
}

func newDeadListCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list [ID...]",
		Short: "List dead letters, the latest first, without their payloads",
	}

	action, filter := program.addReadFlags(cmd), addDeadFilterFlags(cmd)
	filter.addStateFlag(cmd)
	paging := addPagingFlags(cmd, admin.DefaultPage, admin.MaxPage, "dead letters")

	action.setRun(cmd, func(ctx context.Context, op admin.Operator, ids []string) error {
		filter.IDs = toFilterIDs(ids)
		page, err := op.Letters().List(ctx, filter.DeadFilter, paging.limit, paging.after)
		if err != nil {
			return err
		}
		return deadListing(filter.Archived).show(ctx, action, op, page)
	})
	return cmd
}

// deadListing is the output of a list of letters. Those in the archive have two columns more.
func deadListing(archived bool) listing[admin.DeadLetter] {
	head := "DIED\tGIVEN UP BY\tLETTER\tID\tDELIVERY\tTYPE\tKEY\tTOPIC\tCLASS\tREQUEUED\tREASON"
	if archived {
		head += "\tDISCARDED BY\tREMOVED AT"
	}
	return listing[admin.DeadLetter]{noun: "dead letter", empty: "no dead letter matches", ofServices: true, head: head, cells: func(letter admin.DeadLetter) cells {
		row := cells{
			formatLocal(&letter.DiedAt), giverUp(letter), cmp.Or(letter.Letter, letter.Place), quoteArgument(letter.ID), letter.Delivery, letter.Type,
			truncate(letter.Key, 40), letter.Topic, letter.Class, requeueState(letter), truncate(letter.Reason, 100),
		}
		if letter.Archived != nil {
			row = append(row, letter.Archived.Actor, formatLocal(&letter.Archived.Until))
		}
		return row
	}}
}

// giverUp returns who gave up the event of a letter: the relay, or the handler and its group.
func giverUp(letter admin.DeadLetter) string {
	switch {
	case letter.Source.Kind == admin.FromHandler && letter.Source.Handler == "":
		return "group " + letter.Source.Group + ", without a handler"
	case letter.Source.Kind == admin.FromHandler:
		return "handler " + admin.NameHandler(letter.Source.Group, letter.Source.Handler)
	}
	return admin.FromRelay
}

// requeueState describes whether a letter was requeued, and whether a handler has finished its message since.
func requeueState(letter admin.DeadLetter) string {
	switch {
	case letter.Requeued == nil:
		return "no"
	case letter.Source.Kind != admin.FromHandler:
		return fmt.Sprintf("as %d", letter.Requeued.Delivery)
	case letter.Waiting:
		return "waiting"
	default:
		return "done"
	}
}

// truncate shortens text to n characters for a table.
func truncate(text string, n int) string {
	if runes := []rune(text); len(runes) > n {
		return string(runes[:n-1]) + "…"
	}
	return text
}

func newDeadSummaryCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "summary [ID...]",
		Short: "Group dead letters by their failure: who gave up, topic, type, class and message",
		Long: `Group dead letters by their failure: who gave up, topic, type, class, and the message without numbers,
ids and quoted texts. The fingerprint of a group selects its letters in the other commands, such as
outrelay dead requeue --fingerprint 5f0c….`,
	}

	action, filter := program.addReadFlags(cmd), addDeadFilterFlags(cmd)
	// Grouping reads all letters that match.
	action.limit = 0
	filter.addStateFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, ids []string) error {
		filter.IDs = toFilterIDs(ids)
		groups := listing[admin.DeadGroup]{
			name: "groups", empty: "no dead letter matches", ofServices: true, head: "FINGERPRINT\tCOUNT\tNOT REQUEUED\tGIVEN UP BY\tTOPIC\tTYPE\tCLASS\tFIRST\tLAST\tFAILURE",
			cells: func(group admin.DeadGroup) cells {
				return cells{
					group.Fingerprint, formatThousands(group.Count), formatThousands(group.NotRequeued), groupGiverUp(group), group.Topic, group.Type,
					group.Class, formatLocal(&group.First), formatLocal(&group.Last), truncate(group.Failure, 100),
				}
			},
		}
		return showList(cmd.Context(), action, groups, func(ctx context.Context, op admin.Operator) ([]admin.DeadGroup, error) {
			return op.Letters().Summary(ctx, filter.DeadFilter)
		})
	}
	return cmd
}

// groupGiverUp is giverUp for a group.
func groupGiverUp(group admin.DeadGroup) string {
	return giverUp(admin.DeadLetter{Source: admin.DeadSource{Kind: group.Source, Group: group.ConsumerGroup, Handler: group.Handler}})
}

// addDeadRefFlags adds the flags that, together with an id, select one dead letter.
func addDeadRefFlags(cmd *cobra.Command) *admin.DeadRef {
	ref := &admin.DeadRef{}
	cmd.Flags().StringVar(&ref.Collection, "collection", "",
		"the `outbox`, as database.collection; default: the outbox of the watcher that has the dead letter")
	cmd.Flags().IntVar(&ref.Delivery, "delivery", -1, "which delivery; default: the latest one that died")
	addSourceFlags(cmd, &ref.Source, &ref.Group, &ref.Handler)
	return ref
}

func newDeadShowCommand(program *program) *cobra.Command {
	var payload bool
	cmd := &cobra.Command{
		Use:   "show ID",
		Short: "Show one dead letter with its envelope and its attempts",
		Args:  exactArgs(1),
	}

	action, ref := program.addReadFlags(cmd), addDeadRefFlags(cmd)
	cmd.Flags().BoolVar(&payload, "payload", false, "also show the payload and unknown fields")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ref.ID = args[0]
		return show(cmd.Context(), action, func(ctx context.Context, op admin.Operator) (admin.DeadLetter, error) {
			return op.Letters().Show(ctx, *ref, admin.Detail(payload))
		}, writeDeadLetter)
	}
	return cmd
}

func newDeadRequeueCommand(program *program) *cobra.Command {
	var options admin.DeadOptions
	cmd := &cobra.Command{
		Use:   "requeue [ID...]",
		Short: "Deliver dead letters again, with the same ids",
		Long: `Store the envelopes of the matching dead letters as waiting, in the order of the change stream. The
owner sends each as the next delivery of the same envelope, and its attempts start again from 0.
Dead letters that were requeued before are left out. If a requeue was interrupted, start it again.
With --archived, it takes discarded dead letters back from the archive.

With --to-topic, send the events to that topic only, for example after a topic was renamed. The
routing of the configuration need not have the topic.

Of letters of handlers, put the messages into the queue of their handlers, before the messages of
the same key that wait there. A letter without a handler needs --to. A handler that no
running member of the group has is rejected. A handler that does not take the type of the message
rejects it, and it becomes a dead letter again.

A letter that cannot be sent without a change stays and is listed: edit it. In that case the exit
code is 1.`,
	}

	action, filter := program.addChangeFlags(cmd), addDeadFilterFlags(cmd)
	filter.addAllFlag(cmd)
	addToFlag(cmd, &options)
	cmd.Flags().StringVar(&options.Topic, "to-topic", "",
		"of letters of the relay: the only `topic` that gets the events; default: the topics that the routing chooses")
	cmd.Flags().BoolVar(&options.IgnoreExpiry, "ignore-expiry", false, "also requeue expired envelopes; they do not expire again")
	action.setRun(cmd, func(ctx context.Context, op admin.Operator, ids []string) error {
		filter.IDs = toFilterIDs(ids)
		options.DryRun = action.dryRun
		// Requeued letters stay in the collection for the record; a second requeue would deliver them twice.
		filter.RequeueStatus = "false"
		var err error
		if filter.DeadFilter, err = options.Restrict(op, filter.DeadFilter); err != nil {
			return err
		}

		question := "requeue %s"
		if options.Topic != "" {
			question += " to topic " + options.Topic
		}
		question += "; consumers get the same ids again, and handlers only the messages that they gave up"
		n, err := action.planRequeue(ctx, op, filter, options, question)
		if err != nil {
			return err
		}

		bar := action.startProgress("requeueing", n)
		got, err := op.Letters().Requeue(ctx, filter.DeadFilter, options, bar.setDone)
		bar.clear()
		return action.printRequeued(got, err)
	})
	return cmd
}

// planRequeue makes a dry run and asks for confirmation, with the numbers that the requeue will report. Without a letter
// to requeue it asks nothing.
func (a *operatorCommand) planRequeue(
	ctx context.Context, op admin.Operator, filter *deadFilter, options admin.DeadOptions, questionFormat string,
) (int64, error) {
	if filter.Empty() && !filter.All {
		return 0, errNoSelection
	}
	if a.dryRun || a.yes {
		return op.Letters().Count(ctx, filter.DeadFilter)
	}

	options.DryRun = true
	plan, err := op.Letters().Requeue(ctx, filter.DeadFilter, options, nil)
	if err != nil || plan.Requeued == 0 {
		return plan.Matched, err
	}
	question := fmt.Sprintf(questionFormat, countNoun(plan.Requeued, "dead letter"))
	if plan.Rejected > 0 {
		question += fmt.Sprintf(" (%s cannot be requeued as they are, and stay)", formatThousands(plan.Rejected))
	}
	return plan.Matched, a.confirm(ctx, question)
}

// noLetter states why an action on dead letters did nothing with an id.
const noLetter = "matches no dead letter; outrelay dead list lists the letters"

// countAndConfirm counts the letters that filter selects and asks for confirmation. actionFormat is a verb
// phrase with one %s for the count. No letter and a dry run need no confirmation.
func (a *operatorCommand) countAndConfirm(ctx context.Context, operator admin.Operator, filter *deadFilter, actionFormat string) (int64, error) {
	if filter.Empty() && !filter.All {
		return 0, errNoSelection
	}

	n, err := operator.Letters().Count(ctx, filter.DeadFilter)
	if err != nil || n == 0 || a.dryRun {
		return n, err
	}
	return n, a.confirm(ctx, fmt.Sprintf(actionFormat, countNoun(n, "dead letter")))
}

var errNoSelection = errors.New("no dead letters selected; pass ids, a condition such as --class or --since, or --all")

// printRequeued prints the outcome of a requeue, also if it ended with an error. It returns that error,
// or a reportedError if letters were rejected, or if an id has no letter.
func (a *operatorCommand) printRequeued(got admin.DeadOutcome, err error) error {
	if err != nil && got.Requeued+got.Rejected == 0 {
		return err
	}

	printErr := a.printResult(got, func(out io.Writer) {
		writeNotDone(out, noLetter, got.NotFound)
		if got.Matched == 0 {
			fmt.Fprintln(out, nothingMatches)
			return
		}
		verb := a.chooseText("requeued", "would be requeued")
		fmt.Fprintf(out, "%s %s, %s rejected\n", countNoun(got.Requeued, "dead letter"), verb, formatThousands(got.Rejected))

		for _, r := range got.Why {
			letter := ""
			if r.ID != "" {
				letter = fmt.Sprintf(" %s delivery %d", quoteArgument(r.ID), r.Delivery)
			}
			fmt.Fprintf(out, "  %s%s: %s\n", r.Collection, letter, sanitizeLine(r.Reason))
		}
		if more := got.Rejected - int64(len(got.Why)); more > 0 {
			fmt.Fprintf(out, "  and %s more\n", formatThousands(more))
		}
	})

	// Letters that were rejected need an edit, which a script has to notice.
	if err == nil && printErr == nil && got.Rejected+int64(len(got.NotFound)) > 0 {
		return reportedError(exitConfig)
	}
	return errors.Join(err, printErr)
}

func newDeadDiscardCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "discard [ID...]",
		Short: "Move dead letters into the archive, or remove them for good",
		Long: `Move the matching dead letters into the archive, including letters that were requeued unless
--requeued excludes them. MongoDB removes them after dead_letters.archive; 0 removes them at once.
Until then outrelay dead list --archived lists them, and outrelay dead requeue --archived takes them
back. With --archived, remove letters in the archive for good.`,
	}

	action, filter := program.addChangeFlags(cmd), addDeadFilterFlags(cmd)
	filter.addAllFlag(cmd)
	filter.addStateFlag(cmd)
	action.setRun(cmd, func(ctx context.Context, op admin.Operator, ids []string) error {
		filter.IDs = toFilterIDs(ids)
		until := time.Now().Add(op.LetterArchive)
		question := "discard %s; dead_letters.archive keeps them in the archive until " + formatLocal(&until)
		if filter.Archived || op.LetterArchive == 0 {
			question = "remove %s for good"
		}
		n, err := action.countAndConfirm(ctx, op, filter, question)
		if err != nil {
			return err
		}

		bar := action.startProgress("discarding", n)
		got, err := op.Letters().Discard(ctx, filter.DeadFilter, admin.Effect(action.dryRun), bar.setDone)
		bar.clear()
		// If some letters are gone, the result counts them even though an error ended the command.
		if err != nil && got.Discarded == 0 {
			return err
		}

		if got.Matched == 0 {
			return action.printNamed(got, err, nothingMatches, noLetter, got.NotFound)
		}
		line := action.chooseText(countNoun(got.Discarded, "dead letter")+" discarded", countNoun(got.Matched, "dead letter")+" would be discarded")
		if got.ArchivedUntil != nil {
			line += "; in the archive until " + formatLocal(got.ArchivedUntil) + " (--archived)"
		}
		return action.printNamed(got, err, line, noLetter, got.NotFound)
	})
	return cmd
}
