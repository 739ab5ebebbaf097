package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/admin"
)

func newStorageCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "storage",
		Short: "Count what the watcher's collections hold, rebuild their indexes, or empty them",
		Args:  cobra.NoArgs,
		RunE:  func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newStorageCountsCommand(p), newStorageRebuildCommand(p), newStorageClearCommand(p))
	return c
}

func newStorageCountsCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "counts",
		Short: "Count envelopes by state, dead letters, markers of inboxes and sagas",
		Args:  cobra.NoArgs,
	}
	a := p.addReadFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return a.withDesk(c.Context(), func(ctx context.Context, k admin.Desk) error {
			o, err := k.Overview(ctx)
			if err != nil {
				return err
			}
			return a.printResult(o.Counts, func(w io.Writer) error {
				n := o.Counts
				return writeTable(w, "WHAT\tCOUNT", func(row func(...any)) {
					for _, x := range []struct {
						what string
						n    int64
					}{
						{"envelopes, delivered ones that are kept too", n.Envelopes},
						{"tried again", n.Retry},
						{"blocked behind another of their key", n.Blocked},
						{"parked", n.Parked},
						{"scheduled", n.Scheduled},
						{"dead letters that nobody requeued", n.Dead},
						{"dead letters in all", n.DeadAll},
						{"markers of handled messages", n.InboxHandled},
						{"claimed messages", n.InboxClaimed},
						{"sagas", n.Sagas},
					} {
						row(x.what, formatThousands(x.n))
					}
				})
			})
		})
	}
	return c
}

func newStorageRebuildCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "rebuild",
		Short: "Make, replace and drop indexes until every collection has what is declared",
		Long: `Apply the migrations that are pending, and then make, replace and drop indexes until every collection has what this version
declares. It may be repeated; while an index is built, purge and queries of its collection are slow. Documents are not touched.
Exit code 1 if something differs in the end.`,
		Args: cobra.NoArgs,
	}
	a := p.addChangeFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return a.withDesk(c.Context(), func(ctx context.Context, k admin.Desk) error {
			v, err := k.IndexesVerify(ctx)
			if err == nil && !a.dryRun {
				if len(v.Drift) > 0 {
					err = a.confirm(ctx, "mend "+countNoun(int64(len(v.Drift)), "difference")+" of indexes")
				}
				if err == nil {
					v, err = k.IndexesRebuild(ctx)
				}
			}
			if err != nil {
				return err
			}
			if err := a.printResult(v, func(w io.Writer) error { return printVerification(w, v) }); err != nil {
				return err
			}
			if !v.OK() {
				return reportedError(exitConfig)
			}
			return nil
		})
	}
	return c
}

func newStorageClearCommand(p *program) *cobra.Command {
	order := &admin.ClearOrder{}
	c := &cobra.Command{
		Use:   "clear WHAT...",
		Short: "Empty collections for good: " + strings.Join(admin.Clearable(), ", "),
		Long: `Empty the collections of what is named, for good: envelopes (outboxes), dead (letters), inbox, sagas, events (of this
watcher in the log), replays. Indexes, positions and what services keep beside stay. It is refused while a relay works for
the watcher, and wants the words "clear" and the watcher's name typed, or in --confirm. Look with --dry-run first.

Events that were appended and that no relay has read yet are in the change stream still, and are sent when one goes on.`,
		Example: `  outrelay storage clear dead events --dry-run
  outrelay storage clear envelopes --collection shop.outbox --confirm "clear orders"`,
		Args:      cobra.MinimumNArgs(1),
		ValidArgs: admin.Clearable(),
	}
	a := p.addChangeFlags(c)
	if err := c.Flags().MarkHidden("yes"); err != nil {
		panic("outrelay: " + err.Error()) // acting defines it
	}
	c.Flags().StringVar(&order.Collection, "collection", "", "only this `outbox`, as database.collection, and the services of its database")
	c.Flags().StringVar(&order.Confirm, "confirm", "", "the `words` that would be typed")
	c.Flags().BoolVar(&order.Force, "force", false, "also while a relay works for the watcher")
	c.RunE = func(c *cobra.Command, args []string) error {
		order.What = args
		return a.withDesk(c.Context(), func(ctx context.Context, k admin.Desk) error {
			order.DryRun = true
			out, err := k.Clear(ctx, *order)
			if err != nil {
				return err
			}
			if !a.dryRun {
				if order.Confirm == "" {
					order.Confirm, err = a.askForWords(ctx, "remove "+countNoun(out.Found, "document")+" for good", out.Confirm)
				}
				if order.DryRun = false; err == nil {
					out, err = k.Clear(ctx, *order)
				}
			}
			if errors.Is(err, admin.ErrUnconfirmed) {
				return fmt.Errorf("nothing was done: the words are %q, not %q", out.Confirm, sanitizeLine(order.Confirm))
			}
			if err != nil {
				return err
			}
			return a.printResult(out, func(w io.Writer) error { return printCleared(w, out) })
		})
	}
	return c
}

// askForWords asks for the words that something final wants; without a terminal it refuses and says which they are.
func (a *operatorCommand) askForWords(ctx context.Context, what, words string) (string, error) {
	if !a.interactive || a.json {
		return "", fmt.Errorf("this would %s; say --confirm %q to do it, or --dry-run to see more", what, words)
	}
	fmt.Fprintf(a.p.errOut, "This will %s. Type %s to go on: ", what, words)
	line, err := a.readLine(ctx)
	return strings.TrimSpace(line), err
}

func printCleared(w io.Writer, c admin.Cleared) error {
	err := writeTable(w, "WHAT\tCOLLECTION\tFOUND\tREMOVED", func(row func(...any)) {
		for _, x := range c.Collections {
			row(x.What, x.Collection, formatThousands(x.Found), formatThousands(x.Removed))
		}
	})
	if err != nil {
		return err
	}
	if c.DryRun {
		_, err = fmt.Fprintf(w, "would remove %s; the words to type are: %s\n", countNoun(c.Found, "document"), c.Confirm)
		return err
	}
	_, err = fmt.Fprintln(w, "removed "+countNoun(c.Removed, "document"))
	return err
}
