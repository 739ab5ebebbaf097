package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/operate/admin"
)

const (
	// followInterval is the time between two reads of --follow.
	followInterval = time.Second

	// followOverlap is the part of the log that each read of --follow repeats. An entry gets its time
	// before it becomes visible, so a later read may find entries that are older than the last one.
	followOverlap = 5 * time.Second
)

// auditFlags holds the flags that select entries of the audit log.
type auditFlags struct {
	admin.AuditFilter
	limit  int
	after  string
	follow bool
}

func newAuditCommand(program *program) *cobra.Command {
	auditFlags := &auditFlags{}
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Show the audit log: takeovers, gaps, pauses, lost nodes, operator actions",
		Long: `Show the latest entries of the audit log of the state database, in chronological order. Times are
the server's. The log holds at least the newest 10,000 entries of the last 30 days, without payloads.
--watcher restricts it to one watcher.

With --follow, also show new entries until Ctrl-C; together with --json, as one object per line.`,
		Example: `  outrelay audit --kind node_stale,lease_lost --from 24h
  outrelay audit --actor ann --json
  outrelay audit --follow`,
		Args: noArgs,
	}

	action := program.addReadFlags(cmd)
	// A log that is followed has no end.
	action.limit = 0
	flags := cmd.Flags()
	flags.StringSliceVar(&auditFlags.Kinds, "kind", nil, "only these `kinds`, such as took_over,gap_found")
	flags.StringVar(&auditFlags.Node, "node", "", "only entries written by this `node`")
	flags.StringVar(&auditFlags.Actor, "actor", "", "only actions of this `person`")
	addTimeFlag(cmd, &auditFlags.From, "from", "at or after this `time`, or at most so long ago, such as 2h", parsePastTime)
	addTimeFlag(cmd, &auditFlags.To, "to", "before this `time`, or at least so long ago, such as 2h", parsePastTime)
	addLimitFlag(cmd, &auditFlags.limit, 50, admin.MaxPage, "entries on a page")
	flags.StringVar(&auditFlags.after, "after", "", "the `cursor` that the previous page ended with, for older entries")
	flags.BoolVarP(&auditFlags.follow, "follow", "f", false, "also show new entries until Ctrl-C")
	cmd.MarkFlagsMutuallyExclusive("follow", "to")
	cmd.MarkFlagsMutuallyExclusive("follow", "after")

	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		for _, kind := range auditFlags.Kinds {
			if !admin.IsAuditKind(kind) {
				return unknownKindError(kind)
			}
		}
		// Only --watcher restricts the log to one watcher. The watcher in the configuration does not.
		auditFlags.Watcher = program.namedFlags["watcher"].Value.String()

		return action.withOperator(cmd.Context(), func(ctx context.Context, op admin.Operator) error {
			if auditFlags.follow {
				return action.followAudit(ctx, op, auditFlags)
			}

			page, err := op.Audit(ctx, auditFlags.AuditFilter, auditFlags.limit, auditFlags.after)
			if err != nil {
				return err
			}
			// People read the log downwards, and programs get the order of the pages.
			if !action.json {
				slices.Reverse(page.Items)
			}
			return auditListing.show(ctx, action, op, page)
		})
	}
	cmd.AddCommand(newAuditTrimCommand(program))
	return cmd
}

// unknownKindError names the kind that was probably meant, or all kinds.
func unknownKindError(kind string) error {
	known := admin.AuditKinds()
	if near := config.NearestName(kind, known); near != "" {
		return fmt.Errorf("--kind: no entry is of kind %q; did you mean %s?", kind, near)
	}
	return fmt.Errorf("--kind: no entry is of kind %q; expected one of %s", kind, strings.Join(known, ", "))
}

var auditListing = listing[admin.AuditEntry]{
	noun: "entry", empty: "no entry matches", head: "TIME\tWHAT\tWATCHER\tNODE\tBY\tDETAILS",
	cells: func(entry admin.AuditEntry) cells {
		return cells{formatLocal(&entry.At), entry.Kind, entry.Watcher, entry.Node, entry.Actor, formatFields(entry.Fields)}
	},
}

// formatFields formats the fields of an entry as name=value, without the fields that have their own column.
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

		// A string without blanks is shown without quotes, any other value as JSON.
		value := fields[name]
		var text string
		if json.Unmarshal(value, &text) != nil {
			var buffer bytes.Buffer
			if json.Compact(&buffer, value) != nil {
				continue
			}
			text = buffer.String()
		} else if strings.ContainsAny(text, " \t") {
			text = string(value)
		}
		parts = append(parts, name+"="+text)
	}
	return strings.Join(parts, " ")
}

