package bench

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/internal/service/transport/kafkago"
	"github.com/outrelay/outrelay/pkg/event"
)

const (
	// readerPart is the divisor for the records of the loop with one transaction each. All records would take
	// too long.
	readerPart = 4
	// alonePart is the divisor for the records by which single transactions are timed.
	alonePart = 10

	publishBatch = 1000
)

// ConsumerResult has the medians of the runs of a benchmark of the consumer.
type ConsumerResult struct {
	ReaderEPS   float64 `json:"naive_eps"`    // records per second of a loop with kafka-go's Reader, one transaction each
	ConsumerEPS float64 `json:"consumer_eps"` // of a handler with the same effect, the inbox and up to 64 messages in a transaction
	Ratio       float64 `json:"ratio"`        // consumer ÷ naive, of the same run
	MarkedEPS   float64 `json:"marked_eps"`   // of the same loop with a mark, so that a duplicate has no second effect either
	MarkedRatio float64 `json:"marked_ratio"` // consumer ÷ marked, of the same run
	NoneEPS     float64 `json:"none_eps"`     // of the handler without an inbox, but also in transactions
	InboxRatio  float64 `json:"inbox_ratio"`  // consumer ÷ none, of the same run

	PerTransaction float64 `json:"messages_per_transaction"` // of the consumer

	UnbatchedEPS   float64 `json:"unbatched_eps"`   // of the consumer with one message in a transaction, the default
	UnbatchedRatio float64 `json:"unbatched_ratio"` // unbatched ÷ naive, of the same run

	// One message per transaction, one transaction at a time, from start to commit, without and with the inbox.
	NoneP50     float64 `json:"none_p50_ms"`
	NoneP99     float64 `json:"none_p99_ms"`
	InboxP50    float64 `json:"inbox_p50_ms"`
	InboxP99    float64 `json:"inbox_p99_ms"`
	OverheadP50 float64 `json:"overhead_p50_ms"` // of the inbox: the difference
	OverheadP99 float64 `json:"overhead_p99_ms"`

	// CPU time of the process and of both servers per record, in milliseconds.
	ReaderCPU          float64 `json:"naive_cpu_ms"`
	ReaderServersCPU   float64 `json:"naive_servers_cpu_ms"`
	ConsumerCPU        float64 `json:"consumer_cpu_ms"`
	ConsumerServersCPU float64 `json:"consumer_servers_cpu_ms"`

	OtherCPU

	Events  int `json:"events"`
	Payload int `json:"payload_bytes"`
	Runs    int `json:"runs"`
}

// RunConsumer compares a handler with an inbox and a loop without one. It takes minutes. The end of ctx
// interrupts it.
func RunConsumer(ctx context.Context, options Options) (res ConsumerResult, err error) {
	err = options.withServers(ctx, func(bench *bench) error {
		topic, err := bench.writeRecords(ctx)
		if err != nil {
			return err
		}
		defer bench.cluster.deleteTopic(context.WithoutCancel(ctx), topic)

		bench.logProgress("warming the servers up")
		warm, n := figures{}, max(bench.Events/alonePart, 1)
		// The children of one record each are slow, so they drain a part of the topic.
		if _, err := bench.drainBy(ctx, "warm", spec{Mode: modeHandler, Topic: topic, Events: n, Handling: handling{Inbox: true}}, 0, warm); err != nil {
			return err
		}

		got, otherCPU := figures{}, figures{}
		for run := 1; run <= bench.Runs; run++ {
			for _, step := range []struct {
				name string
				spec
			}{
				{"naive", spec{Mode: modeReader, Events: max(bench.Events/readerPart, 1)}},
				{"marked", spec{Mode: modeReader, Events: max(bench.Events/readerPart, 1), Handling: handling{Marked: true}}},
				{"consumer", spec{Mode: modeHandler, Events: bench.Events, Handling: handling{Inbox: true}}},
				{"unbatched", spec{Mode: modeHandler, Events: max(bench.Events/readerPart, 1), Handling: handling{Inbox: true, Unbatched: true}}},
				{"none", spec{Mode: modeHandler, Events: bench.Events}},
				{"alone_none", spec{Mode: modeHandler, Events: n, Handling: handling{Alone: true}}},
				{"alone_inbox", spec{Mode: modeHandler, Events: n, Handling: handling{Inbox: true, Alone: true}}},
			} {
				step.Topic = topic
				reading, err := bench.drainBy(ctx, step.name, step.spec, run, got)
				if err != nil {
					return fmt.Errorf("%s: %w", step.name, err)
				}
				if reading.known {
					otherCPU.addValue(step.name, reading.otherCPU)
				}
				bench.logProgress("run %d of %d: %-11s %s  CPU of others %.1f %%", run, bench.Runs, step.name, reading.words, reading.otherCPU)
			}
		}

		res = newConsumerResult(bench.Options, got, otherCPU)
		return nil
	})
	return res, err
}

