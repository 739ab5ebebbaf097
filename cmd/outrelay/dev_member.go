//go:build !release

package main

import (
	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/lab/demo/member"
)

// newDevMemberCommand returns the hidden command that the scenarios of dev start as a consuming
// service. SIGTERM ends it.
func newDevMemberCommand(program *program) *cobra.Command {
	return &cobra.Command{
		Use: member.Command, Hidden: true, Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			spec, err := member.Parse(args[0])
			if err != nil {
				return err
			}

			return markTemporary(member.Run(cmd.Context(), spec, program.errOut))
		},
	}
}
