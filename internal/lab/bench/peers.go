package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/lab/devstack/kafkaconnect"
)

// The defaults of [RunPeers]. One run takes about thirteen minutes on two cores.
const (
	DefaultPeerEvents   = 100_000
	DefaultPeerPayload  = 1000
	DefaultPeerRuns     = 2 // rounds with each system once
	DefaultPeerDuration = 5 * time.Second
)

// Peers returns the names of the publishers that [RunPeers] can compare with outrelay.
func Peers() []string { return []string{kafkaconnect.Debezium, kafkaconnect.MongoKafka} }

const (
	killRate       = 1000             // events per second while a publisher is killed
	offsetInterval = 10 * time.Second // the connectors store their offsets this often
	beforeKill     = 12 * time.Second // they are stored at least once
	afterKill      = 5 * time.Second
	killWithin     = 3 * time.Minute // from the restart until everything has arrived
)

// system is a publisher with a setting, and a row of the table.
type system struct {
	name    string
	title   string
	stamped bool // its documents are those of pkg/outbox; otherwise they are without ts and slot
	start   func(ctx context.Context, b *comparison, p place) (publisher, error)
}

// place is a collection with a backlog, and a topic.
type place struct {
	collection string
	topic      string
	start      bson.Timestamp // before the backlog
	token      string         // resume token, at the same time
	dir        string         // for files
}

// publisher is a running process that publishes the documents of a place.
type publisher interface {
	pid() int
	checkRunning() error
	// kill ends the process by SIGKILL, and returns when it has ended.
	kill() error
	// restart starts the process again, as a supervisor does.
	restart(ctx context.Context) error
	stopProcess() error
}

// listSystems returns the systems of a comparison.
func (o Options) listSystems() []system {
	list := []system{
		{"outrelay", "outrelay", true, startOutrelay},
		{"outrelay-unstamped", "outrelay, documents without `ts`", false, startOutrelay},
	}

	for _, p := range o.Peers {
		switch p {
		case kafkaconnect.Debezium:
			list = append(list,
				system{p, "Debezium " + kafkaconnect.Version(p) + ", outbox router, defaults", false, startDebezium(false)},
				system{p + "-fast", "Debezium, poll 2 ms, linger 0", false, startDebezium(true)})
		case kafkaconnect.MongoKafka:
			list = append(list,
				system{p, "MongoDB Kafka connector " + kafkaconnect.Version(p) + ", defaults", false, startMongoKafka(false)},
				system{p + "-fast", "MongoDB Kafka connector, linger 0", false, startMongoKafka(true)})
		}
	}
	return list
}

// comparison is a benchmark with other publishers.
type comparison struct{ *bench }

// RunPeers compares outrelay with other publishers on the same servers: the drain of a backlog, the latency at each
// rate, and the effect of a SIGKILL. In each round each system runs once, and the order rotates. It takes many minutes.
// The end of ctx interrupts it.
func RunPeers(ctx context.Context, options Options) (res PeersResult, err error) {
	err = options.withServers(ctx, func(local *bench) error {
		comparison := &comparison{local}
		comparison.numberOf = textNumber
		comparison.reserveNumbers(comparison.Events)
		for _, name := range comparison.Peers {
			comparison.logProgress("fetching %s, if it is not in the cache", name)
			if _, err := kafkaconnect.Fetch(ctx, name); err != nil {
				return err
			}
		}

		list := comparison.listSystems()
		got := make([][]peerRun, len(list))
		comparison.logProgress("warming the servers up in round 0, which does not count")
		for _, turn := range listTurns(len(list), comparison.Runs) {
			run, err := comparison.measureSystem(ctx, list[turn.system], turn.round)
			if err != nil {
				return fmt.Errorf("%s: %w", list[turn.system].name, err)
			}
			if turn.round > 0 {
				got[turn.system] = append(got[turn.system], run)
			}
		}
		res, err = comparison.newPeersResult(ctx, list, got)
		return err
	})
	return res, err
}

// turn is the measurement of a system in a round. Round 0 warms the servers up.
type turn struct{ round, system int }

// listTurns returns the order of the measurements. Without a warm-up, the first system of round 1 alone would be measured on servers that
// have just started.
func listTurns(systems, rounds int) []turn {
	turns := []turn{{0, 0}}
	for round := 1; round <= rounds; round++ {
		for i := range systems {
			turns = append(turns, turn{round, (i + round - 1) % systems})
		}
	}
	return turns
}

// peerRun has the figures of one system in one round.
type peerRun struct {
	DrainEPS      float64       `json:"drain_eps"`
	CPUPerMillion float64       `json:"cpu_s_per_million"`
	MongodCPU     float64       `json:"mongod_cpu_s_per_million"` // -1 if it is unknown
	PeakRSS       float64       `json:"peak_rss_mb"`              // MiB; until the kill
	Latency       []peerLatency `json:"latency"`
	SilenceMS     float64       `json:"silence_ms"` // longest time without a new event around the kill
	Repeats       int           `json:"repeats"`
	Lost          int           `json:"lost"`
	OtherCPU      float64       `json:"other_cpu_pct"` // during the drain; -1 if it is unknown
}

