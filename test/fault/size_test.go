//go:build unix

package fault

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/relay"
	"github.com/outrelay/outrelay/test/kit"
)

// The sizes of the tests in this file. docs/bench.md has figures of larger ones.
var (
	scaleTopics      = flag.Int("scale.topics", 40, "how many topics there are in TestManyTopics")
	scaleTransaction = flag.Int("scale.transaction", 5_000, "how many events the transaction of TestLargeTransaction has")
	scaleLarge       = flag.Int("scale.large", 3, "how many events TestLargeEvents has")
	scaleWatchers    = flag.Int("scale.watchers", 3, "how many relays TestManyWatchersInAProcess runs")
)

// sharedTopics is the largest number of topics for the shared broker: it keeps a file open, and maps two, for each partition, and machines
// often allow 20,000 and 65,530.
const sharedTopics = 2000

// A relay creates a topic for each of many aggregate types, and its successor takes over all of them. A bare client creates as many.
func TestManyTopics(t *testing.T) {
	stacktest.OnlyWith(t, "only rare installations have such sizes", "slow", "scale.topics")
	t.Parallel()
	n := *scaleTopics
	var stack *devstack.Stack
	if n > sharedTopics {
		stack = stacktest.Own(t, devstack.Options{Brokers: 5, Kafka: devstack.KafkaOptions{
			HeapMB: 2048,
			// The files of deleted topics count too.
			Props: map[string]string{"min.insync.replicas": "1", "file.delete.delay.ms": "0"},
		}})
	}
	s := kit.New(t, kit.Options{Stack: stack, Types: []string{}, Set: map[string]any{
		"log.level": "info", "topics.create.partitions": 6, "topics.create.replication": 1, "topics.max": n + 1,
	}})
	bare := createBareTopics(t, s, n)
	first := s.StartRelay()
	first.WaitTookOver()

	begin := time.Now()
	for from := 0; from < n; from += 500 {
		var events []event.Event
		for i := from; i < min(from+500, n); i++ {
			events = append(events, kit.NewEvent(fmt.Sprintf("type-%05d", i), "k", i, 60))
		}
		s.AppendEvents(s.Outbox(), events...)
	}
	stacktest.EventuallyIn(t, limitOfSize(n), "a record in each topic", func() bool { written, _ := countTopicRecords(t, s, n); return written == n })
	created := time.Since(begin)
	memory, document := first.PeakMemory()>>20, len(s.WatcherDocument())

	first.Terminate()
	first.WaitExit()
	begin = time.Now()
	second := s.StartRelay()
	second.WaitTookOver()
	t.Logf("%d topics with 6 partitions: created and written in %v (%.0f topics/s, %.2f of a bare client's rate); peak memory %d MiB; watcher document %d bytes; taken over %v after the start of the next process",
		n, created.Round(time.Millisecond), float64(n)/created.Seconds(), bare.Seconds()/created.Seconds(), memory, document, time.Since(begin).Round(time.Millisecond))

	_, before := countTopicRecords(t, s, n)
	s.AppendEvents(s.Outbox(), kit.NewEvent("type-00000", "k", n, 60))
	stacktest.EventuallyIn(t, kit.Patience, "a record of the successor", func() bool { _, offsets := countTopicRecords(t, s, n); return offsets > before })
}

// createBareTopics creates n topics with 6 partitions, in requests as large as those of the relay, and returns the time until all of them have
// leaders. It deletes them.
func createBareTopics(t *testing.T, s *kit.Scene, n int) time.Duration {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(s.Brokers...))
	mustSucceed(t, err)
	defer client.Close()
	admin := kadm.NewClient(client)

	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("%s.bare-%05d", s.Prefix, i)
	}
	begin := time.Now()
	for part := range slices.Chunk(names, 100) {
		_, err := admin.CreateTopics(t.Context(), 6, 1, nil, part...)
		mustSucceed(t, err)
	}
	stacktest.EventuallyIn(t, limitOfSize(n), "leaders of bare topics", func() bool {
		var ends kadm.ListedOffsets
		// A new topic reaches some brokers later than others.
		ends, err = admin.ListEndOffsets(t.Context(), names...)
		return err == nil && ends.Error() == nil && len(ends) == n
	}, func() any { return err })
	took := time.Since(begin)
	_, err = admin.DeleteTopics(t.Context(), names...)
	mustSucceed(t, err)
	return took
}

