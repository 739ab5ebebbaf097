package main

import (
	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/doctor"
)

func newDoctorCommand(p *program) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Check MongoDB, Kafka and permissions, and print a fix for each problem",
		Long: `Check the replica set, privileges, oplog, indexes, write concern, clocks, brokers, topics and ACLs. Each line shows the
finding of a check. A warning or failure also shows why it matters and how to fix it. The command changes nothing and does
not disturb a running relay. The exit code is 1 if a check fails. The command takes at most ` + doctor.Limit.String() + `.`,
		Args: noArgs,
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
				err = r.Print(p.out)
			}
			// The report has named each failed check, so only the exit code is left.
			if err == nil && r.Failed() {
				return reportedError(exitConfig)
			}
			return err
		},
	}

	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object on standard output")
	return c
}
