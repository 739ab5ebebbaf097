package sink

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// TestN11_ParkingChaos: partitions are parked repeatedly, some with heads whose outcome is unknown,
// while leaders move, responses are lost, connections are cut and sinks end. Records that were
// given back are sent again all the time. No record is lost or sent twice, each key is in order,
// and each ack has the offset of its record.
func TestN11_ParkingChaos(t *testing.T) {
	t.Parallel()
	const keys, least, partitions = 40, 80, 8
	var on, forbidden atomic.Bool
	timeout := 250 * time.Millisecond
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(3), kfake.SeedTopics(partitions, "a"), kfake.SleepOutOfOrder())
	sometimes := func(kmsg.Request) bool { return on.Load() && rand.IntN(100) < 5 }
	for _, e := range []*kerr.Error{kerr.RequestTimedOut, kerr.NotEnoughReplicasAfterAppend, kerr.NotEnoughReplicas} {
		kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Err: e, Count: -1, When: sometimes})
	}
	kc.Fault(kfake.Fault{
		Keys:       []kmsg.Key{kmsg.Produce},
		Partitions: []int32{0, 1, 2, 3},
		Err:        kerr.TopicAuthorizationFailed,
		Count:      -1,
		When:       func(kmsg.Request) bool { return forbidden.Load() },
	})

	d := openWithHolder(t, sinkOptions{
		cfg: testConfig{
			Brokers:        brokers,
			RequestTimeout: timeout,
			MaxBatchBytes:  1000,
			Dial:           flakyDial(&on),
			ParkAfter:      5 * time.Millisecond,
		},
		every: 300 * time.Millisecond,
	})
	on.Store(true)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	every := func(d time.Duration, f func(i int)) {
		wg.Go(func() {
			tick := time.NewTicker(d)
			defer tick.Stop()
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				case <-tick.C:
					f(i)
				}
			}
		})
	}

	every(60*time.Millisecond, func(int) { _ = kc.MoveTopicPartition("a", rand.Int32N(partitions), rand.Int32N(3)) })
	every(150*time.Millisecond, func(i int) { forbidden.Store(i%2 == 0) })

	ends := 0
	openNextIfEnded := func() {
		select {
		case err := <-d.r.ended:
			if !errors.Is(err, ErrReopen) && !errors.Is(err, ErrBroken) {
				t.Fatal(err)
			}
			ends++
			d.openNext()
		default:
		}
	}

	pace := time.NewTicker(30 * time.Millisecond)
	defer pace.Stop()

	// The test needs parked partitions, and sinks that ended for a batch that may be appended.
	seen := func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.calls) > 0 && ends > 1
	}
	each := 0
	for i := 0; i < least || i < 10*least && !seen(); i, each = i+1, i+1 {
		for k := range keys {
			_, _ = d.send(newRecord("a", fmt.Sprint("key", k), fmt.Sprintf("key%d/%d", k, i)))
		}
		d.r.Flush()
		if i%2 == 1 {
			d.tryRelease()
		}
		openNextIfEnded()
		<-pace.C
	}

	on.Store(false)
	close(stop)
	wg.Wait()
	forbidden.Store(false)
	stacktest.Eventually(t, "all records are acked", func() bool {
		openNextIfEnded()
		if d.heldCount() > 0 {
			d.tryRelease()
		}
		d.r.acks.mu.Lock()
		defer d.r.acks.mu.Unlock()
		return len(d.r.acks.acked) == keys*each
	})
	d.waitResolved(keys * each)

	log := readTopic(t, brokers, "a")
	requireInOrder(t, log, keys, each)

	valueAt := map[place]string{}
	for _, list := range log {
		for _, g := range list {
			valueAt[place{record.TopicPartition{Topic: "a", Partition: g.Partition}, g.Offset}] = string(g.Value)
		}
	}
	side := 0
	for k, at := range d.r.acks.acked {
		if k.IsSide() {
			side++
		}
		i := int(k &^ record.Side)
		if want := fmt.Sprintf("key%d/%d", i%keys, i/keys); valueAt[at] != want {
			t.Fatalf("event %d was acked at %v, which contains %q, want %q", i, at, valueAt[at], want)
		}
	}
	if side == 0 || ends == 0 {
		t.Errorf("%d side deliveries and %d ended sinks, want some of each", side, ends)
	}
	t.Logf("%d of %d records as side deliveries, given back in %d calls; %d sinks", side, keys*each, len(d.calls), ends+1)
}
