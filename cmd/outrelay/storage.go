package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func newStorageCommand(program *program) *cobra.Command {
	return newGroup(&cobra.Command{
		Use:   "storage",
		Short: "Count the documents of the watcher, or clear collections",
	}, newStorageCountsCommand(program), newStorageClearCommand(program))
}

func newStorageCountsCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "counts",
		Short: "Count envelopes by state, dead letters, inbox marks and sagas",
		Args:  noArgs,
	}

	action := program.addReadFlags(cmd)
	// It reads every envelope that waits.
	action.limit = 0
	setShow(cmd, action, func(ctx context.Context, op admin.Operator, _ []string) (admin.Counts, error) {
		overview, err := op.Overview(ctx)
		return overview.Counts, err
	}, writeStorageCounts)
	return cmd
}

func writeStorageCounts(out io.Writer, n admin.Counts) {
	writeTable(out, "WHAT\tCOUNT", []cells{
		{"envelopes, including delivered ones that are still kept", n.Envelopes},
		{"waiting for a retry", n.Retry},
		{"blocked by an earlier envelope of the key", n.Blocked},
		{"parked", n.Parked},
		{"scheduled", n.Scheduled},
		{"dead letters of the relay that were not requeued", n.Dead},
		{"dead letters of the relay, including requeued ones", n.DeadAll},
		{"dead letters of handlers that were not requeued", n.HandlerDead},
		{"messages that handlers retry", n.HandlerWaiting},
		{"inbox marks of handled messages", n.InboxHandled},
		{"claimed messages", n.InboxClaimed},
		{"sagas", n.Sagas},
	}, func(row cells) cells { return cells{row[0], formatThousands(row[1].(int64))} })
}

func newStorageClearCommand(program *program) *cobra.Command {
	order := &admin.ClearOrder{}
	cmd := &cobra.Command{
		Use:   "clear WHAT...",
		Short: "Remove all documents for good: " + strings.Join(admin.Clearable(), ", "),
		Long: `Remove all documents of the named kinds for good: envelopes (outboxes), dead (letters), inbox,
sagas, audit (the entries of this watcher), replays. Indexes, checkpoints and the other data of
services stay. The command fails while a relay runs for the watcher. Confirm it by typing
"clear" and the name of the watcher, or pass them in --confirm. Run it with --dry-run first.

Events that were appended, but that no relay has read yet, are still in the change stream. They are
sent when a relay continues.`,
		Example: `  outrelay storage clear dead audit --dry-run
  outrelay storage clear envelopes --collection shop.outbox --confirm "clear orders"`,
		Args:      minArgs(1),
		ValidArgs: admin.Clearable(),
	}

	// --yes is not enough for this command, so the help does not show it. addChangeFlags defines it.
	command := program.addChangeFlags(cmd)
	if err := cmd.Flags().MarkHidden("yes"); err != nil {
		panic("outrelay: " + err.Error())
	}
	cmd.Flags().StringVar(&order.Collection, "collection", "",
		"only this `outbox`, as database.collection, and the services of its database")
	cmd.Flags().StringVar(&order.Confirm, "confirm", "", "the `words` to type for confirmation")
	cmd.Flags().BoolVar(&order.Force, "force", false, "clear even while a relay runs for the watcher")

	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		order.What = args
		return command.withOperator(cmd.Context(), func(ctx context.Context, op admin.Operator) error {
			// The first call counts, and returns the words that confirm the order.
			order.DryRun = true
			out, err := op.Clear(ctx, *order)
			if err != nil {
				return err
			}

			if !command.dryRun {
				if order.Confirm == "" {
					action := "remove " + countNoun(out.Found, "document") + " for good"
					if order.Confirm, err = command.askForWords(ctx, action, out.Confirm); err != nil {
						return err
					}
				}
				order.DryRun = false
				out, err = op.Clear(ctx, *order)
			}

			if errors.Is(err, admin.ErrUnconfirmed) {
				return fmt.Errorf("not confirmed; nothing was done: type %q, not %q", out.Confirm, sanitizeLine(order.Confirm))
			}
			if err != nil {
				return err
			}
			return command.printResult(out, func(writer io.Writer) { writeCleared(writer, out) })
		})
	}
	return cmd
}

// askForWords asks the user to type words to confirm an irreversible action, and returns the typed
// text. Without a terminal it returns an error with the words.
func (a *operatorCommand) askForWords(ctx context.Context, action, words string) (string, error) {
	if !a.interactive || a.json {
		return "", fmt.Errorf("this would %s; pass --confirm %q to do it, or --dry-run to see more", action, words)
	}

	fmt.Fprintf(a.p.errOut, "This will %s. Type %s to continue: ", action, words)
	line, err := a.readLine(ctx)
	return strings.TrimSpace(line), err
}

func writeCleared(out io.Writer, cleared admin.Cleared) {
	writeTable(out, "WHAT\tCOLLECTION\tFOUND\tREMOVED", cleared.Collections, func(collection admin.ClearedCollection) cells {
		return cells{collection.What, collection.Collection, formatThousands(collection.Found), formatThousands(collection.Removed)}
	})

	if cleared.DryRun {
		fmt.Fprintf(out, "would remove %s; to confirm, type: %s\n", countNoun(cleared.Found, "document"), cleared.Confirm)
		return
	}
	fmt.Fprintln(out, "removed "+countNoun(cleared.Removed, "document"))
}