// writeRecords creates a topic with the records for all drains.
func (b *bench) writeRecords(ctx context.Context) (string, error) {
	b.logProgress("writing %d records of %d bytes", b.Events, b.Payload)
	topic, err := b.newTopic(ctx, "consumed")
	if err != nil {
		return "", err
	}

	connected, err := kafkago.New(transport.Config{Brokers: b.Kafka, ClientID: clientID})
	if err != nil {
		return "", err
	}
	defer connected.Close()

	batch := make([]transport.Record, 0, publishBatch)
	for i := range b.Events {
		batch = append(batch, transport.Record{Key: []byte(orderingKey(i)), Value: newPayload(i, b.Payload), Headers: []event.Header{
			{Key: "id", Value: []byte(uuid.Must(uuid.NewV7()).String())}, {Key: "type", Value: []byte(eventType)},
		}})

		if len(batch) < publishBatch && i < b.Events-1 {
			continue
		}
		if err := connected.Publish(ctx, topic, batch); err != nil {
			return "", fmt.Errorf("writing records: %w", err)
		}
		batch = batch[:0]
	}
	return topic, nil
}

// drainBy makes a child drain the topic with a new group, inbox and collection, and counts the effects.
func (b *bench) drainBy(ctx context.Context, name string, spec spec, run int, got figures) (meterReading, error) {
	var reading meterReading
	spec.MongoDB, spec.Kafka, spec.Payload = b.MongoDB, b.Kafka, b.Payload
	spec.DB, spec.Collection = b.newStateDB(fmt.Sprintf("%s%d", name, run)), "effects"
	spec.Group = fmt.Sprintf("%s.%s%d", b.db, name, run)
	for _, name := range []string{spec.Collection, marksCollection} {
		if err := b.client.Database(spec.DB).CreateCollection(ctx, name); err != nil {
			return reading, fmt.Errorf("creating %s.%s: %w", spec.DB, name, err)
		}
	}

	child, err := b.startChild(ctx, spec)
	if err != nil {
		return reading, err
	}
	defer child.stopProcess()

	meter := startMeter(append(b.serverPIDs(), child.pid())...)
	if err := child.startWork(); err != nil {
		return reading, err
	}
	outcome, err := child.readOutcome()
	if err != nil {
		return reading, err
	}

	// A result with missing or repeated effects must not be reported as a rate.
	var list []struct{ Number int }
	cursor, err := b.client.Database(spec.DB).Collection(spec.Collection).Find(ctx, bson.D{})
	if err == nil {
		err = cursor.All(ctx, &list)
	}
	if err != nil {
		return reading, fmt.Errorf("reading the effects: %w", err)
	}
	distinct := map[int]bool{}
	for _, effect := range list {
		distinct[effect.Number] = true
	}
	if err := spec.checkEffects(len(list), len(distinct)); err != nil {
		return reading, err
	}

	eps := perSecond(outcome.Events, outcome.Began, outcome.Ended)
	each := func(pids ...int) float64 { return 1000 * meter.measureUsed(pids...) / float64(outcome.Events) }
	for what, v := range map[string]float64{
		"eps": eps, "p50": outcome.P50, "p99": outcome.P99, "per": float64(outcome.Events) / float64(max(outcome.Goes, 1)),
		"stall": outcome.Stall, "stalled": outcome.Stalled, "cpu": each(child.pid()), "servers": each(b.serverPIDs()...),
	} {
		got.addValue(name+"_"+what, v)
	}
	return newReading(meter, "%8.0f/s  p50 %.2f ms  p99 %.2f ms of a transaction, %.1f messages in each  %.3f ms CPU for each, servers %.3f",
		eps, outcome.P50, outcome.P99, float64(outcome.Events)/float64(max(outcome.Goes, 1)), each(child.pid()), each(b.serverPIDs()...)), nil
}