// measureSystem makes all measurements of a system with its own collection and topic.
func (b *comparison) measureSystem(ctx context.Context, system system, round int) (run peerRun, err error) {
	name := fmt.Sprintf("%s%d", system.name, round)
	place, err := b.preparePlace(ctx, system, name)
	if err != nil {
		return run, err
	}
	defer b.cluster.deleteTopic(context.WithoutCancel(ctx), place.topic)
	defer func() {
		err = errors.Join(err, b.client.Database(b.db).Collection(place.collection).Drop(context.WithoutCancel(ctx)))
	}()

	pub, err := system.start(ctx, b, place)
	if err != nil {
		return run, err
	}
	defer func() { err = errors.Join(err, pub.stopProcess()) }()

	if err := b.followPeer(ctx, pub, place.topic, &run); err != nil {
		return run, err
	}
	b.logProgress("round %d: %-18s %7.0f/s  CPU-s per million %.1f + %.1f  CPU of others %.0f %%", round, system.name, run.DrainEPS, run.CPUPerMillion, run.MongodCPU, run.OtherCPU)

	// The latency starts after the drain, so no backlog is in its way.
	counted := newCounted(b.numbered)
	consumer, err := b.startConsumer(ctx, place.topic, counted.recordArrival)
	if err != nil {
		return run, err
	}
	defer consumer.stopReading()
	counted.failed = func() error { return errors.Join(pub.checkRunning(), consumer.failure()) }
	run.Latency, err = measureRates(b.Rates, func(rate int) (*hdrhistogram.Histogram, error) {
		return b.followRate(ctx, system, place, counted, rate)
	})
	if err != nil {
		return run, err
	}
	// The events of the backlog were before these in each partition.
	if err := counted.checkDrain(b.Events); err != nil {
		return run, err
	}

	// The kill comes last, because its restart would falsify the memory and the latency.
	usage, _ := processUsage(pub.pid())
	run.PeakRSS = round1(usage.hwm)
	counted.failed = consumer.failure
	if err := b.killPeer(ctx, system, place, pub, counted, &run); err != nil {
		return run, err
	}
	b.logProgress("round %d: %-18s latency %v  silence %.0f ms, %d repeats, %d lost  %.0f MiB", round, system.name, run.Latency, run.SilenceMS, run.Repeats, run.Lost, run.PeakRSS)
	return run, nil
}

func round1(value float64) float64 { return round(value, 1) }

// preparePlace creates the topic, and the collection with its backlog.
func (b *comparison) preparePlace(ctx context.Context, system system, name string) (prepared place, err error) {
	prepared = place{collection: name, dir: filepath.Join(b.stack.Dir(), name)}
	if err := os.Mkdir(prepared.dir, 0o700); err != nil {
		return prepared, err
	}

	// The connector chooses the name of its topic: the prefix, the database and the collection.
	prepared.topic = b.db + "." + b.db + "." + name
	if err := b.cluster.createTopic(ctx, prepared.topic); err != nil {
		return prepared, err
	}

	coll, err := b.newOutbox(ctx, name)
	if err != nil {
		return prepared, err
	}
	cs, err := watch(ctx, coll, nil)
	if err != nil {
		return prepared, err
	}
	prepared.token = cs.ResumeToken().Lookup("_data").StringValue()
	if err := cs.Close(ctx); err != nil {
		return prepared, err
	}
	if prepared.start, err = clusterTimeAfter(ctx, b); err != nil {
		return prepared, err
	}
	return prepared, b.writeDocuments(ctx, coll, b.Events, func(i int) (bson.Raw, error) { return b.encodeDocument(system, i) })
}

// encodeDocument returns the document of an event as the writers of a system insert it.
func (b *comparison) encodeDocument(system system, i int) (bson.Raw, error) {
	payload := newTextPayload(i, b.Payload)
	if system.stamped {
		return encodeEnvelope(orderingKey(i), payload)
	}
	return bson.Marshal(foreignFields(i, string(payload)))
}

// textMark begins and ends the number of an event in a text. Nothing else in a record contains it.
const textMark = '#'

// newTextPayload returns a payload as JSON. The connectors send text as it is, and bytes in different forms.
func newTextPayload(i, size int) []byte {
	payload := fmt.Appendf(nil, `{"number":"%c%d%c","text":"`, textMark, i, textMark)
	for len(payload) < size-2 {
		payload = append(payload, 'a'+byte((i*31+len(payload)*7)%26))
	}
	return append(payload, `"}`...)
}

