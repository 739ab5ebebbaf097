package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func newPingCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ping",
		Short: "Log in to MongoDB and Kafka, and measure how fast they respond",
		Long: `Connect to MongoDB with the configured login, read its clock, and look for the state database. Then
connect and log in to Kafka, and request its list of brokers. The command connects to the servers,
not to an outrelay process. The exit code is 75 if a server does not respond, and 1 if it rejects the login.`,
		Args: noArgs,
	}

	action := program.addReadFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return action.withOperator(cmd.Context(), func(ctx context.Context, op admin.Operator) error {
			pong, err := op.Ping(ctx)
			var kafka *admin.KafkaError
			if errors.As(err, &kafka) && !kafka.Rejected() {
				return markTemporary(err)
			}
			if err != nil {
				return err
			}
			return action.printResult(pong, func(out io.Writer) { writePong(out, pong) })
		})
	}
	return cmd
}

func writePong(out io.Writer, pong admin.Pong) {
	state := noWatcher
	if pong.Storage {
		state = "the state database exists"
	}
	fmt.Fprintf(out, "MongoDB responds in %.1f ms; its clock is %s; %s\n", pong.RoundTripS*1000, pong.Now.Format(time.RFC3339Nano), state)
	if pong.Kafka {
		fmt.Fprintf(out, "Kafka accepts the login in %.1f ms\n", pong.KafkaRoundTripS*1000)
	}
}
