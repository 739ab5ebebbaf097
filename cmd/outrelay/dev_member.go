//go:build !release

package main

import (
	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/demo/member"
)

// newDevMemberCommand is what the scenarios of dev start as a service on the other side of Kafka. SIGTERM ends it.
func newDevMemberCommand(p *program) *cobra.Command {
	return &cobra.Command{
		Use: member.Command, Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			s, err := member.Parse(args[0])
			if err != nil {
				return err
			}
			return temporary(member.Run(c.Context(), s, p.errOut))
		},
	}
}
