package main

import (
	"strings"

	"github.com/spf13/cobra"
)

// formerCommands are former commands with their successors.
var formerCommands = map[string]string{"outrelay events": "outrelay audit", "outrelay migrate": "outrelay setup"}

// formerFlags are former flags of a command and of the commands below it, with their successors.
var formerFlags = map[string]string{
	"outrelay dead --state":    "--requeued",
	"outrelay waiting --state": "--reason",
	"outrelay recover --adopt": "--accept-copy",
}

// findSuccessorOfFlag returns the successor of a former flag of the command, or "".
func findSuccessorOfFlag(cmd *cobra.Command, flag string) string {
	for former, successor := range formerFlags {
		if of, found := strings.CutSuffix(former, " --"+flag); found && strings.HasPrefix(cmd.CommandPath()+" ", of+" ") {
			return successor
		}
	}
	return ""
}
