package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/lab/devstack/kafkaconnect"
)

// The defaults of [RunPeers]. One run takes about twelve minutes on two cores.
const (
	DefaultPeerEvents   = 100_000
	DefaultPeerPayload  = 1000
	DefaultPeerRuns     = 2 // rounds with each system once
	DefaultPeerDuration = 5 * time.Second
)

// Peers returns the names of the publishers that [RunPeers] can compare with outrelay.
func Peers() []string { return []string{kafkaconnect.Debezium, kafkaconnect.MongoKafka} }

const (
	killRate   = 1000             // events per second while a publisher is killed
	beforeKill = 12 * time.Second // the offsets of the connectors are stored at least once
	afterKill  = 5 * time.Second
	killWithin = 3 * time.Minute // from the restart until everything has arrived
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
func RunPeers(ctx context.Context, o Options) (res PeersResult, err error) {
	err = o.withServers(ctx, func(own *bench) error {
		b := &comparison{own}
		b.numberOf = textNumber
		b.reserveNumbers(b.Events)
		for _, name := range b.Peers {
			b.logProgress("fetching %s, if it is not in the cache", name)
			if _, err := kafkaconnect.Fetch(ctx, name); err != nil {
				return err
			}
		}

		list := b.listSystems()
		got := make([][]peerRun, len(list))
		for round := range b.Runs {
			for i := range list {
				at := (i + round) % len(list)
				r, err := b.measureSystem(ctx, list[at], round)
				if err != nil {
					return fmt.Errorf("%s: %w", list[at].name, err)
				}
				got[at] = append(got[at], r)
			}
		}
		res, err = b.newPeersResult(ctx, list, got)
		return err
	})
	return res, err
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
	ForeignCPU    float64       `json:"foreign_cpu_pct"` // during the drain; -1 if it is unknown
}

// measureSystem makes all measurements of a system with its own collection and topic.
func (b *comparison) measureSystem(ctx context.Context, s system, round int) (r peerRun, err error) {
	name := fmt.Sprintf("%s%d", s.name, round+1)
	p, err := b.preparePlace(ctx, s, name)
	if err != nil {
		return r, err
	}
	defer b.cluster.deleteTopic(context.WithoutCancel(ctx), p.topic)
	defer func() {
		err = errors.Join(err, b.client.Database(b.db).Collection(p.collection).Drop(context.WithoutCancel(ctx)))
	}()

	pub, err := s.start(ctx, b, p)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, pub.stopProcess()) }()

	if err := b.followPeer(ctx, pub, p.topic, &r); err != nil {
		return r, err
	}
	b.logProgress("round %d: %-18s %7.0f/s  CPU-s per million %.1f + %.1f  foreign CPU %.0f %%", round+1, s.name, r.DrainEPS, r.CPUPerMillion, r.MongodCPU, r.ForeignCPU)

	// The latency starts after the drain, so no backlog is in its way.
	c := newCounted(b.numbered)
	consumer, err := b.startConsumer(ctx, p.topic, c.recordArrival)
	if err != nil {
		return r, err
	}
	defer consumer.stopReading()
	c.failed = func() error { return errors.Join(pub.checkRunning(), consumer.failure()) }
	if err := b.peerLatencies(ctx, s, p, c, &r); err != nil {
		return r, err
	}

	// The kill comes last, because its restart would falsify the memory and the latency.
	u, _ := processUsage(pub.pid())
	r.PeakRSS = round1(u.hwm)
	c.failed = consumer.failure
	if err := b.killPeer(ctx, s, p, pub, c, &r); err != nil {
		return r, err
	}
	b.logProgress("round %d: %-18s latency %v  silence %.0f ms, %d repeats, %d lost  %.0f MiB", round+1, s.name, r.Latency, r.SilenceMS, r.Repeats, r.Lost, r.PeakRSS)
	return r, nil
}

func round1(v float64) float64 { return round(v, 1) }

// preparePlace creates the topic, and the collection with its backlog.
func (b *comparison) preparePlace(ctx context.Context, s system, name string) (p place, err error) {
	p = place{collection: name, dir: filepath.Join(b.dir, name)}
	if err := os.Mkdir(p.dir, 0o700); err != nil {
		return p, err
	}

	// The connector chooses the name of its topic: the prefix, the database and the collection.
	p.topic = b.db + "." + b.db + "." + name
	if err := b.cluster.createTopic(ctx, p.topic); err != nil {
		return p, err
	}

	coll, err := b.newOutbox(ctx, name)
	if err != nil {
		return p, err
	}
	cs, err := watch(ctx, coll, nil)
	if err != nil {
		return p, err
	}
	p.token = cs.ResumeToken().Lookup("_data").StringValue()
	if err := cs.Close(ctx); err != nil {
		return p, err
	}
	if p.start, err = clusterTimeAfter(ctx, b); err != nil {
		return p, err
	}
	return p, b.writeDocuments(ctx, coll, b.Events, func(i int) (bson.Raw, error) { return b.encodeDocument(s, i) })
}

