// Command outrelay relays the events of MongoDB outbox collections to Kafka.
//
// Exit codes: 0 after a graceful end, 1 when the configuration or the command line is wrong or a check fails, 75 when it
// may work later. Documents meant for programs (JSON, YAML, completions) go to standard output, everything else to
// standard error. The first interrupt or SIGTERM ends gracefully, the second at once.
package main

import (
	"context"
	"os"
)

func main() {
	os.Exit(runCommandLine(context.Background(), os.Args[1:], os.Environ(), os.Stdin, os.Stdout, os.Stderr))
}
