package kafka

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/record"
)

// TestN15_ARefusedRecordPullsItsKey: a real broker refuses records whose time lies too far ahead. Each is given back with
// all that follows it in its key, whichever batch that is in, in one call and in order; other keys and namespaces flow on.
func TestN15_ARefusedRecordPullsItsKey(t *testing.T) {
	t.Parallel()
	for name, codec := range map[string]string{"none": "none", "zstd": "zstd", "while it is sent": "none"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			topic := stacktest.Name(t)
			stacktest.CreateTopic(t, topic, 1, kafka.ConfigEntry{ConfigName: "message.timestamp.after.max.ms", ConfigValue: "3600000"})
			d := sit(t, setUp{cfg: Config{Compression: codec, MaxBatchBytes: 3000}})
			ns := func(x record.Record, ns string) record.Record {
				x.Headers = append(x.Headers, record.Header{Key: []byte("outrelay-ns"), Value: []byte(ns)})
				return x
			}
			const keys, each = 6, 50 // several batches
			bad := map[string]int{"k1": 3, "k4": 20}
			at := map[record.Ticket][2]int{} // key and number
			turned := map[string]int{}       // at the door: the refusal came while the test was still sending
			for i := range each {
				if name == "while it is sent" && i == each/2 {
					d.r.Flush()
					d.until("a key is given back", func() bool { return len(d.held) > 0 })
				}
				for k := range keys {
					key := fmt.Sprint("k", k)
					x := ns(rec(topic, key, fmt.Sprintf("%s/%d", key, i)), "one")
					if n, ok := bad[key]; ok && n == i {
						x.TimeMS += (24 * time.Hour).Milliseconds()
					}
					ticket, err := d.send(x)
					if n, ok := bad[key]; ok && i > n && errors.Is(err, record.ErrBlocked) {
						turned[key]++
						continue
					}
					if err != nil {
						t.Fatal(err)
					}
					at[ticket] = [2]int{k, i}
				}
			}
			other, err := d.send(ns(rec(topic, "k1", "k1 of another namespace"), "two"))
			if err != nil {
				t.Fatal(err)
			}
			side := rec(topic, "k1", "k1/50")
			if err := d.offer(ns(side, "one"), 999|record.Side); err != nil {
				t.Fatal(err)
			}
			at[999|record.Side] = [2]int{1, each}
			d.r.Flush()
			away := turned["k1"] + turned["k4"]
			kept := (each - bad["k1"]) + (each - bad["k4"]) // of the stream
			const sent = keys*each + 1 + 1
			until(t, "both keys are given back, and all else is acked", func() bool {
				d.mu.Lock()
				defer d.mu.Unlock()
				d.r.acks.mu.Lock()
				defer d.r.acks.mu.Unlock()
				return len(d.held)+len(d.r.acks.acked) == sent
			})
			beside := 0 // of the delivery by the side: it is pulled, unless its key was before
			if slices.Contains(d.given(), 999|record.Side) {
				beside = 1
			}
			if name == "while it is sent" && (beside > 0 || turned["k1"] == 0) {
				t.Error("the refusal came when all was sent")
			}
			d.answered(sent - kept - beside)
			if len(d.r.acks.refused) != 0 {
				t.Errorf("refused to the dispatcher's face: %v", d.r.acks.refused)
			}
			if _, ok := d.r.acks.acked[other]; !ok {
				t.Error("another namespace's record of the same key was held")
			}
			next := map[int]int{1: bad["k1"], 4: bad["k4"]}
			for _, call := range d.calls {
				first := map[int]bool{}
				for _, w := range call {
					k, i := at[w.Ticket][0], at[w.Ticket][1]
					if i != next[k] {
						t.Fatalf("k%d: %d is given back where %d should be", k, i, next[k])
					}
					next[k]++
					if refused := !first[k]; refused != (w.Why != nil) || !refused && !errors.Is(w.Held, record.ErrBlocked) {
						t.Errorf("k%d/%d: %v, %v", k, i, w.Why, w.Held)
					}
					if w.Why != nil && (w.Why.Class != record.RecordRefused || string(w.NS) != "one" || !strings.HasPrefix(string(w.ID), "k")) {
						t.Errorf("k%d/%d: %+v", k, i, w.Why)
					}
					first[k] = true
				}
				if len(call) < each-bad["k4"]-away {
					t.Errorf("a call with %d records: what follows in the key came later", len(call))
				}
			}
			if next[1] != each+beside-turned["k1"] || next[4] != each-turned["k4"] {
				t.Errorf("given back up to %v", next)
			}
			log := read(t, stacktest.Brokers(t), topic)[0]
			log = slices.DeleteFunc(log, func(r *kgo.Record) bool {
				return strings.Contains(string(r.Value), "another") || beside == 0 && string(r.Value) == string(side.Value)
			})
			count := map[string]int{}
			for _, r := range log {
				if want := fmt.Sprintf("%s/%d", r.Key, count[string(r.Key)]); string(r.Value) != want {
					t.Fatalf("%s stands where %s should", r.Value, want)
				}
				count[string(r.Key)]++
			}
			for k := range keys {
				key := fmt.Sprint("k", k)
				if want := cmp.Or(bad[key], each); count[key] != want {
					t.Errorf("%s has %d records, want %d", key, count[key], want)
				}
			}
		})
	}
}

