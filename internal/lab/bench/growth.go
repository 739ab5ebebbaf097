package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// The two ways to use more than one change stream.
const (
	bySlots    = "slots"    // of one watcher of one outbox, in one process
	byWatchers = "watchers" // as many outboxes, each with a process
)

// DefaultGrowthRate is the number of events per second in all.
const DefaultGrowthRate = 1000

// GrowthResult shows the costs of more change streams at the same rate of events.
type GrowthResult struct {
	Steps []GrowthStep `json:"steps"`
	OtherCPU

	Rate    int `json:"rate"` // events per second
	Payload int `json:"payload_bytes"`
	Runs    int `json:"runs"`
}

// GrowthStep has the figures of a number of change streams.
type GrowthStep struct {
	By string `json:"by"` // slots or watchers
	N  int    `json:"n"`

	// CPU time in microseconds for each event, also of the time in between.
	RelayCPU  float64 `json:"relay_cpu_us"`
	MongodCPU float64 `json:"mongod_cpu_us"`
	BrokerCPU float64 `json:"broker_cpu_us"`

	// WriteConflicts is how often statements met on a document of MongoDB, in 1,000 events.
	WriteConflicts float64 `json:"write_conflicts"`

	P50 float64 `json:"p50_ms"` // from the acknowledged insert to a consumer
	P99 float64 `json:"p99_ms"`
	RSS float64 `json:"rss_mb"` // MiB of all relays, at the end
}

// RunGrowth measures one outbox with 1, 2, … slots, and as many outboxes with a watcher each, at the same rate of events in all. It takes
// minutes. The end of ctx interrupts it.
func RunGrowth(ctx context.Context, options Options) (res GrowthResult, err error) {
	err = options.withServers(ctx, func(bench *bench) error {
		bench.logProgress("warming the servers up")
		if err := bench.measureGrowth(ctx, bySlots, 1, 0, figures{}, figures{}); err != nil {
			return err
		}

		got, otherCPU := figures{}, figures{}
		for run := 1; run <= bench.Runs; run++ {
			for _, n := range bench.Growth {
				for _, way := range []string{bySlots, byWatchers} {
					if err := bench.measureGrowth(ctx, way, n, run, got, otherCPU); err != nil {
						return fmt.Errorf("%d %s: %w", n, way, err)
					}
				}
			}
		}
		res = newGrowthResult(bench, got, otherCPU)
		return nil
	})
	return res, err
}

// measureGrowth starts the relays and inserts at the rate.
func (b *bench) measureGrowth(ctx context.Context, way string, n, run int, got, otherCPU figures) (err error) {
	name := fmt.Sprintf("%s%d-%d", way, n, run)
	tail, relays, colls, err := b.startGrowth(ctx, way, n, name)
	defer func() {
		for _, r := range relays {
			err = errors.Join(err, r.stopProcess())
		}
		if tail != nil {
			tail.consumer.stopReading()
			b.cluster.deleteTopic(context.WithoutCancel(ctx), tail.topic)
		}
	}()
	if err != nil {
		return err
	}

	events := int(b.Duration.Seconds() * DefaultGrowthRate)
	shots, err := newShots(b.reserveNumbers(events), events, b.Payload)
	if err != nil {
		return err
	}
	tail.shots.Store(shots)

	pids := b.serverPIDs()
	for _, r := range relays {
		pids = append(pids, r.pid())
	}
	conflicts, err := b.countWriteConflicts(ctx)
	if err != nil {
		return err
	}
	meter, before := startMeter(pids...), relaysUsage(relays)
	if err := shots.insertAtRate(ctx, DefaultGrowthRate, colls...); err != nil {
		return err
	}
	if err := shots.awaitArrivals(ctx, func() error { return errors.Join(checkAllRunning(relays), tail.consumer.failure()) }); err != nil {
		return err
	}

	after, key := relaysUsage(relays), fmt.Sprint(way, n)
	brokers := slices.DeleteFunc(b.serverPIDs(), func(pid int) bool { return slices.Contains(b.mongods, pid) })
	histogram := shots.delayHistogram()
	got.addValue(key+"_relay", (after.cpu-before.cpu)*1e6/float64(events))
	got.addValue(key+"_mongod", meter.measureUsed(b.mongods...)*1e6/float64(events))
	got.addValue(key+"_broker", meter.measureUsed(brokers...)*1e6/float64(events))
	got.addValue(key+"_p50", quantileMS(histogram, 50))
	got.addValue(key+"_p99", quantileMS(histogram, 99))
	got.addValue(key+"_rss", after.rss)

	later, err := b.countWriteConflicts(ctx)
	if err != nil {
		return err
	}
	got.addValue(key+"_conflicts", float64(later-conflicts)*1000/float64(events))
	other, known := meter.measureOtherCPU()
	if known {
		otherCPU.addValue(key, other)
	}
	if run == 0 {
		return nil
	}
	b.logProgress("run %d of %d: %2d %-8s  p50 %.2f ms  p99 %.2f ms  CPU of others %.1f %%", run, b.Runs, n, way,
		quantileMS(histogram, 50), quantileMS(histogram, 99), other)
	return nil
}

