// Command outrelay relays the events of MongoDB outbox collections to Kafka.
//
// exitTable lists the exit codes. The result of a command goes to standard output, progress, questions,
// warnings and errors to standard error. The first interrupt or SIGTERM ends the command gracefully, the second ends it at once.
package main

import (
	"context"
	"os"

	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/pkg/bearer/msk"
)

func main() {
	connect.NewMSKToken = msk.Token
	os.Exit(runCommandLine(context.Background(), os.Args[1:], os.Environ(), os.Stdin, os.Stdout, os.Stderr))
}
