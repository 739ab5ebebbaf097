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

func newLookupCommand(p *program) *cobra.Command {
	q := &admin.LookupQuery{}
	var from, to string
	c := &cobra.Command{
		Use:   "lookup [ID]",
		Short: "Tell everything that is known of an event, or of the events of an ordering key",
		Long: `Look for an event by its id, or for the events of an ordering key: the envelope while it is in its outbox, what it waits
for, its attempts, its dead letters with what became of them, and where it stands in Kafka, with recording: mark. Of a key,
what waits and what died is always found, the rest for --from to --to. The exit code is 1 if nothing is found.`,
		Example: `  outrelay lookup 0190b3c2-7a1d-7c55-9d3e-2f1f6c1c8f10
  outrelay lookup --key customer-17 --from 6h`,
		Args: cobra.MaximumNArgs(1),
	}
	a := p.addReadFlags(c)
	c.Flags().StringVar(&q.Key, "key", "", "the ordering `key`, instead of an id")
	c.Flags().StringVar(&q.Collection, "collection", "", "only in this `outbox`, as database.collection; default: all of the watcher's")
	c.Flags().StringVar(&from, "from", "", "of a key: written at this `time` or later, or as in 2h so long ago at most; default 1h")
	c.Flags().StringVar(&to, "to", "", "of a key: written before this `time`, or as in 2h so long ago at least")
	c.Flags().IntVar(&q.Limit, "limit", 100, "of a key: envelopes and dead letters, at most 1000 of each")
	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if (len(args) == 1) == (q.Key != "") {
			return fmt.Errorf("lookup takes the id of an event, or --key")
		}
		if len(args) == 1 {
			q.ID = args[0]
		}
		if q.Limit < 1 || q.Limit > admin.MaxPage {
			return fmt.Errorf("--limit must be from 1 to %d", admin.MaxPage)
		}
		now := time.Now()
		if q.From, err = parsePastTime("from", from, now); err == nil {
			q.To, err = parsePastTime("to", to, now)
		}
		if err != nil {
			return err
		}
		return a.withDeskBriefly(c.Context(), func(ctx context.Context, k admin.Desk) error {
			found, err := k.Lookup(ctx, *q)
			if err != nil {
				return err
			}
			if err := a.printResult(found, func(w io.Writer) error { return printFound(w, found) }); err != nil {
				return err
			}
			if len(found.Envelopes)+len(found.Letters) == 0 {
				return reportedError(exitConfig)
			}
			return nil
		})
	}
	return c
}

func printFound(w io.Writer, f admin.Found) error {
	if len(f.Envelopes)+len(f.Letters) == 0 {
		_, err := fmt.Fprintln(w, "nothing is known of it here: it was never appended, or it was delivered and removed after its retention")
		return err
	}
	for i := range f.Envelopes {
		printFoundEnvelope(w, &f.Envelopes[i])
	}
	known := map[string]bool{}
	for i := range f.Envelopes {
		known[f.Envelopes[i].Collection+" "+f.Envelopes[i].ID] = true
	}
	for i := range f.Letters {
		if l := &f.Letters[i]; !known[l.Collection+" "+l.ID] {
			fmt.Fprintf(w, "%s %s is dead since %s: %s: %s\n", sanitizeLine(l.Collection), sanitizeLine(l.ID), l.DiedAt.Local().Format(time.DateTime), sanitizeLine(l.Class), sanitizeLine(l.Reason))
		}
	}
	if f.More {
		fmt.Fprintln(w, "there is more; narrow it, or raise --limit")
	}
	return nil
}

func printFoundEnvelope(w io.Writer, e *admin.FoundEnvelope) {
	fmt.Fprintf(w, "%s %s: %s\n", sanitizeLine(e.Collection), sanitizeLine(e.ID), sanitizeLine(e.State))
	line := func(name, format string, args ...any) {
		fmt.Fprintf(w, "  %-12s %s\n", name, sanitizeLine(fmt.Sprintf(format, args...)))
	}
	line("type", "%s of %s/%s", e.Type, e.AggregateType, e.AggregateID)
	line("key", "%s", e.Key)
	if len(e.Waits) > 0 {
		line("waits for", "%s, %s", strings.Join(e.Waits, ", "), countNoun(int64(e.Attempts), "attempt"))
	}
	if e.NextAt != nil {
		line("tried again", "%s", formatLocal(e.NextAt))
	}
	for _, s := range e.Sent {
		line("in Kafka", "topic %s, partition %d, offset %d", s.Topic, s.Partition, s.Offset)
	}
	for _, m := range e.Timeline {
		text := m.What
		if m.Text != "" {
			text += ": " + m.Text
		}
		if m.Node != "" {
			text += " (" + m.Node + ")"
		}
		fmt.Fprintf(w, "  %s  %s\n", m.At.Local().Format(time.DateTime), sanitizeLine(text))
	}
}

func newPingCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "ping",
		Short: "Ask whether MongoDB answers and how fast; exit code 75 if not",
		Args:  cobra.NoArgs,
	}
	a := p.addReadFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return a.withDeskBriefly(c.Context(), func(ctx context.Context, k admin.Desk) error {
			pong, err := k.Ping(ctx)
			if err != nil {
				return err
			}
			return a.printResult(pong, func(w io.Writer) error {
				state := "no watcher has run with this state database yet"
				if pong.Storage {
					state = "the state database is there"
				}
				_, err := fmt.Fprintf(w, "MongoDB answers in %.1f ms; its clock says %s; %s\n", pong.RoundTrip*1000, pong.Now.Format(time.RFC3339Nano), state)
				return err
			})
		})
	}
	return c
}