// limitOfSize returns the time limit of a test with n topics or events of a large size.
func limitOfSize(n int) time.Duration { return kit.Patience + time.Duration(n)*200*time.Millisecond }

// countTopicRecords returns how many topics of TestManyTopics have a record, and the sum of their offsets.
func countTopicRecords(t *testing.T, s *kit.Scene, n int) (written int, offsets int64) {
	t.Helper()
	names := make([]string, n)
	for i := range names {
		names[i] = s.TopicOf(fmt.Sprintf("type-%05d", i))
	}
	for _, partitions := range readEnds(t, s, names...) {
		var sum int64
		for _, end := range partitions {
			// A topic that does not exist yet has an error.
			if end.Err == nil {
				sum += end.Offset
			}
		}
		offsets += sum
		if sum > 0 {
			written++
		}
	}
	return written, offsets
}

// readEnds returns the ends of topics for readers of committed records. A topic that does not exist has an error.
func readEnds(t *testing.T, s *kit.Scene, names ...string) kadm.ListedOffsets {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(s.Brokers...))
	mustSucceed(t, err)
	defer client.Close()

	ends, err := kadm.NewClient(client).ListCommittedOffsets(t.Context(), names...)
	// A new topic reaches some brokers later than others.
	if shards := new(kadm.ShardErrors); !errors.As(err, &shards) || shards.AllFailed {
		mustSucceed(t, err)
	}
	return ends
}

// An event may be nearly as large as a document of MongoDB. It arrives unchanged, also beside small ones.
func TestLargeEvents(t *testing.T) {
	stacktest.OnlyWith(t, "only rare installations have such sizes", "slow", "scale.large")
	t.Parallel()
	s := kit.New(t, kit.Options{Set: map[string]any{"log.level": "info", "limits.record": "16MiB"}})
	s.SetTopicConfig("order", "max.message.bytes", "20971520")
	topics := s.ReadTopics()
	p := s.StartRelay()
	p.WaitTookOver()

	const size = 15_000_000
	box, err := outbox.New(s.DB, outbox.WithMaxSize(15<<20))
	mustSucceed(t, err)
	n, begin := *scaleLarge, time.Now()
	want := map[string][]byte{}
	for i := range n {
		large, small := kit.NewEvent("order", "large", i, size), kit.NewEvent("order", "small", i, 100)
		mustSucceed(t, box.Transaction(t.Context(), func(ctx context.Context) error { return box.Append(ctx, large, small) }))
		for _, sent := range []event.Event{large, small} {
			want[sent.ID().String()], err = sent.Payload()
			mustSucceed(t, err)
		}
	}

	stacktest.EventuallyIn(t, limitOfSize(100*n), "all records", func() bool { return topics.Count() >= 2*n })
	for _, r := range topics.AllRecords() {
		id := r.Header("id")
		if !bytes.Equal(r.Value, want[id]) {
			t.Errorf("event %s of key %s arrived with %d other bytes", id, r.Key, len(r.Value))
		}
		delete(want, id)
	}
	if len(want) > 0 || topics.Count() != 2*n {
		t.Errorf("%d records, %d events are missing", topics.Count(), len(want))
	}
	t.Logf("%d events of %d bytes: %v with their inserts; peak memory %d MiB", n, size, time.Since(begin).Round(time.Millisecond), p.PeakMemory()>>20)
}

