package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/admin"
)

// recoverResult is the answer of outrelay recover --json.
type recoverResult struct {
	Watcher string `json:"watcher"`
	Action  string `json:"action"` // sweep, adopt or release
	DryRun  bool   `json:"dry_run"`
	Done    bool   `json:"done"`
	// Collections is what a sweep will deliver again; it is counted before a question and for a dry run only.
	Collections []admin.Swept `json:"collections,omitempty"`
	Envelopes   int64         `json:"envelopes,omitempty"` // of all collections
	Released    string        `json:"released,omitempty"`  // the collection
}

func newRecoverCommand(p *program) *cobra.Command {
	var adopt bool
	var release, from, slot string
	c := &cobra.Command{
		Use:   "recover",
		Short: "Order a sweep after lost state, adopt copied state, or release a collection",
		Long: `Without a flag, order a sweep: the next owner of the watcher delivers every envelope of the watched collections that
lies at or after --from (default: all they hold), each flagged outrelay-redelivered, and goes on with the stream. It is
for a watcher whose document vanished, or that halted over lost history or a dropped collection. Consumers may see
envelopes a second time, with the same id. What is not delivered yet is swept in any case, and the sweep begins some
minutes earlier for the sake of transactions that were open; --dry-run counts by the same rules.

--adopt makes state that was copied from another replica set this one's. --release NS lets another watcher read NS.`,
		Args: cobra.NoArgs,
	}
	a := p.addChangeFlags(c)
	c.Flags().BoolVar(&adopt, "adopt", false, "make state that was copied from another replica set this one's")
	c.Flags().StringVar(&release, "release", "", "release the claim on a `collection`, as database.collection")
	c.Flags().StringVar(&from, "from", "", "sweep from this `time` on, with its zone, or as in 2h from so long ago; default: everything")
	addSlotFlag(c, &slot)
	c.MarkFlagsMutuallyExclusive("adopt", "release", "from")
	c.RunE = func(c *cobra.Command, _ []string) error {
		at, err := parseZonedPastTime("from", from, time.Now())
		if err != nil {
			return err
		}
		return a.withOperator(c.Context(), func(ctx context.Context, o admin.Operator) error {
			o.Slot = slot
			r := recoverResult{Watcher: o.Watcher, DryRun: a.dryRun, Released: release}
			var err error
			switch {
			case adopt:
				r.Action = "adopt"
				err = a.adoptState(ctx, o)
			case release != "":
				r.Action = "release"
				err = a.releaseCollection(ctx, o, release)
			default:
				r.Action = "sweep"
				err = a.orderSweep(ctx, o, at, &r)
			}
			if err != nil {
				return err
			}
			r.Done = !a.dryRun
			return a.printResult(r, r.printRecovery)
		})
	}
	return c
}

func (a *operatorCommand) adoptState(ctx context.Context, o admin.Operator) error {
	if a.dryRun {
		return nil
	}
	return o.Adopt(ctx)
}

func (a *operatorCommand) releaseCollection(ctx context.Context, o admin.Operator, ns string) error {
	namespaces, err := o.Collections(ctx, ns) // an error where there is no such claim
	if err != nil || a.dryRun || len(namespaces) == 0 {
		return err
	}
	_, err = o.Release(ctx, ns)
	return err
}

// orderSweep counts what it brings before it asks. A document that vanished may have left no collections to count.
func (a *operatorCommand) orderSweep(ctx context.Context, o admin.Operator, from time.Time, r *recoverResult) error {
	if a.dryRun || !a.yes {
		var err error
		if r.Collections, err = o.RecoverPlan(ctx, from); err != nil && !errors.Is(err, admin.ErrNoCollections) {
			return err
		}
		for _, s := range r.Collections {
			r.Envelopes += s.Envelopes
		}
	}
	if a.dryRun {
		return nil
	}
	what := "have " + countNoun(r.Envelopes, "envelope") + " delivered again, with the same ids, which consumers may have seen"
	if r.Collections == nil {
		what = "have everything that it watches delivered again, with the same ids, which consumers may have seen"
	}
	if err := a.confirm(ctx, what); err != nil {
		return err
	}
	return o.Recover(ctx, from)
}

func (r *recoverResult) printRecovery(w io.Writer) (err error) {
	for _, s := range r.Collections {
		if err == nil && r.DryRun {
			_, err = fmt.Fprintf(w, "%s: %s\n", s.Collection, countNoun(s.Envelopes, "envelope"))
		}
	}
	if err != nil {
		return err
	}
	text := map[string][2]string{
		"adopt":   {"its state would be adopted", "its state is adopted; start outrelay run"},
		"release": {r.Released + " would be released", r.Released + " is released"},
		"sweep":   {"a sweep would be ordered; nothing was done", "a sweep is ordered; its next owner does it"},
	}[r.Action]
	if r.DryRun {
		text[1] = text[0]
	}
	_, err = fmt.Fprintf(w, "watcher %s: %s\n", r.Watcher, text[1])
	return err
}
