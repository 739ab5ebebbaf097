package main

import (
	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/doctor"
)

func newDoctorCommand(program *program) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check MongoDB, Kafka and permissions, and print a fix for each problem",
		Long: `Check the replica set, privileges, oplog, indexes, write concern, clocks, brokers, topics and ACLs. Each line shows the
finding of a check. A warning or failure also shows why it matters and how to fix it. The command changes nothing and does
not disturb a running relay. The exit code is 1 if a check fails. The command takes at most ` + doctor.Limit.String() + `.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, _, err := program.loadWithLogger()
			if err != nil {
				return err
			}
			report, err := doctor.Run(cmd.Context(), cfg)
			if err != nil {
				return err
			}

			if asJSON {
				err = printJSON(program.out, report)
			} else {
				err = report.Print(program.out)
			}
			// The report has named each failed check, so only the exit code is left.
			if err == nil && report.Failed() {
				return reportedError(exitConfig)
			}
			return err
		},
	}

	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object on standard output")
	return cmd
}