// textNumber returns the number that newTextPayload has written. The payload may be part of a larger text.
func textNumber(value []byte) (int, bool) {
	_, rest, ok := bytes.Cut(value, []byte{textMark})
	digits, _, closed := bytes.Cut(rest, []byte{textMark})
	n, err := strconv.Atoi(string(digits))
	return n, ok && closed && err == nil
}

// followPeer measures the drain from the first fifth of the events to the last. The first fifth warms the publisher up: a
// new JVM takes several times as long for each event.
func (b *comparison) followPeer(ctx context.Context, pub publisher, topic string, run *peerRun) error {
	const warm = 5
	var meter *meter
	var began, progressed time.Time
	var cpu float64
	beganN, last := 0, -1
	for n := 0; n < b.Events; {
		if err := errors.Join(pub.checkRunning(), retry.Sleep(ctx, slow)); err != nil {
			return err
		}
		var err error
		if n, err = b.cluster.countRecords(ctx, topic); err != nil {
			return err
		}

		now := time.Now()
		if n > last {
			last, progressed = n, now
		}
		if now.Sub(progressed) > killWithin {
			return fmt.Errorf("%d of %d events arrived, and nothing for %s", n, b.Events, killWithin)
		}
		if meter == nil && n >= b.Events/warm {
			began, beganN = now, n
			cpu, _ = processTicks(pub.pid())
			meter = startMeter(append(b.serverPIDs(), pub.pid())...)
		}
	}

	events, took := float64(last-beganN), progressed.Sub(began)
	if events == 0 {
		return fmt.Errorf("the drain of %d events was too short to measure it: take more", b.Events)
	}
	end, _ := processTicks(pub.pid())
	run.DrainEPS = round(events/took.Seconds(), 0)
	run.CPUPerMillion = round((end-cpu)*1e6/events, 2)
	run.MongodCPU, run.OtherCPU = -1, -1
	if used := meter.measureUsed(b.mongods...); used > 0 {
		run.MongodCPU = round(used*1e6/events, 2)
	}
	if pct, ok := meter.measureOtherCPU(); ok {
		run.OtherCPU = round1(pct)
	}
	return nil
}

// measureRates returns the latency at each rate. measure returns the delays at a rate. Its first call warms the publisher up for single events.
func measureRates(rates []int, measure func(rate int) (*hdrhistogram.Histogram, error)) ([]peerLatency, error) {
	if _, err := measure(warmRate / 2); err != nil {
		return nil, err
	}

	var list []peerLatency
	for _, rate := range rates {
		delays, err := measure(rate)
		if err != nil {
			return nil, err
		}
		list = append(list, peerLatency{rate, round(quantileMS(delays, 50), 2), round(quantileMS(delays, 99), 2)})
	}
	return list, nil
}

// followRate inserts events at a rate, and returns the times until they arrive.
func (b *comparison) followRate(ctx context.Context, system system, place place, counted *counted, rate int) (*hdrhistogram.Histogram, error) {
	n := int(b.Duration.Seconds() * float64(rate))
	shots, err := newShotsOf(b.reserveNumbers(n), n, func(i int) (bson.Raw, error) { return b.encodeDocument(system, i) })
	if err != nil {
		return nil, err
	}
	counted.shots.Store(shots)

	if err := shots.insertAtRate(ctx, rate, b.client.Database(b.db).Collection(place.collection)); err != nil {
		return nil, err
	}
	if err := shots.awaitArrivals(ctx, counted.failed); err != nil {
		return nil, err
	}
	return shots.delayHistogram(), nil
}

// killPeer kills the publisher under load, restarts it at once, and waits until everything has arrived.
func (b *comparison) killPeer(ctx context.Context, system system, place place, pub publisher, counted *counted, run *peerRun) error {
	n := int((beforeKill + afterKill).Seconds() * killRate)
	shots, err := newShotsOf(b.reserveNumbers(n), n, func(i int) (bson.Raw, error) { return b.encodeDocument(system, i) })
	if err != nil {
		return err
	}
	counted.shots.Store(shots)

	inserted := make(chan error, 1)
	go func() {
		inserted <- shots.insertAtRate(ctx, killRate, b.client.Database(b.db).Collection(place.collection))
	}()
	if err := retry.Sleep(ctx, beforeKill); err != nil {
		return errors.Join(err, <-inserted)
	}
	// From here on the consumer counts repeats, and looks for the longest silence.
	counted.beginGap()
	err = pub.kill()
	if err == nil {
		err = pub.restart(ctx)
	}
	if err := errors.Join(err, <-inserted); err != nil {
		return err
	}

	deadline := time.Now().Add(killWithin)
	for shots.left.Load() > 0 && time.Now().Before(deadline) {
		if err := errors.Join(counted.failed(), pub.checkRunning(), retry.Sleep(ctx, slow)); err != nil {
			return err
		}
	}
	run.Lost = int(shots.left.Load())
	run.SilenceMS, run.Repeats = counted.endGap()
	return nil
}