// checkEffects returns an error if the effects are not those of as many records. Without marks, a repeated record repeats its effect.
func (s spec) checkEffects(effects, records int) error {
	once := s.Handling.Inbox || s.Handling.Marked
	if records < s.Events || once && effects != records {
		return fmt.Errorf("%d effects of %d records, want %d records", effects, records, s.Events)
	}
	return nil
}

// newConsumerResult returns the medians of the figures.
func newConsumerResult(options Options, got, otherCPU figures) ConsumerResult {
	med := func(name string, decimals int) float64 { return round(median(got[name]), decimals) }
	result := ConsumerResult{
		ReaderEPS: med("naive_eps", 0), ConsumerEPS: med("consumer_eps", 0), NoneEPS: med("none_eps", 0),
		Ratio: got.medianRatio("consumer_eps", "naive_eps"), InboxRatio: got.medianRatio("consumer_eps", "none_eps"),
		MarkedEPS: med("marked_eps", 0), MarkedRatio: got.medianRatio("consumer_eps", "marked_eps"),
		PerTransaction: med("consumer_per", 1),
		UnbatchedEPS:   med("unbatched_eps", 0), UnbatchedRatio: got.medianRatio("unbatched_eps", "naive_eps"),
		NoneP50: med("alone_none_p50", 3), NoneP99: med("alone_none_p99", 3), InboxP50: med("alone_inbox_p50", 3), InboxP99: med("alone_inbox_p99", 3),
		ReaderCPU: med("naive_cpu", 3), ReaderServersCPU: med("naive_servers", 3), ConsumerCPU: med("consumer_cpu", 3), ConsumerServersCPU: med("consumer_servers", 3),
		OtherCPU: newOtherCPU(otherCPU), Events: options.Events, Payload: options.Payload, Runs: options.Runs,
	}
	result.OverheadP50, result.OverheadP99 = round(result.InboxP50-result.NoneP50, 3), round(result.InboxP99-result.NoneP99, 3)
	return result
}

// Print writes the result as a table for people.
func (r ConsumerResult) Print(out io.Writer) error {
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(table, "%s\t%s\n", name, fmt.Sprintf(format, args...))
	}
	fmt.Fprintf(table, "\n%d records of %d bytes, medians of %d runs\t\n", r.Events, r.Payload, r.Runs)
	row("loop around a Reader", "%.0f records/s, one transaction for each; CPU %.3f ms for each, servers %.3f", r.ReaderEPS, r.ReaderCPU, r.ReaderServersCPU)
	row("the loop with a mark", "%.0f records/s; the consumer with inbox %.2f times as many", r.MarkedEPS, r.MarkedRatio)
	row("consumer with inbox", "%.0f records/s, %.2f times as many; %.1f in a transaction; CPU %.3f ms for each, servers %.3f", r.ConsumerEPS, r.Ratio, r.PerTransaction, r.ConsumerCPU, r.ConsumerServersCPU)
	row("one in a transaction", "%.0f records/s, %.2f times as many as the loop", r.UnbatchedEPS, r.UnbatchedRatio)
	row("without inbox", "%.0f records/s; with it %.2f of that", r.NoneEPS, r.InboxRatio)
	row("one at a time", "p50 %.2f ms, p99 %.2f ms without inbox; p50 %.2f ms, p99 %.2f ms with it", r.NoneP50, r.NoneP99, r.InboxP50, r.InboxP99)
	row("overhead of the inbox", "p50 %.2f ms, p99 %.2f ms", r.OverheadP50, r.OverheadP99)

	row("CPU of others", "%s", r.describeOtherCPU())
	return table.Flush()
}
