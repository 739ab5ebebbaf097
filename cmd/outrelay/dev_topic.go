//go:build !release

package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/lab/devstack"
)

func newDevTopicCommand(program *program) *cobra.Command {
	var count int
	cmd := &cobra.Command{
		Use:   "topic TOPIC --brokers HOST:PORT",
		Short: "Print the records of a topic, one line each, until Ctrl-C",
		Long: `Print the records of a topic from its first record on, and then each new record, until Ctrl-C:
partition@offset, key, headers and value. outrelay dev prints the addresses of the brokers. The
command uses no consumer group and no login. If the topic does not exist yet, the command
waits for it.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			brokers := program.namedFlags["kafka.brokers"].Value.String()
			if brokers == "" {
				return errors.New("--brokers is missing: pass the address of Kafka that `outrelay dev` prints")
			}
			if count < 0 {
				return fmt.Errorf("--count %d: expected 0 or more", count)
			}

			// The command ends with Ctrl-C and reports each problem while it runs, so it has no error to return.
			program.printTopic(cmd.Context(), strings.Split(brokers, ","), args[0], count)
			return nil
		},
	}
	cmd.Flags().IntVarP(&count, "count", "n", 0, "end after `N` records; 0: until Ctrl-C")
	return cmd
}

// printTopic prints the records of a topic until ctx ends, or until count records are printed if count is positive.
func (p *program) printTopic(ctx context.Context, brokers []string, topic string, count int) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()

	var mu sync.Mutex
	printed := 0
	devstack.Tail(ctx, brokers, []string{topic}, func(message devstack.Message) {
		mu.Lock()
		defer mu.Unlock()
		if count > 0 && printed == count {
			return
		}

		fmt.Fprintln(p.out, formatMessage(message))
		printed++
		if printed == count {
			stop()
		}
	})
}

// formatMessage returns a record as one line.
func formatMessage(message devstack.Message) string {
	var headers []string
	for _, h := range message.Headers {
		headers = append(headers, h.Key+"="+formatBytes(h.Value))
	}
	return fmt.Sprintf("%d@%d  key=%s  {%s}  %s", message.Partition, message.Offset, formatBytes(message.Key), strings.Join(headers, " "), formatBytes(message.Value))
}

// formatBytes returns printable text unchanged and quotes everything else.
func formatBytes(data []byte) string {
	if data == nil {
		return "null"
	}
	text := string(data)
	if !utf8.ValidString(text) || strings.ContainsFunc(text, func(char rune) bool { return !unicode.IsPrint(char) }) {
		return strconv.Quote(text)
	}
	return text
}
