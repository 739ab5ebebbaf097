//go:build !release

package main

import "github.com/spf13/cobra"

// developmentCommands returns the constructors of the commands for trying out and measuring outrelay.
// They can download and start servers, so a release build leaves them out.
func developmentCommands() []func(*program) *cobra.Command {
	return []func(*program) *cobra.Command{
		newDevCommand,
		newDevMemberCommand,
		newBenchCommand,
		newBenchChildCommand,
		newBenchRelayCommand,
	}
}