// The events of one large transaction are committed at one moment. They arrive in order, with bounded memory.
func TestLargeTransaction(t *testing.T) {
	stacktest.OnlyWith(t, "only rare installations have such sizes", "slow", "scale.transaction")
	t.Parallel()
	s := kit.New(t, kit.Options{Set: map[string]any{"log.level": "info"}})
	topics := s.ReadTopics()
	p := s.StartRelay()
	p.WaitTookOver()

	n := *scaleTransaction
	box, err := outbox.New(s.DB)
	mustSucceed(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), limitOfSize(n/100))
	defer cancel()
	begin := time.Now()
	err = box.Transaction(ctx, func(ctx context.Context) error {
		for from := 0; from < n; from += 5_000 {
			events := make([]event.Event, min(5_000, n-from))
			for i := range events {
				events[i] = kit.NewEvent("order", fmt.Sprint("k", (from+i)%100), from+i, 20)
			}
			if err := box.Append(ctx, events...); err != nil {
				return err
			}
		}
		return nil
	})
	mustSucceed(t, err)
	committed := time.Now()

	stacktest.EventuallyIn(t, limitOfSize(n/100), "all records", func() bool { return topics.Count() >= n })
	arrived := time.Since(committed)
	last := map[string]int{}
	for _, r := range topics.AllRecords() {
		var number int
		if _, err := fmt.Sscanf(strings.TrimPrefix(string(r.Value), string(r.Key)+":"), "%d:", &number); err != nil {
			t.Fatalf("record %d of partition %d: %v", r.Offset, r.Partition, err)
		}
		if before, seen := last[string(r.Key)]; seen && number <= before {
			t.Fatalf("key %s: %d after %d", r.Key, number, before)
		}
		last[string(r.Key)] = number
	}
	if got := topics.Count(); got != n || len(last) != min(n, 100) {
		t.Errorf("%d records of %d keys, want %d of %d", got, len(last), n, min(n, 100))
	}
	t.Logf("a transaction with %d events: committed after %v; all arrived %v after that (%.0f/s); peak memory %d MiB",
		n, committed.Sub(begin).Round(time.Millisecond), arrived.Round(time.Millisecond), float64(n)/arrived.Seconds(), p.PeakMemory()>>20)
}

// Relays of many watchers in one process, each with an outbox of its own, share its memory and end together.
func TestManyWatchersInAProcess(t *testing.T) {
	stacktest.OnlyWith(t, "only rare installations have such sizes", "slow", "scale.watchers")
	t.Parallel()
	s := kit.New(t, kit.Options{})
	topics := s.ReadTopics()
	n, before := *scaleWatchers, readOwnMemory(t)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	began := time.Now()
	for i := range n {
		cfg := relay.Default()
		cfg.Watcher, cfg.Node = fmt.Sprint("watcher-", i), fmt.Sprint("node-", i)
		cfg.MongoDB.URI = relay.NewURI(stacktest.MongoURI(t))
		cfg.Kafka.Brokers = s.Brokers
		cfg.State.Database = s.State.Name()
		cfg.Watch = []string{fmt.Sprintf("%s.outbox_%d", s.DB.Name(), i)}
		cfg.Topics.Template = s.Prefix + ".{aggregatetype}"
		one, err := relay.New(cfg)
		mustSucceed(t, err)
		g.Go(func() error { return one.Run(ctx) })
		mustSucceed(t, one.Await(ctx, relay.Owner))
	}
	live := time.Since(began)

	for i := range n {
		s.AppendEvents(s.DB.Collection(fmt.Sprint("outbox_", i)), kit.NewEvent("order", fmt.Sprint("k", i), 1, 60))
	}
	stacktest.EventuallyIn(t, kit.Patience, "an event of each outbox", func() bool { return topics.Count() == n })
	t.Logf("%d relays in one process: live after %v, one after the other; %d MiB of memory before, %d after", n, live.Round(time.Millisecond), before, readOwnMemory(t))

	cancel()
	mustSucceed(t, g.Wait())
}

// readOwnMemory returns the resident memory of this process in MiB, or 0 if the system does not report it.
func readOwnMemory(t *testing.T) (mib int) {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			_, err = fmt.Sscan(value, &mib)
			mustSucceed(t, err)
		}
	}
	return mib >> 10
}