// startGrowth starts the relays of one step and a consumer of their topic, and warms them up. After an error it returns the relays that run.
func (b *bench) startGrowth(ctx context.Context, way string, n int, name string) (tail *tailing, relays []*relay, colls []*mongo.Collection, err error) {
	streams := setting{slots: n}
	count := 1
	if way == byWatchers {
		streams.slots, count = 1, n
	}

	topic, err := b.newTopic(ctx, name)
	if err != nil {
		return nil, nil, nil, err
	}
	tail = &tailing{topic: topic}
	if err := b.followTopic(ctx, tail); err != nil {
		return nil, nil, nil, err
	}

	for i := range count {
		coll, err := b.newOutbox(ctx, fmt.Sprintf("%s_%d", name, i))
		if err != nil {
			return tail, relays, colls, err
		}
		streams.watch, streams.topic, streams.start = coll.Name(), topic, "now"
		streams.state, streams.label = b.newStateDB(coll.Name()), coll.Name()
		tail.relay, err = b.startRelay(streams)
		if err != nil {
			return tail, relays, colls, err
		}
		relays, colls = append(relays, tail.relay), append(colls, coll)
		if err := b.warmUpRelay(ctx, coll, tail, min(warmRun, b.Events)/count); err != nil {
			return tail, relays, colls, err
		}
	}
	return tail, relays, colls, nil
}

func checkAllRunning(relays []*relay) error {
	for _, r := range relays {
		if err := r.checkRunning(); err != nil {
			return err
		}
	}
	return nil
}

// relaysUsage returns the sums of all relays.
func relaysUsage(relays []*relay) (sum usage) {
	for _, r := range relays {
		used, _ := processUsage(r.pid())
		sum.cpu += used.cpu
		sum.rss += used.rss
	}
	return sum
}

// countWriteConflicts returns how often statements have met on a document since the start of the server.
func (b *bench) countWriteConflicts(ctx context.Context) (int64, error) {
	raw, err := b.client.Database("admin").RunCommand(ctx, bson.D{{Key: "serverStatus", Value: 1}}).Raw()
	if err != nil {
		return 0, fmt.Errorf("reading the write conflicts: %w", err)
	}
	n, _ := raw.Lookup("metrics", "operation", "writeConflicts").AsInt64OK()
	return n, nil
}

func newGrowthResult(bench *bench, got, otherCPU figures) GrowthResult {
	result := GrowthResult{OtherCPU: newOtherCPU(otherCPU), Rate: DefaultGrowthRate, Payload: bench.Payload, Runs: bench.Runs}
	for _, way := range []string{bySlots, byWatchers} {
		for _, n := range bench.Growth {
			of := func(figure string, decimals int) float64 {
				return round(median(got[fmt.Sprint(way, n)+figure]), decimals)
			}

			result.Steps = append(result.Steps, GrowthStep{
				By: way, N: n, RelayCPU: of("_relay", 0), MongodCPU: of("_mongod", 0), BrokerCPU: of("_broker", 0),
				WriteConflicts: of("_conflicts", 2), P50: of("_p50", 2), P99: of("_p99", 2), RSS: of("_rss", 0),
			})
		}
	}
	return result
}

// Print writes the result as a table for people.
func (r GrowthResult) Print(out io.Writer) error {
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintf(out, "\n%d events per second of %d bytes, medians of %d runs; CPU in µs for each event\n", r.Rate, r.Payload, r.Runs)
	fmt.Fprintln(table, "STREAMS\tRELAY\tMONGODB\tKAFKA\tWRITE CONFLICTS/1000\tP50 MS\tP99 MS\tMEMORY MiB")
	for _, s := range r.Steps {
		fmt.Fprintf(table, "%d %s\t%.0f\t%.0f\t%.0f\t%.2f\t%.2f\t%.2f\t%.0f\n",
			s.N, s.By, s.RelayCPU, s.MongodCPU, s.BrokerCPU, s.WriteConflicts, s.P50, s.P99, s.RSS)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "CPU of others: %s\n", r.describeOtherCPU())
	return err
}
