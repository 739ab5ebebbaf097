package main

import (
	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/doctor"
)

func newDoctorCommand(p *program) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Check everything outside of outrelay, with what mends each finding",
		Long: `Check replica set, privileges, oplog, indexes, write concern, clocks, brokers, topics and ACLs. Each line says what was
found; one that warns or failed also says why it matters and what mends it. Nothing is changed, and a relay that runs is
not disturbed. Exit code 1 if a check fails. It takes at most ` + doctor.Limit.String() + `.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, _, err := p.loadWithLogger()
			if err != nil {
				return err
			}
			r, err := doctor.Run(c.Context(), cfg)
			if err != nil {
				return err
			}
			if asJSON {
				err = printJSON(p.out, r)
			} else {
				err = r.Print(p.errOut)
			}
			if err == nil && r.Failed() {
				return reportedError(exitConfig)
			}
			return err
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object on standard output")
	return c
}