// followAudit writes the latest entries, and then each new entry once, until ctx ends. Errors of later
// reads are printed, and the read is repeated.
func (a *operatorCommand) followAudit(ctx context.Context, op admin.Operator, flags *auditFlags) error {
	page, err := op.Audit(ctx, flags.AuditFilter, flags.limit, "")
	if err != nil {
		return err
	}

	// Consecutive reads overlap, because entries of several nodes do not arrive in the order of their times.
	written := map[string]time.Time{} // times of the latest entries, by id
	var last time.Time
	writeNew := func(list []admin.AuditEntry) error {
		for _, e := range slices.Backward(list) {
			if _, ok := written[e.ID]; ok {
				continue
			}
			written[e.ID] = e.At
			if e.At.After(last) {
				last = e.At
			}
			if err := a.writeAuditEntry(e); err != nil {
				return err
			}
		}

		// Entries before the overlap cannot be read again.
		maps.DeleteFunc(written, func(_ string, writtenAt time.Time) bool { return writtenAt.Before(last.Add(-2 * followOverlap)) })
		return nil
	}
	if err := writeNew(page.Items); err != nil {
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

		list, err := readAuditSince(ctx, op, flags.AuditFilter, last)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			fmt.Fprintln(a.p.errOut, sanitizeLine("reading the audit log: "+err.Error()+"; trying again"))
			continue
		}
		if err := writeNew(list); err != nil {
			return err
		}
	}
}

// readAuditSince returns the entries since followOverlap before last, the newest first.
func readAuditSince(ctx context.Context, op admin.Operator, filter admin.AuditFilter, last time.Time) ([]admin.AuditEntry, error) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()

	if !last.IsZero() {
		filter.From = last.Add(-followOverlap)
	}
	var all []admin.AuditEntry
	for after := ""; ; {
		page, err := op.Audit(ctx, filter, admin.MaxPage, after)
		if err != nil {
			return nil, err
		}
		all = append(all, page.Items...)
		if after = page.Next; after == "" {
			return all, nil
		}
	}
}

func (a *operatorCommand) writeAuditEntry(entry admin.AuditEntry) error {
	if a.json {
		return json.NewEncoder(a.p.out).Encode(entry)
	}
	_, err := fmt.Fprintf(a.p.out, "%s %-22s %-12s %-16s %s\n", formatLocal(&entry.At), sanitizeLine(entry.Kind),
		sanitizeLine(entry.Watcher), sanitizeLine(cmp.Or(entry.Actor, entry.Node)), sanitizeLine(formatFields(entry.Fields)))
	return err
}

// trimmedAudit is the output of `outrelay audit trim --json`.
type trimmedAudit struct {
	DryRun  bool  `json:"dry_run"`
	Removed int64 `json:"removed"`
}

func newAuditTrimCommand(program *program) *cobra.Command {
	var keep int
	cmd := &cobra.Command{
		Use:   "trim --keep N",
		Short: "Remove the oldest entries of the audit log",
		Long: `Remove all entries of the audit log except the newest N, for all watchers. Once an hour, a relay
removes all but the newest 10,000, and the server removes entries after 30 days.`,
		Args: noArgs,
	}

	action := program.addChangeFlags(cmd)
	cmd.Flags().IntVar(&keep, "keep", 0, "how many of the newest entries stay")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if keep < 1 {
			return errors.New("--keep is missing: pass how many of the newest entries stay, at least 1")
		}
		return action.withOperator(cmd.Context(), func(ctx context.Context, op admin.Operator) error { return action.trimEvents(ctx, op, keep) })
	}
	return cmd
}

// trimEvents counts the entries, asks for confirmation and removes them.
func (a *operatorCommand) trimEvents(ctx context.Context, op admin.Operator, keep int) error {
	// One entry is enough: only the total counts.
	page, err := op.Audit(ctx, admin.AuditFilter{}, 1, "")
	if err != nil {
		return err
	}

	out := trimmedAudit{DryRun: a.dryRun, Removed: max(page.Total-int64(keep), 0)}
	if !a.dryRun && out.Removed > 0 {
		action := fmt.Sprintf("remove the oldest %s entries of the audit log", formatThousands(out.Removed))
		if err := a.confirm(ctx, action); err != nil {
			return err
		}
		if out.Removed, err = op.TrimAudit(ctx, keep); err != nil {
			return err
		}
	}

	return a.printLine(out, "%s %s entries", a.chooseText("removed", "would remove"), formatThousands(out.Removed))
}
