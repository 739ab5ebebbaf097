// Command outrelay relays the events of MongoDB outbox collections to Kafka.
//
// Exit codes: 0 after a graceful end, 1 if the configuration or the command line is wrong or a check
// fails, 75 if a later attempt may succeed.
//
// Documents for programs (JSON, YAML, completions) go to standard output, everything else to standard
// error. The first interrupt or SIGTERM ends the command gracefully, the second ends it at once.
package main

import (
	"context"
	"os"

	"github.com/outrelay/outrelay/internal/connect"
	"github.com/outrelay/outrelay/pkg/bearer/msk"
)

func main() {
	connect.NewMSKToken = msk.Token
	os.Exit(runCommandLine(context.Background(), os.Args[1:], os.Environ(), os.Stdin, os.Stdout, os.Stderr))
}
