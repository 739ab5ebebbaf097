package sink

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

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// TestN15_ARejectedRecordPullsItsKey: a real broker rejects records whose time is too far ahead.
// Each is given back with all records that follow it in its key, in any batch, in one call and in
// order. Other keys and namespaces flow.
func TestN15_ARejectedRecordPullsItsKey(t *testing.T) {
	t.Parallel()
	for name, codec := range map[string]string{"none": "none", "zstd": "zstd", "while it is sent": "none"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			topic := stacktest.Name(t)
			oneHour := kafka.ConfigEntry{ConfigName: "message.timestamp.after.max.ms", ConfigValue: "3600000"}
			stacktest.CreateTopic(t, topic, 1, oneHour)
			d := openWithHolder(t, sinkOptions{cfg: testConfig{Compression: codec, MaxBatchBytes: 3000}})
			ns := func(x record.Record, ns string) record.Record {
				x.Headers = append(x.Headers, record.Header{Key: []byte("outrelay-ns"), Value: []byte(ns)})
				return x
			}

			// So there are several batches.
			const keys, each = 6, 50
			bad := map[string]int{"k1": 3, "k4": 20}
			// The value is the number of the key, and the number of the record.
			at := map[record.Ticket][2]int{}
			// Send returns these records, because the rejection arrived while the test was still sending.
			blocked := map[string]int{}
			for i := range each {
				if name == "while it is sent" && i == each/2 {
					d.r.Flush()
					d.waitUntil("a key is given back", func() bool { return len(d.held) > 0 })
				}
				for k := range keys {
					key := fmt.Sprint("k", k)
					x := ns(newRecord(topic, key, fmt.Sprintf("%s/%d", key, i)), "one")
					if n, ok := bad[key]; ok && n == i {
						x.TimeMS += (24 * time.Hour).Milliseconds()
					}
					ticket, err := d.send(x)
					if n, ok := bad[key]; ok && i > n && errors.Is(err, record.ErrBlocked) {
						blocked[key]++
						continue
					}
					if err != nil {
						t.Fatal(err)
					}
					at[ticket] = [2]int{k, i}
				}
			}

			other, err := d.send(ns(newRecord(topic, "k1", "k1 of another namespace"), "two"))
			if err != nil {
				t.Fatal(err)
			}
			side := newRecord(topic, "k1", "k1/50")
			if err := d.sendCounted(ns(side, "one"), 999|record.Side); err != nil {
				t.Fatal(err)
			}
			at[999|record.Side] = [2]int{1, each}
			d.r.Flush()
			away := blocked["k1"] + blocked["k4"]
			kept := (each - bad["k1"]) + (each - bad["k4"]) // of the stream
			const sent = keys*each + 1 + 1
			stacktest.Eventually(t, "both keys are given back, and all else is acked", func() bool {
				d.mu.Lock()
				defer d.mu.Unlock()
				d.r.acks.mu.Lock()
				defer d.r.acks.mu.Unlock()
				return len(d.held)+len(d.r.acks.acked) == sent
			})
			// The side delivery is given back, unless its key was given back before.
			sides := 0
			if slices.Contains(d.withdrawnTickets(), 999|record.Side) {
				sides = 1
			}
			if name == "while it is sent" && (sides > 0 || blocked["k1"] == 0) {
				t.Error("the rejection came after all records were sent, so the test shows nothing")
			}
			d.waitResolved(sent - kept - sides)
			if len(d.r.acks.rejected) != 0 {
				t.Errorf("rejected without being given back: %v", d.r.acks.rejected)
			}
			if _, ok := d.r.acks.acked[other]; !ok {
				t.Error("a record of the same key in another namespace was not acked")
			}

			next := map[int]int{1: bad["k1"], 4: bad["k4"]}
			for _, call := range d.calls {
				first := map[int]bool{}
				for _, w := range call {
					k, i := at[w.Ticket][0], at[w.Ticket][1]
					if i != next[k] {
						t.Fatalf("k%d: number %d is given back, want %d", k, i, next[k])
					}
					next[k]++
					if rejected := !first[k]; rejected != (w.Rejection != nil) || !rejected && !errors.Is(w.Held, record.ErrBlocked) {
						t.Errorf("k%d/%d: given back with rejection %v and error %v", k, i, w.Rejection, w.Held)
					}
					identified := string(w.NS) == "one" && strings.HasPrefix(string(w.ID), "k")
					if w.Rejection != nil && (w.Rejection.Class != record.RecordRejected || !identified) {
						t.Errorf("k%d/%d: rejected with %+v", k, i, w.Rejection)
					}
					first[k] = true
				}
				if len(call) < each-bad["k4"]-away {
					t.Errorf("a call gave %d records back, want all that follow in the key", len(call))
				}
			}
			if next[1] != each+sides-blocked["k1"] || next[4] != each-blocked["k4"] {
				t.Errorf("given back up to %v", next)
			}

			log := readTopic(t, stacktest.Brokers(t), topic)[0]
			log = slices.DeleteFunc(log, func(r *kgo.Record) bool {
				return strings.Contains(string(r.Value), "another") || sides == 0 && string(r.Value) == string(side.Value)
			})

			count := map[string]int{}
			for _, r := range log {
				if want := fmt.Sprintf("%s/%d", r.Key, count[string(r.Key)]); string(r.Value) != want {
					t.Fatalf("offset %d contains %s, want %s", r.Offset, r.Value, want)
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

// TestN15_PullReachesTheOpenBatch: records of the key are also given back from the batches that still
// take records.
func TestN15_PullReachesTheOpenBatch(t *testing.T) {
	t.Parallel()
	_, brokers := newFakeCluster(t, kfake.NumBrokers(1))
	u := fakeOptions(brokers...)
	u.noRun, u.cfg.MaxBatchBytes = true, 300
	d := openWithHolder(t, u)
	d.r.mu.Lock()
	top := d.r.findOrAddTopicLocked("t")
	top.addPartitions(1)
	p := top.partitions[0]
	d.r.mu.Unlock()
	for i := range 60 {
		if _, err := d.send(newRecord("t", fmt.Sprint("k", i%3), fmt.Sprint(i))); err != nil {
			t.Fatal(err)
		}
	}
	if len(p.queue) < 3 || p.openBatch == nil {
		t.Fatalf("%d batches, want at least 3 with an open one", len(p.queue))
	}

	d.r.mu.Lock()
	l := &loop{sink: d.r.Sink}
	l.freezeLocked(p, p.queue[0], time.Now())
	badRecord := kafkawire.ProduceResult{Code: kafka.InvalidRecord, BadRecords: []int{2}} // a record of k2
	l.rejectRecordsLocked(p, p.queue[0], &badRecord)
	d.r.mu.Unlock()
	if len(d.calls) != 1 || len(d.calls[0]) != 20 {
		t.Fatalf("given back in %d calls, want 20 records in one call", len(d.calls))
	}
	for i, w := range d.calls[0] {
		if w.Ticket != record.Ticket(3*i+2) || string(w.Key) != "k2" {
			t.Fatalf("record %d that was given back: %+v", i, w)
		}
	}

	d.r.mu.Lock()
	defer d.r.mu.Unlock()
	queued, unresolved := countRecords(p.queue), d.r.batches.unresolvedRecords
	if queued != 40 || unresolved != 40 || p.queue[0].frozen || p.queue[0].seq != 0 {
		t.Errorf("%d queued, %d unresolved, want 40, 40", queued, unresolved)
	}
	if p.openBatch == nil || p.openBatch != p.queue[len(p.queue)-1] {
		t.Error("the batch that takes records is not the last one")
	}
	var left []record.Ticket
	for _, b := range p.queue {
		left = append(left, b.tickets...)
		if count := int(b.builder.Count()); count != len(b.tickets) {
			t.Errorf("a batch of %d records has %d tickets", count, len(b.tickets))
		}
	}
	if !slices.IsSorted(left) || len(left) != 40 {
		t.Errorf("records left: %v, want 40 in order", left)
	}
}

// TestN15_AClosedGateQueuesNothing: a record that a gate keeps from Send is not queued.
func TestN15_AClosedGateQueuesNothing(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 1)
	d := openWithHolder(t, sinkOptions{})
	d.gates[topic+"/k"] = 1
	d.sendSequence(topic, 0, 10)
	if d.heldCount() != 10 {
		t.Fatalf("%d records are held, want 10", d.heldCount())
	}
	d.r.requireDrained(t)

	// Gates are open for side deliveries.
	d.release()
	d.waitResolved(10)
	requireInOrder(t, readTopic(t, stacktest.Brokers(t), topic), 1, 10)
}

// TestN15_TooLargeIsRejectedOnBothWays: a record that is too large is a dead letter at once, as a
// stream and as a side delivery. No record of its key waits for it.
func TestN15_TooLargeIsRejectedOnBothWays(t *testing.T) {
	t.Parallel()
	topic := stacktest.Name(t)
	stacktest.CreateTopic(t, topic, 1, kafka.ConfigEntry{ConfigName: "max.message.bytes", ConfigValue: "2000"})
	d := openWithHolder(t, sinkOptions{})

	// The topic is open, and its limit known, only after all records are sent.
	allSent := make(chan struct{})
	d.r.claims.mu.Lock()
	d.r.claims.saved = func(map[string][]int64) { <-allSent }
	d.r.claims.mu.Unlock()

	large := newRecord(topic, "k", "")
	large.Value = randomBytes(4000)
	if _, err := d.send(large); err != nil {
		t.Fatal(err)
	}
	if err := d.sendCounted(large, 77|record.Side); err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		if _, err := d.send(newRecord(topic, "k", fmt.Sprintf("k/%d", i))); err != nil {
			t.Fatal(err)
		}
	}
	close(allSent)
	d.waitResolved(7)
	for _, k := range []record.Ticket{0, 77 | record.Side} {
		if why := d.r.acks.rejected[k]; why == nil || why.Class != record.MessageTooLarge {
			t.Errorf("ticket %d: rejected with %+v, want MessageTooLarge", k, why)
		}
	}
	if len(d.calls) != 0 {
		t.Errorf("given back: %v, want none", d.withdrawnTickets())
	}
	requireInOrder(t, readTopic(t, stacktest.Brokers(t), topic), 1, 5)
}
