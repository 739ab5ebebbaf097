package bench

import (
	"context"
	"errors"
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

	ForeignCPU

	Events  int `json:"events"`
	Payload int `json:"payload_bytes"`
	Runs    int `json:"runs"`
}

// RunConsumer compares a handler with an inbox and a loop without one. It takes minutes. The end of ctx
// interrupts it.
func RunConsumer(ctx context.Context, o Options) (res ConsumerResult, err error) {
	err = o.withServers(ctx, func(b *bench) error {
		topic, err := b.writeRecords(ctx)
		if err != nil {
			return err
		}
		defer b.cluster.deleteTopic(context.WithoutCancel(ctx), topic)

		b.logProgress("warming the servers up")
		warm, n := figures{}, max(b.Events/alonePart, 1)
		// The children of one record each are slow, so they drain a part of the topic.
		if _, err := b.drainBy(ctx, "warm", spec{Mode: modeHandler, Topic: topic, Events: n, Handling: handling{Inbox: true}}, 0, warm); err != nil {
			return err
		}

		got, foreign := figures{}, figures{}
		for run := 1; run <= b.Runs; run++ {
			for _, step := range []struct {
				name string
				spec
			}{
				{"naive", spec{Mode: modeReader, Events: max(b.Events/readerPart, 1)}},
				{"consumer", spec{Mode: modeHandler, Events: b.Events, Handling: handling{Inbox: true}}},
				{"unbatched", spec{Mode: modeHandler, Events: max(b.Events/readerPart, 1), Handling: handling{Inbox: true, Unbatched: true}}},
				{"none", spec{Mode: modeHandler, Events: b.Events}},
				{"alone_none", spec{Mode: modeHandler, Events: n, Handling: handling{Alone: true}}},
				{"alone_inbox", spec{Mode: modeHandler, Events: n, Handling: handling{Inbox: true, Alone: true}}},
			} {
				step.Topic = topic
				m, err := b.drainBy(ctx, step.name, step.spec, run, got)
				if err != nil {
					return fmt.Errorf("%s: %w", step.name, err)
				}
				if m.known {
					foreign.addValue(step.name, m.foreign)
				}
				b.logProgress("run %d of %d: %-11s %s  foreign CPU %.1f %%", run, b.Runs, step.name, m.words, m.foreign)
			}
		}

		res = newConsumerResult(b.Options, got, foreign)
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

	t, err := kafkago.New(transport.Config{Brokers: b.Kafka, ClientID: clientID})
	if err != nil {
		return "", err
	}
	defer t.Close()

	batch := make([]transport.Record, 0, publishBatch)
	for i := range b.Events {
		batch = append(batch, transport.Record{Key: []byte(orderingKey(i)), Value: newPayload(i, b.Payload), Headers: []event.Header{
			{Key: "id", Value: []byte(uuid.Must(uuid.NewV7()).String())}, {Key: "type", Value: []byte(eventType)},
		}})

		if len(batch) < publishBatch && i < b.Events-1 {
			continue
		}
		if err := t.Publish(ctx, topic, batch); err != nil {
			return "", fmt.Errorf("writing records: %w", err)
		}
		batch = batch[:0]
	}
	return topic, nil
}

// drainBy makes a child drain the topic with a new group, inbox and collection, and counts the effects.
func (b *bench) drainBy(ctx context.Context, name string, s spec, run int, got figures) (meterReading, error) {
	var r meterReading
	s.MongoDB, s.Kafka, s.Payload = b.MongoDB, b.Kafka, b.Payload
	s.DB, s.Collection = b.newStateDB(fmt.Sprintf("%s%d", name, run)), "effects"
	s.Group = fmt.Sprintf("%s.%s%d", b.db, name, run)
	if err := b.client.Database(s.DB).CreateCollection(ctx, s.Collection); err != nil {
		return r, fmt.Errorf("creating %s.%s: %w", s.DB, s.Collection, err)
	}

	c, err := b.startChild(ctx, s)
	if err != nil {
		return r, err
	}
	defer c.stopProcess()

	m := startMeter(append(b.serverPIDs(), c.pid())...)
	if err := c.startWork(); err != nil {
		return r, err
	}
	o, err := c.readOutcome()
	if err != nil {
		return r, err
	}

	// A result with missing effects must not be reported as a rate.
	n, err := b.client.Database(s.DB).Collection(s.Collection).CountDocuments(ctx, bson.D{})
	if err == nil && int(n) < s.Events {
		err = errors.New("effects are missing")
	}
	if err != nil {
		return r, fmt.Errorf("%d effects of %d records: %w", n, s.Events, err)
	}

	eps := perSecond(o.Events, o.Began, o.Ended)
	each := func(pids ...int) float64 { return 1000 * m.measureUsed(pids...) / float64(o.Events) }
	for what, v := range map[string]float64{
		"eps": eps, "p50": o.P50, "p99": o.P99, "per": float64(o.Events) / float64(max(o.Goes, 1)),
		"stall": o.Stall, "stalled": o.Stalled, "cpu": each(c.pid()), "servers": each(b.serverPIDs()...),
	} {
		got.addValue(name+"_"+what, v)
	}
	return newReading(m, "%8.0f/s  p50 %.2f ms  p99 %.2f ms of a transaction, %.1f messages in each  %.3f ms CPU for each, servers %.3f",
		eps, o.P50, o.P99, float64(o.Events)/float64(max(o.Goes, 1)), each(c.pid()), each(b.serverPIDs()...)), nil
}

// newConsumerResult returns the medians of the figures.
func newConsumerResult(o Options, got, foreign figures) ConsumerResult {
	med := func(name string, decimals int) float64 { return round(median(got[name]), decimals) }
	r := ConsumerResult{
		ReaderEPS: med("naive_eps", 0), ConsumerEPS: med("consumer_eps", 0), NoneEPS: med("none_eps", 0),
		Ratio: got.medianRatio("consumer_eps", "naive_eps"), InboxRatio: got.medianRatio("consumer_eps", "none_eps"),
		PerTransaction: med("consumer_per", 1),
		UnbatchedEPS:   med("unbatched_eps", 0), UnbatchedRatio: got.medianRatio("unbatched_eps", "naive_eps"),
		NoneP50: med("alone_none_p50", 3), NoneP99: med("alone_none_p99", 3), InboxP50: med("alone_inbox_p50", 3), InboxP99: med("alone_inbox_p99", 3),
		ReaderCPU: med("naive_cpu", 3), ReaderServersCPU: med("naive_servers", 3), ConsumerCPU: med("consumer_cpu", 3), ConsumerServersCPU: med("consumer_servers", 3),
		ForeignCPU: newForeignCPU(foreign), Events: o.Events, Payload: o.Payload, Runs: o.Runs,
	}
	r.OverheadP50, r.OverheadP99 = round(r.InboxP50-r.NoneP50, 3), round(r.InboxP99-r.NoneP99, 3)
	return r
}

// Print writes the result as a table for people.
func (r ConsumerResult) Print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	row := func(name, format string, args ...any) { fmt.Fprintf(t, "%s\t%s\n", name, fmt.Sprintf(format, args...)) }
	fmt.Fprintf(t, "\n%d records of %d bytes, medians of %d runs\t\n", r.Events, r.Payload, r.Runs)
	row("loop around a Reader", "%.0f records/s, one transaction for each; CPU %.3f ms for each, servers %.3f", r.ReaderEPS, r.ReaderCPU, r.ReaderServersCPU)
	row("consumer with inbox", "%.0f records/s, %.2f times as many; %.1f in a transaction; CPU %.3f ms for each, servers %.3f", r.ConsumerEPS, r.Ratio, r.PerTransaction, r.ConsumerCPU, r.ConsumerServersCPU)
	row("one in a transaction", "%.0f records/s, %.2f times as many as the loop", r.UnbatchedEPS, r.UnbatchedRatio)
	row("without inbox", "%.0f records/s; with it %.2f of that", r.NoneEPS, r.InboxRatio)
	row("one at a time", "p50 %.2f ms, p99 %.2f ms without inbox; p50 %.2f ms, p99 %.2f ms with it", r.NoneP50, r.NoneP99, r.InboxP50, r.InboxP99)
	row("overhead of the inbox", "p50 %.2f ms, p99 %.2f ms", r.OverheadP50, r.OverheadP99)

	row("foreign CPU", "%s", r.describeForeign())
	return t.Flush()
}
