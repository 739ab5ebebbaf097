package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func newTopicsCommand(program *program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "topics",
		Short: "Show rate, latency, last record, waiting events and dead letters by topic",
		Long: `Show the topics of the watcher: records per second, the time from the commit in MongoDB to the ack of
Kafka, the place of the last record, waiting events, and dead letters of the relay and of handlers.
Rates and latencies cover the last minute. The owner reports them every five seconds while
records are acked. The busiest 100 topics are listed, and topics with waiting events or dead letters
before others. The command reads only MongoDB.`,
		Args: noArgs,
	}

	action := program.addReadFlags(cmd)
	setShow(cmd, action, func(ctx context.Context, op admin.Operator, _ []string) (admin.TopicList, error) {
		return op.Activity().Topics(ctx)
	}, writeTopics)
	cmd.AddCommand(newTopicsRecentCommand(program), newTopicsCreateCommand(program))
	return cmd
}

func writeTopics(out io.Writer, list admin.TopicList) {
	head := "TOPIC\tRATE\tBYTES\tP50\tP99\tLAST\tPLACE\tWAITING\tDEAD\tHANDLERS\tWHY"
	writeList(out, "no topic has had a record, a waiting event or a dead letter yet", head, list.Topics, func(figures admin.TopicFigures) cells {
		last, place, why := "-", "-", ""
		if figures.LastAt != nil {
			last = formatAge(time.Since(*figures.LastAt).Seconds()) + " ago"
			place = formatPlace(figures.LastPartition, figures.LastOffset)
		}
		if figures.Target != nil {
			why = figures.Target.Reason
		}
		// Dead letters without a topic failed before routing.
		return cells{
			cmp.Or(figures.Topic, "(none)"), fmt.Sprintf("%.1f/s", figures.Rate), fmt.Sprintf("%.1f KiB/s", figures.BytesRate/1024),
			formatLatency(&figures.P50MS), formatLatency(&figures.P99MS), last, place,
			formatThousands(figures.Waiting), formatThousands(figures.Dead), formatThousands(figures.HandlerDead), why,
		}
	})

	if list.Others.Topics > 0 {
		fmt.Fprintf(out, "%d more topics, %.1f/s\n", list.Others.Topics, list.Others.Rate)
	}
	if list.LettersMore {
		fmt.Fprintln(out, "a collection has more than 10,000 dead letters; the others are not counted here")
	}
}

// formatPlace formats a partition and an offset.
func formatPlace(partition int32, offset int64) string {
	return strconv.Itoa(int(partition)) + "@" + strconv.FormatInt(offset, 10)
}

// formatLatency formats milliseconds. 0 and nil mean that nothing was measured.
func formatLatency(ms *float64) string {
	switch {
	case ms == nil || *ms == 0:
		return "-"
	case *ms < 1000:
		return strings.TrimSuffix(fmt.Sprintf("%.1f", *ms), ".0") + " ms"
	}
	return formatAge(*ms / 1000)
}

func newTopicsRecentCommand(program *program) *cobra.Command {
	var topic string
	cmd := &cobra.Command{
		Use:   "recent",
		Short: "List a sample of the last delivered events with their places in Kafka",
		Long: `List the last delivered events, newest first: id, type, key, topic, partition, offset, and the time
from the commit to the ack. The owner samples the first ten events of each second and keeps the last
50 for each slot, without payloads. So the list is complete for a quiet watcher, and a sample of a
busy one. outrelay lookup ID shows everything else about an event.`,
		Args: noArgs,
	}

	action := program.addReadFlags(cmd)
	cmd.Flags().StringVar(&topic, "topic", "", "only this `topic`")
	setShow(cmd, action, func(ctx context.Context, op admin.Operator, _ []string) (admin.RecentEvents, error) {
		return op.Activity().Recent(ctx, topic)
	}, writeRecent)
	return cmd
}

func writeRecent(out io.Writer, list admin.RecentEvents) {
	head := "ACKED\tID\tTYPE\tKEY\tTOPIC\tPLACE\tCOMMITTED\tLATENCY"
	writeList(out, "no delivered event is known", head, list.Events, func(event admin.RecentEvent) cells {
		committed := "-"
		if !event.CommittedAt.IsZero() {
			committed = event.CommittedAt.Local().Format(clockWithMillis)
		}
		return cells{
			event.AckedAt.Local().Format(clockWithMillis), quoteArgument(event.ID), event.Type, event.Key, event.Topic,
			formatPlace(event.Partition, event.Offset), committed, formatLatency(event.LatencyMS),
		}
	})
}

func newTopicsCreateCommand(program *program) *cobra.Command {
	var order admin.TopicOrder
	cmd := &cobra.Command{
		Use:   "create TOPIC",
		Short: "Create a topic in Kafka, with the settings of topics.create",
		Long: `Create a topic in Kafka, with the partitions, the replication and the configs of topics.create, or the
defaults of the brokers. The flags replace the numbers. Events that wait for the topic are sent within
about a second. The Kafka login needs the right CREATE on the topic.

A topic that exists gets partitions if the owner reports that it has fewer than it had before. That
needs the right ALTER. Any other topic that exists is an error.

--dry-run lets a broker check the rights and the settings, and prints the command of kafka-topics.sh
that does the same.`,
		Args: exactArgs(1),
	}

	action := program.addChangeFlags(cmd)
	cmd.Flags().IntVar(&order.Partitions, "partitions", 0, "`number` of partitions; default: topics.create.partitions, or that of the brokers")
	cmd.Flags().IntVar(&order.Replication, "replication", 0, "replication `factor`; default: topics.create.replication, or that of the brokers")
	action.setRun(cmd, func(ctx context.Context, op admin.Operator, args []string) error {
		order.Topic = args[0]
		created, err := actConfirmed(ctx, action, func(dryRun bool) (admin.TopicCreated, error) {
			order.DryRun = dryRun
			return op.Activity().CreateTopic(ctx, order)
		}, func(found admin.TopicCreated) string { return describeCreation("create", "add partitions to", found) })
		if err != nil {
			return err
		}
		return action.printResult(created, func(out io.Writer) {
			if created.DryRun {
				fmt.Fprintf(out, "would %s; the same by Kafka's tool:\n%s\n", describeCreation("create", "add partitions to", created), created.Command)
				return
			}
			fmt.Fprintln(out, describeCreation("created", "added partitions to", created))
		})
	})
	return cmd
}

// describeCreation returns a verb, the name of a topic, and its numbers. A topic that exists gets the other verb.
func describeCreation(create, extend string, topic admin.TopicCreated) string {
	name := sanitizeLine(topic.Topic)
	if topic.Extended {
		return fmt.Sprintf("%s topic %s, up to %s", extend, name, countNoun(int64(topic.Partitions), "partition"))
	}

	partitions, replication := "the brokers' number of partitions", "the brokers' replication factor"
	if topic.Partitions > 0 {
		partitions = countNoun(int64(topic.Partitions), "partition")
	}
	if topic.Replication > 0 {
		replication = fmt.Sprintf("replication factor %d", topic.Replication)
	}
	return fmt.Sprintf("%s topic %s with %s and %s", create, name, partitions, replication)
}

const clockWithMillis = "15:04:05.000"
