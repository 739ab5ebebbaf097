package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/admin"
)

const (
	// followInterval is how often --follow looks.
	followInterval = time.Second
	// followOverlap is how far back each look reaches: entries get their time before they are to be seen.
	followOverlap = 5 * time.Second
)

// eventFlags are the flags that say which entries.
type eventFlags struct {
	admin.EventFilter
	from, to string
	limit    int
	after    string
	follow   bool
}

func newEventsCommand(p *program) *cobra.Command {
	f := &eventFlags{}
	c := &cobra.Command{
		Use:   "events",
		Short: "Show what happened: take-overs, gaps, pauses, nodes that fell silent, who did what",
		Long: `Show the events log of the state database, the latest entries, in the order in which they happened; times are the
server's. It holds the newest 10,000 entries of the last 30 days and no payloads. --watcher narrows it to one watcher.

With --follow it goes on with what happens from now until Ctrl-C; with --json as well, one object a line.`,
		Example: `  outrelay events --kind node_stale,lease_lost --from 24h
  outrelay events --actor ann --json
  outrelay events --follow`,
		Args: cobra.NoArgs,
	}
	a := p.addReadFlags(c)
	flags := c.Flags()
	flags.StringSliceVar(&f.Kinds, "kind", nil, "only these `kinds`, as took_over,gap_found")
	flags.StringVar(&f.Node, "node", "", "only what this `node` wrote")
	flags.StringVar(&f.Actor, "actor", "", "only what this `person` did")
	flags.StringVar(&f.from, "from", "", "at this `time` or later, or as in 2h so long ago at most")
	flags.StringVar(&f.to, "to", "", "before this `time`, or as in 2h so long ago at least")
	flags.IntVar(&f.limit, "limit", 50, "entries on a page, at most 1000")
	flags.StringVar(&f.after, "after", "", "the `cursor` that the page before ended with: for older entries")
	flags.BoolVarP(&f.follow, "follow", "f", false, "go on with new entries until Ctrl-C")
	c.MarkFlagsMutuallyExclusive("follow", "to")
	c.MarkFlagsMutuallyExclusive("follow", "after")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if err := f.parseArgs(p); err != nil {
			return err
		}
		return a.withDesk(c.Context(), func(ctx context.Context, k admin.Desk) error {
			if f.follow {
				return a.followEvents(ctx, k, f)
			}
			page, err := k.Events(ctx, f.EventFilter, f.limit, f.after)
			if err != nil {
				return err
			}
			return a.printResult(page, func(w io.Writer) error { return printEvents(w, page) })
		})
	}
	c.AddCommand(newEventsTrimCommand(p))
	return c
}

func (f *eventFlags) parseArgs(p *program) (err error) {
	if f.limit < 1 || f.limit > admin.MaxPage {
		return fmt.Errorf("--limit must be from 1 to %d", admin.MaxPage)
	}
	f.Watcher = *p.namedFlags["watcher"] // said on the command line; the configuration's alone does not narrow
	now := time.Now()
	if f.From, err = parsePastTime("from", f.from, now); err == nil {
		f.To, err = parsePastTime("to", f.to, now)
	}
	return err
}

