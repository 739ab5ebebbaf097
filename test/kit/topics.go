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
)

// Record is one record of a topic, as a second Kafka client read it.
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

// Header is the value of the first header of that name.
func (r *Record) Header(name string) string {
	for _, h := range r.Headers {
		if h.Key == name {
			return string(h.Value)
		}
	}
	return ""
}

// Topics reads topics from their beginning, uncommitted and with the control records, until the test ends.
type Topics struct {
	tb     testing.TB
	client *kgo.Client
	names  []string

	mu          sync.Mutex
	records     []*Record
	deliveries  map[string]bool // deliveries seen, for Distinct
	nextOffsets map[string]map[int32]int64
	changed     chan struct{}
}

// ReadTopics reads topics by name.
func ReadTopics(tb testing.TB, brokers []string, names ...string) *Topics {
	tb.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.ConsumeTopics(names...), kgo.KeepControlRecords(),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchIsolationLevel(kgo.ReadUncommitted()),
		kgo.FetchMinBytes(1), kgo.FetchMaxWait(250*time.Millisecond), kgo.MetadataMinAge(250*time.Millisecond), kgo.MetadataMaxAge(2*time.Second),
		kgo.UnknownTopicRetries(-1))
	if err != nil {
		tb.Fatal(err)
	}
	t := &Topics{tb: tb, client: cl, names: names, deliveries: map[string]bool{}, nextOffsets: map[string]map[int32]int64{}, changed: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { t.collectRecords(ctx) })
	tb.Cleanup(func() {
		cancel()
		wg.Wait()
		cl.Close()
	})
	return t
}

// ReadTopics reads the topics of the scene's aggregate types, "order" if none is given.
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
		fetched.EachRecord(func(r *kgo.Record) {
			if t.nextOffsets[r.Topic] == nil {
				t.nextOffsets[r.Topic] = map[int32]int64{}
			}
			t.nextOffsets[r.Topic][r.Partition] = r.Offset + 1
			if r.Attrs.IsControl() {
				return
			}
			rec := &Record{r.Topic, r.Partition, r.Offset, r.Key, r.Value, r.Headers, r.Timestamp, r.ProducerID, r.ProducerEpoch, now}
			t.records = append(t.records, rec)
			t.deliveries[deliveryKey(rec)] = true
		})
		close(t.changed)
		t.changed = make(chan struct{})
		t.mu.Unlock()
	}
}

// deliveryKey is what two records have in common when one repeats the other.
func deliveryKey(r *Record) string {
	return strings.Join([]string{r.Topic, r.Header("id"), r.Header("outrelay-id-type"), r.Header("outrelay-ns"), r.Header("outrelay-delivery")}, "\x00")
}

// AllRecords are the records so far, by topic, partition and offset.
func (t *Topics) AllRecords() []*Record {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := slices.Clone(t.records)
	slices.SortFunc(out, func(a, b *Record) int {
		if c := strings.Compare(a.Topic, b.Topic); c != 0 {
			return c
		}
		if a.Partition != b.Partition {
			return int(a.Partition - b.Partition)
		}
		return int(a.Offset - b.Offset)
	})
	return out
}

// WaitDistinct waits until n different deliveries have been seen; what it waits for is the test's own words.
func (t *Topics) WaitDistinct(n int) {
	t.tb.Helper()
	if got, ok := t.waitDeliveries(n); !ok {
		t.tb.Fatalf("never came: %d deliveries (%d so far)", n, got)
	}
}

// waitDeliveries waits for n deliveries, as long as any come, and returns how many there are.
func (t *Topics) waitDeliveries(n int) (got int, ok bool) {
	t.tb.Helper()
	for {
		before := got
		more := t.waitUntil(func() bool { ok, got = len(t.deliveries) >= n, len(t.deliveries); return ok || got > before })
		if ok || !more {
			return got, ok
		}
	}
}

// WaitForRecord waits for a record that matches.
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

func (t *Topics) waitFor(what string, ok func() (bool, string)) {
	t.tb.Helper()
	so := ""
	if !t.waitUntil(func() (yes bool) { yes, so = ok(); return yes }) {
		t.tb.Fatalf("never came: %s (%s)", what, so)
	}
}

// waitUntil asks ok after each fetch and reports whether it came true in time.
func (t *Topics) waitUntil(ok func() bool) bool {
	late := time.NewTimer(Patience)
	defer late.Stop()
	for {
		t.mu.Lock()
		yes, news := ok(), t.changed
		t.mu.Unlock()
		if yes {
			return true
		}
		select {
		case <-news:
		case <-late.C:
			return false
		case <-t.tb.Context().Done():
			return false
		}
	}
}

// WaitForEnd waits until every record that the topics hold now was read.
func (t *Topics) WaitForEnd() {
	t.tb.Helper()
	var ends kadm.ListedOffsets
	var err error
	Eventually(t.tb, "every partition tells its end", func() bool { // a broker that was away may have no leaders for a while
		if ends, err = kadm.NewClient(t.client).ListEndOffsets(t.tb.Context(), t.names...); err == nil {
			err = ends.Error()
		}
		if err != nil {
			t.tb.Logf("asking for the end of the topics: %v", err)
		}
		return err == nil
	})
	t.waitFor("the end of the topics", func() (bool, string) {
		behind := ""
		ends.Each(func(o kadm.ListedOffset) {
			if o.Offset > t.nextOffsets[o.Topic][o.Partition] && behind == "" {
				behind = fmt.Sprintf("%s/%d at %d of %d", o.Topic, o.Partition, t.nextOffsets[o.Topic][o.Partition], o.Offset)
			}
		})
		return behind == "", behind
	})
}