// encodeDocument returns the document of an event as the writers of a system insert it.
func (b *comparison) encodeDocument(s system, i int) (bson.Raw, error) {
	payload := newTextPayload(i, b.Payload)
	if s.stamped {
		return encodeEnvelope(orderingKey(i), payload)
	}
	return bson.Marshal(foreignFields(i, string(payload)))
}

// textMark begins and ends the number of an event in a text. Nothing else in a record contains it.
const textMark = '#'

// newTextPayload returns a payload as JSON. The connectors send text as it is, and bytes in different forms.
func newTextPayload(i, size int) []byte {
	p := fmt.Appendf(nil, `{"number":"%c%d%c","text":"`, textMark, i, textMark)
	for len(p) < size-2 {
		p = append(p, 'a'+byte((i*31+len(p)*7)%26))
	}
	return append(p, `"}`...)
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
func (b *comparison) followPeer(ctx context.Context, pub publisher, topic string, r *peerRun) error {
	const warm = 5
	var m *meter
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
		if m == nil && n >= b.Events/warm {
			began, beganN = now, n
			cpu, _ = processTicks(pub.pid())
			m = startMeter(append(b.serverPIDs(), pub.pid())...)
		}
	}

	events, took := float64(last-beganN), progressed.Sub(began)
	if events == 0 {
		return fmt.Errorf("the drain of %d events was too short to measure it: take more", b.Events)
	}
	end, _ := processTicks(pub.pid())
	r.DrainEPS = round(events/took.Seconds(), 0)
	r.CPUPerMillion = round((end-cpu)*1e6/events, 2)
	r.MongodCPU, r.ForeignCPU = -1, -1
	if used := m.measureUsed(b.mongods...); used > 0 {
		r.MongodCPU = round(used*1e6/events, 2)
	}
	if pct, ok := m.measureForeign(); ok {
		r.ForeignCPU = round1(pct)
	}
	return nil
}

// peerLatencies warms the publisher up for single events, and then measures the latency at each rate.
func (b *comparison) peerLatencies(ctx context.Context, s system, p place, c *counted, r *peerRun) error {
	for _, rate := range slices.Insert(slices.Clone(b.Rates), 0, warmRate/2) {
		n := int(b.Duration.Seconds() * float64(rate))
		from := b.reserveNumbers(n)
		shots, err := newShotsOf(from, n, func(i int) (bson.Raw, error) { return b.encodeDocument(s, i) })
		if err != nil {
			return err
		}
		c.shots.Store(shots)

		coll := b.client.Database(b.db).Collection(p.collection)
		if err := shots.insertAtRate(ctx, coll, rate); err != nil {
			return err
		}
		if err := shots.awaitArrivals(ctx, c.failed); err != nil {
			return err
		}
		if rate == warmRate/2 {
			continue
		}
		h := shots.delayHistogram()
		r.Latency = append(r.Latency, peerLatency{rate, round(quantileMS(h, 50), 2), round(quantileMS(h, 99), 2)})
	}
	return nil
}

// killPeer kills the publisher under load, restarts it at once, and waits until everything has arrived.
func (b *comparison) killPeer(ctx context.Context, s system, p place, pub publisher, c *counted, r *peerRun) error {
	n := int((beforeKill + afterKill).Seconds() * killRate)
	shots, err := newShotsOf(b.reserveNumbers(n), n, func(i int) (bson.Raw, error) { return b.encodeDocument(s, i) })
	if err != nil {
		return err
	}
	c.shots.Store(shots)

	inserted := make(chan error, 1)
	go func() {
		inserted <- shots.insertAtRate(ctx, b.client.Database(b.db).Collection(p.collection), killRate)
	}()
	if err := retry.Sleep(ctx, beforeKill); err != nil {
		return errors.Join(err, <-inserted)
	}
	// From here on the consumer counts repeats, and looks for the longest silence.
	c.beginGap()
	err = pub.kill()
	if err == nil {
		err = pub.restart(ctx)
	}
	if err := errors.Join(err, <-inserted); err != nil {
		return err
	}

	deadline := time.Now().Add(killWithin)
	for shots.left.Load() > 0 && time.Now().Before(deadline) {
		if err := errors.Join(c.failed(), pub.checkRunning(), retry.Sleep(ctx, slow)); err != nil {
			return err
		}
	}
	r.Lost = int(shots.left.Load())
	r.SilenceMS, r.Repeats = c.endGap()
	return nil
}
