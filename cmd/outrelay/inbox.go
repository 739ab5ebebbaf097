package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func newInboxCommand(program *program) *cobra.Command {
	return newGroup(&cobra.Command{
		Use:   "inbox",
		Short: "Inspect the inboxes of services, purge old marks, release claims",
		Long: `An inbox stores a mark for each message that a service has handled. These commands act on the
inboxes in the databases of the outboxes and of consumers.databases. If there are several inboxes,
select one with --database.`,
	}, newInboxCountsCommand(program), newInboxMarksCommand(program), newInboxPurgeCommand(program), newInboxReleaseCommand(program))
}

// inboxFlags holds the flags that select an inbox.
type inboxFlags struct{ database, collection string }

func addInboxFlags(cmd *cobra.Command) *inboxFlags {
	flags := &inboxFlags{}
	cmd.Flags().StringVar(&flags.database, "database", "", "the service's `database`; required if there are several inboxes")
	cmd.Flags().StringVar(&flags.collection, "collection", "", "the inbox's `collection`; default: inbox")
	return flags
}

// noInbox is the text for a watcher without inboxes.
const noInbox = "there is no inbox"

// findInbox returns the inbox that the flags select. Without --database, there must be exactly one inbox.
func (f *inboxFlags) findInbox(ctx context.Context, op admin.Operator) (database, collection string, err error) {
	if f.database != "" {
		return f.database, f.collection, nil
	}

	all, err := op.Inboxes().List(ctx)
	if err != nil {
		return "", "", err
	}
	var found []admin.InboxCounts
	var names []string
	for _, x := range all {
		if f.collection == "" || x.Collection == f.collection {
			found = append(found, x)
			names = append(names, x.Database+"."+x.Collection)
		}
	}

	// A change to the wrong inbox cannot be undone, so several candidates are an error.
	switch len(found) {
	case 0:
		searched, err := describeSearched(ctx, op)
		return "", "", cmp.Or(err, errors.New(noInbox+searched))
	case 1:
		return found[0].Database, found[0].Collection, nil
	}
	return "", "", fmt.Errorf("there are several inboxes: select one of %s with --database and --collection", strings.Join(names, ", "))
}

func newInboxCountsCommand(program *program) *cobra.Command {
	return newListCommand(program, &cobra.Command{
		Use:   "counts",
		Short: "Count the handled and claimed messages of each inbox",
	}, inboxListing, func(ctx context.Context, op admin.Operator) ([]admin.InboxCounts, error) {
		return op.Inboxes().List(ctx)
	})
}

var inboxListing = listing[admin.InboxCounts]{
	name: "inboxes", empty: noInbox, ofServices: true, head: "DATABASE\tINBOX\tHANDLED\tCLAIMED\tOF THEM EXPIRED",
	cells: func(x admin.InboxCounts) cells {
		return cells{x.Database, x.Collection, formatThousands(x.Handled), formatThousands(x.Claimed), formatThousands(x.Expired)}
	},
}

func newInboxMarksCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "marks",
		Short: "Show the watermarks of each consumer by partition, if it keeps watermarks",
		Args:  noArgs,
	}

	action, flags := program.addReadFlags(cmd), addInboxFlags(cmd)
	setList(cmd, action, markListing, func(ctx context.Context, op admin.Operator, _ []string) ([]admin.InboxMark, error) {
		database, collection, err := flags.findInbox(ctx, op)
		if err != nil {
			return nil, err
		}
		return op.Inboxes().Marks(ctx, database, collection)
	})
	return cmd
}

var markListing = listing[admin.InboxMark]{
	name: "marks", empty: "no consumer of this inbox keeps watermarks",
	head: "CONSUMER\tTOPIC\tPARTITION\tLANE\tNEXT OFFSET\tCOUNTS\tAT",
	cells: func(m admin.InboxMark) cells {
		counts := "yes"
		if !m.Current {
			counts = "no, from an older generation"
		}
		return cells{m.Consumer, m.Topic, m.Partition, m.Lane, m.Next, counts, formatLocal(&m.At)}
	},
}

func newInboxPurgeCommand(program *program) *cobra.Command {
	var older time.Duration
	cmd := &cobra.Command{
		Use:   "purge --older-than DURATION",
		Short: "Remove the marks of messages that were handled long ago",
		Long: `Remove the marks of messages that were handled at least --older-than ago, before their retention is
over. If such a message is delivered again later, and no watermark covers it, it is handled again.`,
		Args: noArgs,
	}

	action, flags := program.addChangeFlags(cmd), addInboxFlags(cmd)
	cmd.Flags().DurationVar(&older, "older-than", 0, "minimum age of the marks, such as 72h")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if older <= 0 {
			return fmt.Errorf("--older-than is missing: pass a minimum age, such as 72h")
		}

		return action.withOperator(cmd.Context(), func(ctx context.Context, op admin.Operator) error {
			database, collection, err := flags.findInbox(ctx, op)
			if err != nil {
				return err
			}

			order := admin.InboxPurge{Database: database, Collection: collection, OlderThan: older}
			out, err := actConfirmed(ctx, action, func(dryRun bool) (admin.InboxPurged, error) {
				order.DryRun = dryRun
				return op.Inboxes().Purge(ctx, order)
			}, func(found admin.InboxPurged) string {
				if found.Matched == 0 {
					return ""
				}
				return "remove " + countNoun(found.Matched, "mark") + " of handled messages from " + sanitizeLine(database)
			})
			if err != nil {
				return err
			}

			out.DryRun = action.dryRun
			return action.printLine(out, "%s", action.chooseText("removed "+countNoun(out.Removed, "mark"), "would remove "+countNoun(out.Matched, "mark")))
		})
	}
	return cmd
}

func newInboxReleaseCommand(program *program) *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "release",
		Short: "Release the claims of stopped consumers, so that others can handle the messages",
		Long: `Release the messages that consumers have claimed, so that other consumers can handle them at once.
Claims with an expired lease can be taken over without this command. Live claims are rejected
without --force: use it only for a process that has stopped for certain.`,
		Args: noArgs,
	}

	action, flags := program.addChangeFlags(cmd), addInboxFlags(cmd)
	cmd.Flags().BoolVar(&force, "force", false, "also release live claims")
	action.setRun(cmd, func(ctx context.Context, op admin.Operator, _ []string) error {
		database, collection, err := flags.findInbox(ctx, op)
		if err != nil {
			return err
		}

		out, err := actConfirmed(ctx, action, func(dryRun bool) (admin.InboxReleased, error) {
			return op.Inboxes().Release(ctx, database, collection, force, admin.Effect(dryRun))
		}, func(found admin.InboxReleased) string {
			if found.Matched == 0 {
				return ""
			}
			return fmt.Sprintf("release %s of %s, %s of them live",
				countNoun(found.Matched, "claim"), sanitizeLine(database), formatThousands(found.Live))
		})
		if err != nil {
			return err
		}

		out.DryRun = action.dryRun
		planned := fmt.Sprintf("would release %s, %s of them live", countNoun(out.Matched, "claim"), formatThousands(out.Live))
		return action.printLine(out, "%s", action.chooseText("released "+countNoun(out.Released, "claim"), planned))
	})
	return cmd
}
