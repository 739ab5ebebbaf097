package kafka

import (
	"encoding/binary"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// requests watches the produce requests of a fake cluster: how many records each brought, and how many were under way at
// once. The first one is answered when gate is closed.
type requests struct {
	mu      sync.Mutex
	records []int
	under   int
	most    int
}

func (q *requests) watch(c *kfake.Cluster, gate <-chan struct{}, first chan<- struct{}) {
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
		q.under++
		q.most = max(q.most, q.under)
		hold := len(q.records) == 1
		q.mu.Unlock()
		if hold {
			close(first)
			c.SleepControl(func() { <-gate })
		}
		q.mu.Lock()
		q.under--
		q.mu.Unlock()
		return nil, nil, false
	})
}

// gathered sends one record, then many while its request is under way, and returns the requests that the cluster saw.
func gathered(t *testing.T) *requests {
	t.Helper()
	kc, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"), kfake.SleepOutOfOrder())
	q, gate, first := &requests{}, make(chan struct{}), make(chan struct{})
	q.watch(kc, gate, first)
	u := onFake(brokers...)
	u.cfg.RequestTimeout = patient // a request that is given up is sent again, beside the one that hangs
	r := open(t, u)
	r.send(t, rec("a", "k", "k/0"))
	r.Flush()
	select {
	case <-first:
	case <-time.After(patient):
		t.Fatal("no request arrives")
	}
	for i := 1; i < 100; i++ {
		r.send(t, rec("a", "k", fmt.Sprintf("k/%d", i)))
		r.Flush()
	}
	close(gate)
	r.acks.resolved(100)
	inOrder(t, read(t, brokers, "a"), 1, 100)
	return q
}

func TestOneBatchInFlightPerPartition(t *testing.T) {
	t.Parallel()
	q := gathered(t)
	if q.most != 1 {
		t.Fatalf("%d requests to one partition were under way at once, want one", q.most)
	}
}

func TestBatchesGrowWithLoad(t *testing.T) {
	t.Parallel()
	q := gathered(t)
	if len(q.records) != 2 || q.records[0] != 1 || q.records[1] != 99 {
		t.Fatalf("requests of %v records: what gathers while one is under way goes into the next, without a linger", q.records)
	}
}
