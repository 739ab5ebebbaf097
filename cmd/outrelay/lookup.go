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

func newLookupCommand(p *program) *cobra.Command {
	q := &admin.LookupQuery{}
	c := &cobra.Command{
		Use:   "lookup [ID]",
		Short: "Show the state and history of an event, or of the events of an ordering key",
		Long: `Look up an event by its id, or the events of an ordering key. The output shows the envelope if it is
still in its outbox, why it waits, its attempts, its dead letters and their outcome. With recording:
mark, it also shows the offset in Kafka. For a key, waiting envelopes and dead letters are always
found, other envelopes only between --from and --to. The exit code is 1 if nothing is found.`,
		Example: `  outrelay lookup 0190b3c2-7a1d-7c55-9d3e-2f1f6c1c8f10
  outrelay lookup --key customer-17 --from 6h`,
		Args: maxArgs(1),
	}

	a := p.addReadFlags(c)
	c.Flags().StringVar(&q.Key, "key", "", "the ordering `key`, instead of an id")
	addCollectionFlag(c, &q.Collection)
	addTimeFlag(c, &q.From, "from",
		"with --key: written at or after this `time`, or at most so long ago, such as 2h; default: 1h", parsePastTime)
	addTimeFlag(c, &q.To, "to", "with --key: written before this `time`, or at least so long ago, such as 2h", parsePastTime)
	addLimitFlag(c, &q.Limit, admin.DefaultPage, admin.MaxPage, "with --key: maximum number of envelopes, and of dead letters")

	c.RunE = func(c *cobra.Command, args []string) error {
		if (len(args) == 1) == (q.Key != "") {
			return fmt.Errorf("lookup needs either the id of an event or --key")
		}
		if len(args) == 1 {
			q.ID = args[0]
		}

		return a.withOperator(c.Context(), func(ctx context.Context, op admin.Operator) error {
			found, err := op.Lookup(ctx, *q)
			if err != nil {
				return err
			}
			if err := a.printResult(found, func(w io.Writer) { writeFound(w, found) }); err != nil {
				return err
			}

			// Scripts can test for an event by the exit code.
			if len(found.Envelopes)+len(found.Letters) == 0 {
				return reportedError(exitConfig)
			}
			return nil
		})
	}
	return c
}

func writeFound(w io.Writer, f admin.LookupResult) {
	if len(f.Envelopes)+len(f.Letters) == 0 {
		fmt.Fprintln(w, "not found: no such event was appended, or it was delivered and removed after its retention")
		return
	}

	shown := map[string]bool{}
	for i := range f.Envelopes {
		e := &f.Envelopes[i]
		writeFoundEnvelope(w, e)
		for _, t := range e.Timeline {
			shown[t.Letter] = true
		}
	}

	// The timeline of an envelope includes its dead letters. The others are of events that are not in the outbox.
	for i := range f.Letters {
		l := &f.Letters[i]
		if shown[l.Letter] {
			continue
		}
		fmt.Fprintf(w, "%s %s is dead since %s: %s: %s (%s)\n", sanitizeLine(l.Collection), quoteArgument(l.ID),
			formatLocal(&l.DiedAt), sanitizeLine(l.Class), sanitizeLine(l.Reason), l.Letter)
	}

	if f.More {
		fmt.Fprintln(w, "there are more; restrict the lookup, or raise --limit")
	}
}

func writeFoundEnvelope(w io.Writer, e *admin.FoundEnvelope) {
	state := e.State
	if e.Reason != "" {
		state += " (" + e.Reason + ")"
	}
	fmt.Fprintf(w, "%s %s: %s\n", sanitizeLine(e.Collection), quoteArgument(e.ID), sanitizeLine(state))

	printField := func(name, format string, args ...any) {
		fmt.Fprintf(w, "  %-12s %s\n", name, sanitizeLine(fmt.Sprintf(format, args...)))
	}
	printField("type", "%s of %s/%s", e.Type, e.AggregateType, e.AggregateID)
	printField("key", "%s", e.Key)
	if len(e.Waits) > 0 {
		printField("waits for", "%s, %s", strings.Join(e.Waits, ", "), countNoun(int64(e.Attempts), "attempt"))
	}
	if e.NextAt != nil {
		printField("next attempt", "%s", formatLocal(e.NextAt))
	}
	for _, s := range e.Sent {
		printField("in Kafka", "topic %s, partition %d, offset %d", s.Topic, s.Partition, s.Offset)
	}

	for _, m := range e.Timeline {
		text := m.What
		if m.Text != "" {
			text += ": " + m.Text
		}
		if m.Node != "" {
			text += " (" + m.Node + ")"
		}
		fmt.Fprintf(w, "  %s  %s\n", formatLocal(&m.At), sanitizeLine(text))
	}
}

func newPingCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "ping",
		Short: "Measure how fast MongoDB answers; exit with 75 if it does not",
		Args:  noArgs,
	}

	a := p.addReadFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return show(c.Context(), a, func(ctx context.Context, op admin.Operator) (admin.Pong, error) { return op.Ping(ctx) }, writePong)
	}
	return c
}

func writePong(w io.Writer, pong admin.Pong) {
	state := noWatcher
	if pong.Storage {
		state = "the state database exists"
	}
	fmt.Fprintf(w, "MongoDB answers in %.1f ms; its clock is %s; %s\n", pong.RoundTrip*1000, pong.Now.Format(time.RFC3339Nano), state)
}