// TestN15_PullReachesWhatWaitsForAGrowingTopic, and the batch that is still open.
func TestN15_PullReachesWhatWaitsForAGrowingTopic(t *testing.T) {
	t.Parallel()
	_, brokers := fake(t, kfake.NumBrokers(1))
	u := onFake(brokers...)
	u.noRun, u.cfg.MaxBatchBytes = true, 300
	d := sit(t, u)
	d.r.mu.Lock()
	top := d.r.findOrAddTopicLocked("t")
	top.addPartitions(1)
	p := top.partitions[0]
	d.r.mu.Unlock()
	send := func(from, to int) {
		for i := from; i < to; i++ {
			x := rec("t", fmt.Sprint("k", i%3), fmt.Sprint(i))
			if i%3 == 2 {
				x.Partition = 0
			}
			if _, err := d.send(x); err != nil {
				t.Fatal(err)
			}
		}
	}
	send(0, 30)
	if len(p.queue) < 3 || p.openBatch == nil {
		t.Fatalf("%d batches, want some", len(p.queue))
	}
	d.r.applyLayout(&Layout{Topics: map[string]TopicLayout{"t": {Partitions: make([]PartitionLayout, 2)}}})
	send(30, 60)
	d.r.mu.Lock()
	d.r.freezeLocked(p, p.queue[0], time.Now())
	d.r.refuseRecordsLocked(p, p.queue[0], &result{code: kafka.InvalidRecord, badRecords: []int{2}}) // a record of k2
	d.r.mu.Unlock()
	if len(d.calls) != 1 || len(d.calls[0]) != 20 {
		t.Fatalf("given back in %d calls", len(d.calls))
	}
	for i, w := range d.calls[0] {
		if w.Ticket != record.Ticket(3*i+2) || string(w.Key) != "k2" {
			t.Fatalf("%d: %+v", i, w)
		}
	}
	d.r.mu.Lock()
	defer d.r.mu.Unlock()
	if countRecords(p.queue) != 20 || countRecords(top.waiting) != 20 || d.r.unresolvedRecords != 40 || p.queue[0].frozen || p.queue[0].seq != 0 {
		t.Errorf("%d queued, %d waiting, %d in flight", countRecords(p.queue), countRecords(top.waiting), d.r.unresolvedRecords)
	}
	if p.openBatch == nil || p.openBatch != p.queue[len(p.queue)-1] {
		t.Error("the batch that takes records is not the last one")
	}
	var left []record.Ticket
	for _, b := range append(slices.Clone(p.queue), top.waiting...) {
		left = append(left, b.tickets...)
		if int(b.builder.Count()) != len(b.tickets) || len(b.wantedPartitions) != 0 && len(b.wantedPartitions) != len(b.tickets) {
			t.Errorf("a batch of %d records with %d tickets, %d parts", b.builder.Count(), len(b.tickets), len(b.wantedPartitions))
		}
	}
	if !slices.IsSorted(left) || len(left) != 40 {
		t.Errorf("left: %v", left)
	}
}

// TestN15_AClosedGateQueuesNothing: what Send turns away leaves no trace.
func TestN15_AClosedGateQueuesNothing(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 1)
	d := sit(t, setUp{})
	d.gates[topic+"/k"] = 1
	d.sequence(topic, 0, 10)
	if d.count() != 10 {
		t.Fatalf("%d are held, want 10", d.count())
	}
	if err := d.r.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	d.release() // outside of the stream's order the gate is open
	d.answered(10)
	inOrder(t, read(t, stacktest.Brokers(t), topic), 1, 10)
}

// TestN15_TooLargeIsRefusedOnBothWays: it is dead at once, and nothing of its key waits for it.
func TestN15_TooLargeIsRefusedOnBothWays(t *testing.T) {
	t.Parallel()
	topic := stacktest.Name(t)
	stacktest.CreateTopic(t, topic, 1, kafka.ConfigEntry{ConfigName: "max.message.bytes", ConfigValue: "2000"})
	d := sit(t, setUp{})
	all := make(chan struct{})
	d.r.claims.mu.Lock()
	d.r.claims.saved = func(map[string][]int64) { <-all } // the topic's limit is not known before all of it is sent
	d.r.claims.mu.Unlock()
	large := rec(topic, "k", "")
	large.Value = noise(4000)
	if _, err := d.send(large); err != nil {
		t.Fatal(err)
	}
	if err := d.offer(large, 77|record.Side); err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		if _, err := d.send(rec(topic, "k", fmt.Sprintf("k/%d", i))); err != nil {
			t.Fatal(err)
		}
	}
	close(all)
	d.answered(7)
	for _, k := range []record.Ticket{0, 77 | record.Side} {
		if why := d.r.acks.refused[k]; why == nil || why.Class != record.MessageTooLarge {
			t.Errorf("ticket %d: %+v", k, why)
		}
	}
	if len(d.calls) != 0 {
		t.Errorf("given back: %v", d.given())
	}
	inOrder(t, read(t, stacktest.Brokers(t), topic), 1, 5)
}