func printEvents(w io.Writer, page admin.EventPage) error {
	if page.Total == 0 {
		_, err := fmt.Fprintln(w, "no entry matches")
		return err
	}
	err := writeTable(w, "TIME\tWHAT\tWATCHER\tNODE\tBY\tDETAILS", func(row func(...any)) {
		for _, e := range slices.Backward(page.Events) {
			row(e.At.Local().Format(time.DateTime), e.Kind, e.Watcher, e.Node, e.Actor, formatFields(e.Fields))
		}
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "%s of %s\n", formatThousands(int64(len(page.Events))), strings.Replace(countNoun(page.Total, "entry"), "entrys", "entries", 1))
	if page.Next != "" {
		fmt.Fprintf(w, "older ones: --after %s\n", page.Next)
	}
	return nil
}

// formatFields writes the fields of an entry as name=value, without those that have a column.
func formatFields(raw json.RawMessage) string {
	var fields map[string]json.RawMessage
	if json.Unmarshal(raw, &fields) != nil {
		return ""
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if name == "actor" || name == "source" {
			continue
		}
		value := fields[name]
		var text string
		if json.Unmarshal(value, &text) != nil {
			var b bytes.Buffer
			if json.Compact(&b, value) != nil {
				continue
			}
			text = b.String()
		} else if strings.ContainsAny(text, " \t") {
			text = string(value)
		}
		parts = append(parts, name+"="+text)
	}
	return strings.Join(parts, " ")
}

// followEvents writes the latest entries, and then each new one once, until ctx ends.
func (a *operatorCommand) followEvents(ctx context.Context, k admin.Desk, f *eventFlags) error {
	page, err := k.Events(ctx, f.EventFilter, f.limit, "")
	if err != nil {
		return err
	}
	seen := map[string]time.Time{}
	var last time.Time
	write := func(list []admin.LogEvent) error {
		for _, e := range slices.Backward(list) {
			if _, known := seen[e.ID]; known {
				continue
			}
			seen[e.ID] = e.At
			if e.At.After(last) {
				last = e.At
			}
			if err := a.writeEvent(e); err != nil {
				return err
			}
		}
		maps.DeleteFunc(seen, func(_ string, at time.Time) bool { return at.Before(last.Add(-2 * followOverlap)) })
		return nil
	}
	if err := write(page.Events); err != nil {
		return err
	}
	tick := time.NewTicker(followInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		list, err := readEventsSince(ctx, k, f.EventFilter, last)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			fmt.Fprintln(a.p.errOut, sanitizeLine("the events log cannot be read; trying again: "+err.Error()))
			continue
		}
		if err := write(list); err != nil {
			return err
		}
	}
}

// readEventsSince are the entries since last and some before, the newest first.
func readEventsSince(ctx context.Context, k admin.Desk, f admin.EventFilter, last time.Time) ([]admin.LogEvent, error) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	if !last.IsZero() {
		f.From = last.Add(-followOverlap)
	}
	var all []admin.LogEvent
	for after := ""; ; {
		page, err := k.Events(ctx, f, admin.MaxPage, after)
		if err != nil {
			return nil, err
		}
		all = append(all, page.Events...)
		if after = page.Next; after == "" {
			return all, nil
		}
	}
}

func (a *operatorCommand) writeEvent(e admin.LogEvent) error {
	if a.json {
		return json.NewEncoder(a.p.out).Encode(e)
	}
	_, err := fmt.Fprintf(a.p.errOut, "%s %-22s %-12s %-16s %s\n", e.At.Local().Format(time.DateTime), sanitizeLine(e.Kind), sanitizeLine(e.Watcher), sanitizeLine(cmp.Or(e.Actor, e.Node)), sanitizeLine(formatFields(e.Fields)))
	return err
}

// trimmedEvents is the answer of `outrelay events trim --json`.
type trimmedEvents struct {
	DryRun  bool  `json:"dry_run"`
	Removed int64 `json:"removed"`
}

func newEventsTrimCommand(p *program) *cobra.Command {
	var keep int
	c := &cobra.Command{
		Use:   "trim --keep N",
		Short: "Remove the oldest entries of the events log",
		Long: `Remove the oldest entries of the events log beyond the newest N, of all watchers. Relays do that by themselves beyond 10,000,
and the server after 30 days.`,
		Args: cobra.NoArgs,
	}
	a := p.addChangeFlags(c)
	c.Flags().IntVar(&keep, "keep", 0, "how many of the newest stay")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if keep < 1 {
			return errors.New("--keep must say how many of the newest entries stay, at least 1")
		}
		return a.withDesk(c.Context(), func(ctx context.Context, k admin.Desk) error { return a.trimEvents(ctx, k, keep) })
	}
	return c
}

func (a *operatorCommand) trimEvents(ctx context.Context, k admin.Desk, keep int) error {
	page, err := k.Events(ctx, admin.EventFilter{}, 1, "")
	if err != nil {
		return err
	}
	out := trimmedEvents{DryRun: a.dryRun, Removed: max(page.Total-int64(keep), 0)}
	if !a.dryRun && out.Removed > 0 {
		if err := a.confirm(ctx, fmt.Sprintf("remove the oldest %s entries of the events log", formatThousands(out.Removed))); err != nil {
			return err
		}
		if out.Removed, err = k.EventsTrim(ctx, keep); err != nil {
			return err
		}
	}
	return a.printResult(out, func(w io.Writer) error {
		verb := "removed"
		if a.dryRun {
			verb = "would remove"
		}
		_, err := fmt.Fprintf(w, "%s %s entries\n", verb, formatThousands(out.Removed))
		return err
	})
}
