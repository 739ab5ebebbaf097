//go:build unix

package kit

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// Record is a record of a topic, read by the second Kafka client.
type Record struct {
	Topic     string
	Partition int32
	Offset    int64
	Key       []byte
	Value     []byte
	Headers   []kgo.RecordHeader
	Time      time.Time
	Producer  int64
	Epoch     int16
	Seen      time.Time
}

// Header returns the value of the first header with this name, or "".
func (r *Record) Header(name string) string {
	for _, h := range r.Headers {
		if h.Key == name {
			return string(h.Value)
		}
	}
	return ""
}

// Topics reads topics from their beginning until the test ends, including uncommitted and control records.
type Topics struct {
	tb     testing.TB
	client *kgo.Client
	names  []string

	mu          sync.Mutex
	records     []*Record
	deliveries  map[string]bool // keys of the deliveries read so far
	nextOffsets map[string]map[int32]int64
	changed     chan struct{}
}

// ReadTopics starts to read topics by name.
func ReadTopics(tb testing.TB, brokers []string, names ...string) *Topics {
	tb.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.ConsumeTopics(names...), kgo.KeepControlRecords(),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchIsolationLevel(kgo.ReadUncommitted()),
		kgo.FetchMinBytes(1), kgo.FetchMaxWait(250*time.Millisecond), kgo.MetadataMinAge(250*time.Millisecond), kgo.MetadataMaxAge(2*time.Second),
		kgo.UnknownTopicRetries(-1))
	if err != nil {
		tb.Fatal(err)
	}

	topics := &Topics{tb: tb, client: cl, names: names, deliveries: map[string]bool{}, nextOffsets: map[string]map[int32]int64{}, changed: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { topics.collectRecords(ctx) })
	tb.Cleanup(func() {
		cancel()
		wg.Wait()
		cl.Close()
	})
	return topics
}

// ReadTopics starts to read the topics of these aggregate types, or of "order" without arguments.
func (s *Scene) ReadTopics(types ...string) *Topics {
	s.tb.Helper()
	if len(types) == 0 {
		types = []string{"order"}
	}
	names := make([]string, len(types))
	for i, t := range types {
		names[i] = s.TopicOf(t)
	}
	return ReadTopics(s.tb, s.Brokers, names...)
}

func (t *Topics) collectRecords(ctx context.Context) {
	for ctx.Err() == nil {
		fetched := t.client.PollFetches(ctx)
		now := time.Now()
		t.mu.Lock()
		fetched.EachRecord(func(record *kgo.Record) {
			if t.nextOffsets[record.Topic] == nil {
				t.nextOffsets[record.Topic] = map[int32]int64{}
			}
			t.nextOffsets[record.Topic][record.Partition] = record.Offset + 1
			if record.Attrs.IsControl() {
				return
			}
			rec := &Record{record.Topic, record.Partition, record.Offset, record.Key, record.Value, record.Headers, record.Timestamp, record.ProducerID, record.ProducerEpoch, now}
			t.records = append(t.records, rec)
			t.deliveries[deliveryKey(rec)] = true
		})

		close(t.changed)
		t.changed = make(chan struct{})
		t.mu.Unlock()
	}
}

// deliveryKey returns a key that two records share if one repeats the other.
func deliveryKey(rec *Record) string {
	return strings.Join([]string{rec.Topic, rec.Header(record.HeaderID), rec.Header(record.HeaderIDType), rec.Header(record.HeaderNamespace), rec.Header(record.HeaderDelivery)}, "\x00")
}

// AllRecords returns the records so far, sorted by topic, partition and offset.
func (t *Topics) AllRecords() []*Record {
	t.mu.Lock()
	defer t.mu.Unlock()

	out := slices.Clone(t.records)
	slices.SortFunc(out, func(a, b *Record) int {
		if order := strings.Compare(a.Topic, b.Topic); order != 0 {
			return order
		}
		if a.Partition != b.Partition {
			return int(a.Partition - b.Partition)
		}
		return int(a.Offset - b.Offset)
	})
	return out
}

// Count returns the number of records so far.
func (t *Topics) Count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.records)
}

// WaitDistinct waits until n different deliveries were read. The time limit applies to each new delivery.
func (t *Topics) WaitDistinct(n int) {
	t.tb.Helper()
	if got, ok := t.waitDeliveries(n); !ok {
		t.tb.Fatalf("waiting for %d deliveries timed out with %d", n, got)
	}
}

// waitDeliveries waits for n deliveries and returns their number. The time limit applies to each new delivery.
func (t *Topics) waitDeliveries(n int) (got int, ok bool) {
	t.tb.Helper()
	for {
		before := got
		more := t.waitUntil(func() bool {
			got = len(t.deliveries)
			ok = got >= n
			return ok || got > before
		})
		if ok || !more {
			return got, ok
		}
	}
}

// WaitForRecord waits for a record that matches, and returns it. what describes it in the failure message.
func (t *Topics) WaitForRecord(what string, match func(*Record) bool) *Record {
	t.tb.Helper()
	var found *Record
	t.waitFor(what, func() (bool, string) {
		i := slices.IndexFunc(t.records, match)
		if i >= 0 {
			found = t.records[i]
		}
		return i >= 0, fmt.Sprintf("%d records", len(t.records))
	})
	return found
}

// waitFor fails the test unless ok returns true in time. The string of ok describes the state in the
// failure message.
func (t *Topics) waitFor(what string, ok func() (bool, string)) {
	t.tb.Helper()
	state := ""
	reached := t.waitUntil(func() (done bool) {
		done, state = ok()
		return done
	})
	if !reached {
		t.tb.Fatalf("waiting for %s timed out: %s", what, state)
	}
}

// waitUntil calls ok after each fetch, with the lock held, and reports whether it returned true in time.
func (t *Topics) waitUntil(ok func() bool) bool {
	timeout := time.NewTimer(Patience)
	defer timeout.Stop()

	for {
		t.mu.Lock()
		done, changed := ok(), t.changed
		t.mu.Unlock()
		if done {
			return true
		}
		select {
		case <-changed:
		case <-timeout.C:
			return false
		case <-t.tb.Context().Done():
			return false
		}
	}
}

// WaitForEnd waits until all records that are in the topics now were read.
func (t *Topics) WaitForEnd() {
	t.tb.Helper()
	var ends kadm.ListedOffsets
	var err error

	// After a broker was stopped, its partitions may have no leader for some time.
	stacktest.Eventually(t.tb, "all partitions report their end", func() bool {
		if ends, err = kadm.NewClient(t.client).ListEndOffsets(t.tb.Context(), t.names...); err == nil {
			err = ends.Error()
		}
		if err != nil {
			t.tb.Logf("listing the end offsets: %v", err)
		}
		return err == nil
	})

	t.waitFor("the end of the topics", func() (bool, string) {
		behind := ""
		ends.Each(func(offset kadm.ListedOffset) {
			if offset.Offset > t.nextOffsets[offset.Topic][offset.Partition] && behind == "" {
				behind = fmt.Sprintf("%s/%d read up to %d of %d", offset.Topic, offset.Partition, t.nextOffsets[offset.Topic][offset.Partition], offset.Offset)
			}
		})
		return behind == "", behind
	})
}
