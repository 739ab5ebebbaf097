package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/admin"
)

func newInboxCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "inbox",
		Short: "Look at the inboxes of services, purge old markers, release claims of dead consumers",
		Long: `An inbox remembers which messages a service has handled. These commands serve the inboxes of services whose outboxes this
watcher reads. Where there is one inbox alone, it is meant; else say --database.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newInboxCountsCommand(p), newInboxMarksCommand(p), newInboxPurgeCommand(p), newInboxReleaseCommand(p))
	return c
}

// inboxFlags say which inbox.
type inboxFlags struct{ database, collection string }

func addInboxFlags(c *cobra.Command) *inboxFlags {
	f := &inboxFlags{}
	c.Flags().StringVar(&f.database, "database", "", "the service's `database`; needed where there are several inboxes")
	c.Flags().StringVar(&f.collection, "collection", "", "the inbox's `collection`; default: inbox")
	return f
}

// findInbox is the database that was named, or the only one that has such an inbox.
func (f *inboxFlags) findInbox(ctx context.Context, k admin.Desk) (database, collection string, err error) {
	if f.database != "" {
		return f.database, f.collection, nil
	}
	all, err := k.Inboxes(ctx)
	if err != nil {
		return "", "", err
	}
	var found []admin.InboxCounts
	var names []string
	for _, x := range all {
		if f.collection == "" || x.Collection == f.collection {
			found, names = append(found, x), append(names, x.Database+"."+x.Collection)
		}
	}
	switch len(found) {
	case 0:
		return "", "", fmt.Errorf("there is no inbox in the databases of this watcher's outboxes")
	case 1:
		return found[0].Database, found[0].Collection, nil
	}
	return "", "", fmt.Errorf("there are several inboxes; say --database and --collection, for one of %s", strings.Join(names, ", "))
}

// inboxList is the answer of `outrelay inbox counts --json`.
type inboxList struct {
	Inboxes []admin.InboxCounts `json:"inboxes"`
}

func newInboxCountsCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "counts",
		Short: "Count what each inbox remembers, and what is claimed by somebody",
		Args:  cobra.NoArgs,
	}
	a := p.addReadFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return a.withDeskBriefly(c.Context(), func(ctx context.Context, k admin.Desk) error {
			all, err := k.Inboxes(ctx)
			if err != nil {
				return err
			}
			return a.printResult(inboxList{all}, func(w io.Writer) error {
				if len(all) == 0 {
					_, err := fmt.Fprintln(w, "there is no inbox in the databases of this watcher's outboxes")
					return err
				}
				return writeTable(w, "DATABASE\tINBOX\tHANDLED\tCLAIMED\tOF THEM EXPIRED", func(row func(...any)) {
					for _, x := range all {
						row(x.Database, x.Collection, formatThousands(x.Handled), formatThousands(x.Claimed), formatThousands(x.Expired))
					}
				})
			})
		})
	}
	return c
}

// inboxMarks is the answer of `outrelay inbox marks --json`.
type inboxMarks struct {
	Marks []admin.InboxMark `json:"marks"`
}

func newInboxMarksCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "marks",
		Short: "Show how far each consumer is in each partition, where it keeps watermarks",
		Args:  cobra.NoArgs,
	}
	a, f := p.addReadFlags(c), addInboxFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return a.withDeskBriefly(c.Context(), func(ctx context.Context, k admin.Desk) error {
			database, collection, err := f.findInbox(ctx, k)
			if err != nil {
				return err
			}
			marks, err := k.InboxMarks(ctx, database, collection)
			if err != nil {
				return err
			}
			return a.printResult(inboxMarks{marks}, func(w io.Writer) error {
				if len(marks) == 0 {
					_, err := fmt.Fprintln(w, "no consumer of this inbox keeps watermarks")
					return err
				}
				return writeTable(w, "CONSUMER\tTOPIC\tPARTITION\tLANE\tNEXT OFFSET\tCOUNTS\tAT", func(row func(...any)) {
					for _, m := range marks {
						counts := "yes"
						if !m.Current {
							counts = "no, of an older generation"
						}
						row(m.Consumer, m.Topic, m.Partition, m.Lane, m.Next, counts, formatLocal(&m.At))
					}
				})
			})
		})
	}
	return c
}

func newInboxPurgeCommand(p *program) *cobra.Command {
	var older time.Duration
	c := &cobra.Command{
		Use:   "purge --older-than DURATION",
		Short: "Remove markers of messages that were handled long ago",
		Long: `Remove the markers of messages that were handled so long ago, before their retention is over. A message that comes again
after that, and that no watermark covers, is handled again.`,
		Args: cobra.NoArgs,
	}
	a, f := p.addChangeFlags(c), addInboxFlags(c)
	c.Flags().DurationVar(&older, "older-than", 0, "handled so long ago at least, as 72h")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if older <= 0 {
			return fmt.Errorf("--older-than must say how long ago, such as 72h")
		}
		return a.withDesk(c.Context(), func(ctx context.Context, k admin.Desk) error {
			database, collection, err := f.findInbox(ctx, k)
			if err != nil {
				return err
			}
			order := admin.InboxPurge{Database: database, Collection: collection, OlderThan: older, DryRun: true}
			out, err := k.InboxPurge(ctx, order)
			if err == nil && !a.dryRun && out.Matched > 0 {
				if err = a.confirm(ctx, "remove "+countNoun(out.Matched, "marker")+" of handled messages from "+sanitizeLine(database)); err == nil {
					order.DryRun = false
					out, err = k.InboxPurge(ctx, order)
				}
			}
			if err != nil {
				return err
			}
			out.DryRun = a.dryRun
			return a.printResult(out, func(w io.Writer) error {
				text := "removed " + countNoun(out.Removed, "marker")
				if a.dryRun {
					text = "would remove " + countNoun(out.Matched, "marker")
				}
				_, err := fmt.Fprintln(w, text)
				return err
			})
		})
	}
	return c
}

func newInboxReleaseCommand(p *program) *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use:   "release",
		Short: "Give up the claims of consumers that are gone, so that their messages are handled at once",
		Long: `Give up the claims of messages that a consumer holds, so that another may handle them at once. Claims whose lease is over can
be taken anyway; live ones are refused without --force, which is for a process that is known to be gone.`,
		Args: cobra.NoArgs,
	}
	a, f := p.addChangeFlags(c), addInboxFlags(c)
	c.Flags().BoolVar(&force, "force", false, "also claims that somebody holds right now")
	c.RunE = func(c *cobra.Command, _ []string) error {
		return a.withDesk(c.Context(), func(ctx context.Context, k admin.Desk) error {
			database, collection, err := f.findInbox(ctx, k)
			if err != nil {
				return err
			}
			out, err := k.InboxRelease(ctx, database, collection, force, true)
			if err == nil && !a.dryRun && out.Matched > 0 {
				if err = a.confirm(ctx, fmt.Sprintf("release %s of %s, %s of them live", countNoun(out.Matched, "claim"), sanitizeLine(database), formatThousands(out.Live))); err == nil {
					out, err = k.InboxRelease(ctx, database, collection, force, false)
				}
			}
			if err != nil {
				return err
			}
			out.DryRun = a.dryRun
			return a.printResult(out, func(w io.Writer) error {
				text := "released " + countNoun(out.Released, "claim")
				if a.dryRun {
					text = fmt.Sprintf("would release %s, %s of them live", countNoun(out.Matched, "claim"), formatThousands(out.Live))
				}
				_, err := fmt.Fprintln(w, text)
				return err
			})
		})
	}
	return c
}
