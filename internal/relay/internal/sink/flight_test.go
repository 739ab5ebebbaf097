package sink

import (
	"encoding/binary"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// requests counts the produce requests of a fake cluster: the records of each, and the requests in
// flight at the same time.
type requests struct {
	mu       sync.Mutex
	records  []int
	inFlight int
	most     int
}

// countRequests counts the requests of c. The cluster responds to the first request when gate is closed.
func (q *requests) countRequests(c *kfake.Cluster, gate <-chan struct{}, first chan<- struct{}) {
	c.ControlKey(int16(kmsg.Produce), func(req kmsg.Request) (kmsg.Response, error, bool) {
		c.KeepControl()

		n := 0
		for _, t := range req.(*kmsg.ProduceRequest).Topics {
			for _, p := range t.Partitions {
				n += int(int32(binary.BigEndian.Uint32(p.Records[57:])))
			}
		}

		q.mu.Lock()
		q.records = append(q.records, n)
		q.inFlight++
		q.most = max(q.most, q.inFlight)
		hold := len(q.records) == 1
		q.mu.Unlock()

		if hold {
			close(first)
			c.SleepControl(func() { <-gate })
		}

		q.mu.Lock()
		q.inFlight--
		q.mu.Unlock()
		return nil, nil, false
	})
}

// sendDuringRequest sends one record, then many while its request is in flight. It returns the
// requests that the cluster has received.
func sendDuringRequest(t *testing.T) *requests {
	t.Helper()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"), kfake.SleepOutOfOrder())
	q, gate, first := &requests{}, make(chan struct{}), make(chan struct{})
	q.countRequests(kc, gate, first)

	u := fakeOptions(brokers...)
	// A request that times out would be sent again while the first one still hangs.
	u.cfg.RequestTimeout = testTimeout
	r := openSink(t, u)
	r.send(t, newRecord("a", "k", "k/0"))
	r.Flush()
	select {
	case <-first:
	case <-time.After(testTimeout):
		t.Fatal("no request has arrived")
	}

	for i := 1; i < 100; i++ {
		r.send(t, newRecord("a", "k", fmt.Sprintf("k/%d", i)))
		r.Flush()
	}
	close(gate)
	r.acks.waitResolved(100)
	requireInOrder(t, readTopic(t, brokers, "a"), 1, 100)
	return q
}

// TestOneBatchInFlightPerPartition: a partition has at most one request in flight.
func TestOneBatchInFlightPerPartition(t *testing.T) {
	t.Parallel()
	q := sendDuringRequest(t)
	if q.most != 1 {
		t.Fatalf("%d requests to one partition were in flight at the same time, want one", q.most)
	}
}

// TestBatchesGrowWithLoad: all records that gather during a request go into the next one, without
// linger.
func TestBatchesGrowWithLoad(t *testing.T) {
	t.Parallel()
	q := sendDuringRequest(t)
	if len(q.records) != 2 || q.records[0] != 1 || q.records[1] != 99 {
		t.Fatalf("requests of %v records, want 1 and 99", q.records)
	}
}
