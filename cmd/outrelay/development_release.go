//go:build release

package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

// developmentCommands returns commands that point to a checkout: release builds contain neither dev nor bench.
func developmentCommands() []func(*program) *cobra.Command {
	missing := func(name string) func(*program) *cobra.Command {
		return func(*program) *cobra.Command {
			return &cobra.Command{
				Use:                name,
				Hidden:             true,
				DisableFlagParsing: true,
				RunE: func(*cobra.Command, []string) error {
					return fmt.Errorf("%s is not part of release builds: run `go run ./cmd/outrelay %s` in a checkout of the repository", name, name)
				},
			}
		}
	}
	return []func(*program) *cobra.Command{missing("dev"), missing("bench")}
}
