package main

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/app"
)

// statusTimeout bounds what an operator waits for.
const statusTimeout = 10 * time.Second

func newStatusCommand(p *program) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "status",
		Short: "Show who runs each watcher, how far behind it is and what waits",
		Long: `Show every watcher of the state database: owner, epoch, lag, rate and the targets that wait. It reads the watcher
documents, so it works from any machine that reaches MongoDB and needs no way to the processes.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, _, err := p.loadAndLog()
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(c.Context(), statusTimeout)
			defer cancel()
			state, closeClient, err := app.StateDatabase(cfg)
			if err != nil {
				return err
			}
			defer closeClient()
			s, err := admin.ReadStatus(ctx, state)
			if err != nil {
				return temporary(unanswered(err))
			}
			if asJSON {
				return printJSON(p.out, s)
			}
			return printStatus(p.errOut, s)
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object on standard output")
	return c
}

// unanswered says where to look when the state database cannot be asked: doctor tells a wrong address from a wrong password.
func unanswered(err error) error {
	return fmt.Errorf("the state database cannot be asked; run outrelay doctor, which says why and what mends it (%w)", err)
}

func printStatus(w io.Writer, s admin.Status) error {
	if len(s.Watchers) == 0 {
		_, err := fmt.Fprintln(w, "no watcher has ever run with this state database")
		return err
	}
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "WATCHER\tSLOT\tOWNER\tEPOCH\tUNTIL\tSTATE\tLAG\tRATE\tTOKEN AGE\tUNRESOLVED")
	for _, x := range s.Watchers {
		owner := x.Node
		if x.Owner == "" {
			owner = "-"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%+.1f s\t%s\t%.2f s\t%.0f/s\t%.1f s\t%d\n",
			x.Name, x.Slot, owner, x.Epoch, float64(x.ExpiresInMS)/1000, x.State, x.LagS, x.Rate, x.TokenAgeS, x.Unresolved)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, x := range s.Watchers {
		if x.Reason != "" {
			fmt.Fprintf(w, "%s/%s: %s\n", x.Name, x.Slot, x.Reason)
		}
		for _, b := range x.Blocked {
			verb := "waits"
			if b.Parked {
				verb = "is parked"
			}
			fmt.Fprintf(w, "%s/%s: topic %q %s since %s with %d envelopes: %s\n", x.Name, x.Slot, b.Topic, verb, b.Since.Local().Format(time.TimeOnly), b.Count, b.Reason)
		}
	}
	return nil
}
